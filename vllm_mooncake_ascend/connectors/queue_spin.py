"""vLLM's own message-queue spin, tamed on CPU.

On CPU vLLM always runs its workers as processes behind a shared-memory queue whose readers spin for one second after each
message (vllm/distributed/device_communicators/shm_broadcast.py, SpinCondition). While a request waits for remote KV the
engine steps all the time, so one core of the decode engine is burnt for nothing, and on small machines it is the core that
prefill needs. The queue has a second way to wait, a socket poll; with a shorter busy loop readers go to it sooner.

Only on CPU, only when the setting is found, and never with `"tame_queue_spin": false`.
"""

from __future__ import annotations

from vllm_mooncake_ascend.connectors import versions

BUSY_LOOP_S = 0.0005
"""Long enough that the steps of a running batch still meet a spinning reader's fast path on their way, short enough that
an engine that only waits costs nothing to speak of."""


def tame() -> int:
    """Shorten the busy loop of every queue reader of this process; returns how many were found."""
    conditions = versions.spin_conditions()
    for condition in conditions:
        condition.busy_loop_s = min(condition.busy_loop_s, BUSY_LOOP_S)
    return len(conditions)
