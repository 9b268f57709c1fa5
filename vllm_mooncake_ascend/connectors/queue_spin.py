"""vLLM's own message-queue spin, tamed on CPU.

On CPU vLLM always runs its workers as processes behind a shared-memory queue whose readers spin for one second after each
message (vllm/distributed/device_communicators/shm_broadcast.py, SpinCondition). While a request waits for remote KV the
engine steps all the time, so one core of the decode engine is burnt for nothing, and on small machines it is the core that
prefill needs. The queue has a second way to wait, a socket poll; with a shorter busy loop readers go to it sooner.

That way loses wake-ups: the writer's socket holds one message, and drops the next one when it has not yet noticed that the
reader has taken the first, so a reader can sleep on a queue that has something for it until the poll ends after 5 s. Behind
a spin of a second that hardly ever shows; behind a short one it did several times in 48 tokens. So a tamed reader polls for a
moment only, and then looks for itself.

Only on CPU, only when the setting is found, and never with `"tame_queue_spin": false`.
"""

from __future__ import annotations

from typing import Any

from vllm_mooncake_ascend.connectors import versions

BUSY_LOOP_S = 0.0005
"""Long enough that the steps of a running batch still meet a spinning reader's fast path on their way, short enough that
an engine that only waits costs nothing to speak of."""
POLL_MS = 5
"""What a lost wake-up may cost. Two hundred looks a second are less than 2 % of a core (measured)."""


def tame() -> int:
    """Shorten busy loop and poll of every queue reader of this process; returns how many were found."""
    conditions = versions.spin_conditions()
    for condition in conditions:
        if condition.busy_loop_s > BUSY_LOOP_S:
            condition.busy_loop_s = BUSY_LOOP_S
            _poll_for_a_moment(condition)
    return len(conditions)


def _poll_for_a_moment(condition: Any) -> None:
    poll = condition.wait

    def wait(timeout_ms: int | None = None) -> None:
        poll(timeout_ms=POLL_MS if timeout_ms is None else min(timeout_ms, POLL_MS))

    condition.wait = wait
