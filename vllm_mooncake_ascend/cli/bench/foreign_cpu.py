"""Noise: cores that processes other than ours keep busy, from /proc. Linux only.

The kernel counts in ticks of 10 ms for each core, so a figure of less than a tenth of a second is coarse. Interrupts are
nobody's process and so count as foreign; those of our own loopback traffic are a few hundredths of a core.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from vllm_mooncake_ascend.cli import cpu_use

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = (3, 4)
"""Of /proc/stat, behind the word `cpu`: idle, and idle while a disk works."""
_GUEST_FIELDS = (8, 9)
"""Time of guests is in that of users already."""


def busy_seconds(stat_text: str) -> float:
    """CPU seconds of all cores together since the machine started, from the text of /proc/stat."""
    ticks = [int(word) for word in stat_text.partition("\n")[0].split()[1:]]
    return sum(found for index, found in enumerate(ticks) if index not in (*_IDLE_FIELDS, *_GUEST_FIELDS)) / _TICKS_PER_S


class ForeignCpu:
    """From its making on, for this process and all it has started."""

    def __init__(self) -> None:
        self._own_s, self._busy_s, self._started_s = _snapshot()

    def cores(self) -> float:
        """Mean so far, never below 0."""
        own_s, busy_s, now_s = _snapshot()
        elapsed_s = max(now_s - self._started_s, 1e-3)
        return max(0.0, (busy_s - self._busy_s) - (own_s - self._own_s)) / elapsed_s


def _snapshot() -> tuple[float, float, float]:
    return cpu_use.total_cpu_seconds(os.getpid()), busy_seconds(Path("/proc/stat").read_text()), time.monotonic()
