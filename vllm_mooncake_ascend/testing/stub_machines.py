"""ScriptedConsumer: a consumer that does what a test tells it, to see what its shell makes of it."""

from __future__ import annotations

from vllm_mooncake_ascend.p2p import actions, events

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
