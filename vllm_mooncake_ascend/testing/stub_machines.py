"""Machines that do what a test tells them, to see what their shells make of it."""

from __future__ import annotations

from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.pool import actions as pool_actions
from vllm_mooncake_ascend.pool import events as pool_events

Reply = list[actions.ConsumerAction] | Exception


class ScriptedConsumer:
    """Follows `runtime.driver.ConsumerMachine`: answers the events it gets with the replies of the script, in order."""

    def __init__(self, script: list[Reply], *, timer_s: float | None = None) -> None:
        self._script = script
        self.events: list[events.ConsumerEvent] = []
        self.timer_s = timer_s
        self.handled_at_s = 0.0

    def handle(self, event: events.ConsumerEvent, now: float) -> list[actions.ConsumerAction]:
        self.events.append(event)
        self.handled_at_s = now
        self.timer_s = None
        reply = self._script.pop(0) if self._script else []
        if isinstance(reply, Exception):
            raise reply
        return reply

    def next_timer(self) -> float | None:
        return self.timer_s


PoolReply = list[pool_actions.WorkerAction] | Exception


class ScriptedPoolWorker:
    """Follows `runtime.pool_driver.PoolMachine`, as a worker's machine; `timer_s` stays what it is."""

    def __init__(self, script: list[PoolReply], *, timer_s: float | None = None) -> None:
        self._script = script
        self.events: list[pool_events.WorkerEvent] = []
        self.timer_s = timer_s

    def handle(self, event: pool_events.WorkerEvent, now: float) -> list[pool_actions.WorkerAction]:  # noqa: ARG002
        self.events.append(event)
        reply = self._script.pop(0) if self._script else []
        if isinstance(reply, Exception):
            raise reply
        return reply

    def next_timer(self) -> float | None:
        return self.timer_s
