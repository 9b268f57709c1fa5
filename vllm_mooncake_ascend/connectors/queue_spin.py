"""vLLM's own message-queue spin, tamed on CPU.

On CPU vLLM always runs its workers as processes behind a shared-memory queue whose readers spin for one second after each
message (vllm/distributed/device_communicators/shm_broadcast.py, SpinCondition). While a request waits for remote KV the
engine steps all the time, so one core of the decode engine is burnt for nothing, and on small machines it is the core that
prefill needs. The queue has a second way to wait, a socket poll.

That way loses wake-ups: the writer's socket holds one message, and drops the next one when it has not yet noticed that the
reader has taken the first, so a reader can sleep on a queue that has something for it until the poll ends after 5 s. Behind a
spin of a second that hardly ever shows; behind a short one it is nearly every second answer of a step, as vLLM asks a worker
twice: for the forward pass, and for tokens. So a tamed reader looks for itself: between naps right after a message, then
between polls of a moment.

Only on CPU, only when the setting is found, and never with `"tame_queue_spin": false`.
"""

from __future__ import annotations

import time
from typing import Any

from vllm_mooncake_ascend.connectors import versions

SOON_S = 0.003
"""What comes soon after another message, whose notification is the one that is lost, comes within this."""
NAP_S = 0.0002
"""How late its reader may find it. A nap costs 8 us, and on a core that computes it is taken from a step."""
RECENT_S = 0.1
"""A queue of an engine that decodes, or waits for KV, has a message within this."""
RECENT_POLL_MS = 2
"""How late its reader may find what it was not woken for."""
POLL_MS = 5
"""The same after a longer silence. Two hundred looks a second are less than 2 % of a core (measured)."""


def tame() -> int:
    """Replace the busy loop of every queue reader of this process, and shorten its poll; returns how many were found."""
    conditions = versions.spin_conditions()
    for condition in conditions:
        if condition.busy_loop_s > 0:
            condition.busy_loop_s = 0.0
            # No attribute that holds it: vLLM's sockets must not wait for the garbage collector.
            condition.__class__ = _tamed(type(condition))
    return len(conditions)


def _tamed(kind: Any) -> type:
    def wait(self: Any, timeout_ms: int | None = None) -> None:
        silence_s = time.monotonic() - self.last_read
        if silence_s < SOON_S:
            time.sleep(NAP_S)
        else:
            moment_ms = RECENT_POLL_MS if silence_s < RECENT_S else POLL_MS
            kind.wait(self, timeout_ms=moment_ms if timeout_ms is None else min(timeout_ms, moment_ms))

    return type(f"Tamed{kind.__name__}", (kind,), {"wait": wait})
