"""Driver: runs the state machines of one scheduler-role connector, one event at a time, whoever brings it.

vLLM's scheduler thread and the control thread both feed events; a lock makes them take turns, and what the machine asks
for is handed on in its order before the next event is taken. Everything is noted in the flight recorder.

When a machine raises, it is a bug of ours. It costs the transfer the event was about: its story goes to the log, it is
counted, its blocks stay pinned, and a request vLLM waits for is reported failed. Where no transfer is to be blamed (a
timer), and in strict mode, the exception goes on to the caller and ends the engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.flight_recorder import FlightRecorder
from vllm_mooncake_ascend.runtime.unreported import Unreported
from vllm_mooncake_ascend.types import RequestId

logger = logging.getLogger(__name__)

Event = events.ProducerEvent | events.ConsumerEvent
Action = actions.ProducerAction | actions.ConsumerAction

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class ProducerMachine(Protocol):
    """What is needed of `p2p.producer.Producer`."""

    def handle(self, event: events.ProducerEvent, now: float) -> list[actions.ProducerAction]: ...

    def next_timer(self) -> float | None: ...


class ConsumerMachine(Protocol):
    """What is needed of `p2p.consumer.Consumer`."""

    def handle(self, event: events.ConsumerEvent, now: float) -> list[actions.ConsumerAction]: ...

    def next_timer(self) -> float | None: ...


class Driver:
    """Runs at most one machine of each role; events for a role the engine does not have are ignored.

    Args:
        carry_out: takes what the machines ask for, in order; called under the lock, so it must not wait.
        is_strict: raise every broken invariant.
    """

    def __init__(self, carry_out: Callable[[Action], None], *, is_strict: bool) -> None:
        self._carry_out = carry_out
        self._is_strict = is_strict
        self.lock = threading.RLock()
        """Held while a machine runs; whoever asks a machine something holds it too."""
        self._producer: ProducerMachine | None = None
        self._consumer: ConsumerMachine | None = None
        self._recorder = FlightRecorder()
        self._unreported = Unreported()

    def add_producer(self, producer: ProducerMachine) -> None:
        self._producer = producer

    def add_consumer(self, consumer: ConsumerMachine) -> None:
        self._consumer = consumer

    def feed_producer(self, event: events.ProducerEvent) -> None:
        """Let the producer take an event, and carry out what it asks for."""
        producer = self._producer
        if producer is not None:
            self._run("producer", event, lambda now: producer.handle(event, now))

    def feed_consumer(self, event: events.ConsumerEvent) -> None:
        """Let the consumer take an event, and carry out what it asks for."""
        consumer = self._consumer
        if consumer is None:
            return
        with self.lock:
            if isinstance(event, events.BlocksAllocated) and event.num_remote_tokens > 0:
                self._unreported.owe(event.request_id, event.loaded_block_ids)
            self._run("consumer", event, lambda now: consumer.handle(event, now))

    def next_timer_s(self) -> float | None:
        """When `fire_timers` is due, None: never."""
        with self.lock:
            timers = [machine.next_timer() for machine in (self._producer, self._consumer) if machine is not None]
        return min((timer_s for timer_s in timers if timer_s is not None), default=None)

    def fire_timers(self) -> float | None:
        """Let machines whose time has come do what is due; returns seconds until the next time, None: never."""
        fired = events.TimerFired()
        with self.lock:
            if _is_due(self._producer):
                self.feed_producer(fired)
            if _is_due(self._consumer):
                self.feed_consumer(fired)
            next_s = self.next_timer_s()
        return None if next_s is None else max(0.0, next_s - boot_s())

    def is_broken(self, request_id: RequestId) -> bool:
        """The request's transfer was ended by a bug: nothing remote is to be had for it."""
        with self.lock:
            return self._unreported.is_broken(request_id)

    def story(self, transfer_id: str) -> str:
        """The last things that happened to a transfer, for a log or the operator."""
        return self._recorder.story(transfer_id)

    def _run(self, role: str, event: Event, handle: Callable[[float], Sequence[Action]]) -> None:
        with self.lock:
            now = boot_s()
            self._recorder.note(event, now)
            try:
                wanted = handle(now)
            except Exception as error:
                self._break_off(role, event, error)
                return
            for action in wanted:
                self._do(action, now)

    def _do(self, action: Action, now: float) -> None:
        if isinstance(action, actions.ReportReceive) and not self._unreported.may_report(action.report.request_id):
            self._recorder.note(action, now)
            return
        if isinstance(action, actions.Note):
            self._tell(action)
            return
        if not isinstance(action, actions.Count):
            self._recorder.note(action, now)
        self._carry_out(action)

    def _tell(self, note: actions.Note) -> None:
        story = self._recorder.story(note.transfer_id) if note.level != "info" else ""
        logger.log(_LEVELS[note.level], "transfer_id=%s %s%s", note.transfer_id, note.text, f"\n{story}" if story else "")

    def _break_off(self, role: str, event: Event, error: Exception) -> None:
        """A machine raised: one transfer pays, or nobody may go on."""
        transfer_id = self._recorder.transfer_of(event)
        logger.error(
            "the %s's state machine broke; please report this: transfer_id=%s event=%s\n%s",
            role,
            transfer_id,
            type(event).__name__,
            self._recorder.story(transfer_id),
            exc_info=error,
        )
        self._carry_out(actions.Count(name=names.INVARIANTS_BROKEN, reason=role))
        if self._is_strict or isinstance(event, (events.TimerFired, events.LeasesRevoked)):
            raise error
        request_id = _request_of(event) if role == "consumer" else None
        report = self._unreported.break_off(request_id) if request_id else None
        if report is not None:
            self._carry_out(actions.ReportReceive(report=report))


def _is_due(machine: ProducerMachine | ConsumerMachine | None) -> bool:
    timer_s = None if machine is None else machine.next_timer()
    return timer_s is not None and timer_s <= boot_s()


def _request_of(event: Event) -> RequestId | None:
    """The local request a consumer's event is about."""
    match event:
        case events.ProducerSpoke():
            return getattr(event.message, "request_id", None)
        case events.RankReadEnded():
            return event.ended.request_id
        case _:
            return getattr(event, "request_id", None)
