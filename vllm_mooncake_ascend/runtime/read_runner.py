"""ReadRunner: one decode worker's reads, as its transfer thread runs them. Used by that thread alone.

It plans orders, runs the engine calls the reader machine asks for, and answers each read, of one part or several, with
exactly one ReadEnded, whatever raises. `_open` is the book of reads that have no answer yet.

A call of UNKNOWN outcome, or one that raised, is fenced at once; it is FAILED exactly if the fence holds. What the planner
cannot plan is REFUSED: no call was made. When the machine raises, which is a bug of ours, no call is under way, so that
nothing can land any more: all its reads end FAILED, and a fresh machine goes on.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from vllm_mooncake_ascend.engines.base import ReadResult, TransferEngine
from vllm_mooncake_ascend.errors import MooncakeAscendError
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.p2p import actions, counters, events
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.read_plans import Call, ReadPlans
from vllm_mooncake_ascend.types import Outcome, RequestId
from vllm_mooncake_ascend.wire.steps import ReadEnded, ReadOrder, WorkerStep

logger = logging.getLogger(__name__)


class Audience(Protocol):
    """Who is told; called from the transfer thread."""

    def read_ended(self, ended: ReadEnded) -> None: ...

    def count(self, name: str, label: str = "", amount: float = 1.0) -> None: ...

    def observe(self, name: str, value: float) -> None: ...


class ReaderMachine(Protocol):
    """What is needed of `p2p.reader.Reader`."""

    def handle(self, event: events.ReaderEvent, now: float) -> list[actions.ReaderAction]: ...

    def next_timer(self) -> float | None: ...


@dataclasses.dataclass(slots=True)
class _OpenRead:
    """A read that has no answer yet."""

    first: ReadOrder
    """Its first part."""
    num_parts: int = 0


class ReadRunner:
    """All reads of one worker, each of one part or several.

    Args:
        make_reader: a fresh machine, at the start and after a bug.
        is_strict: a bug of the machine is raised.
    """

    def __init__(
        self,
        engine: TransferEngine,
        plans: ReadPlans,
        audience: Audience,
        *,
        rank: int,
        make_reader: Callable[[], ReaderMachine],
        is_strict: bool,
    ) -> None:
        self._engine = engine
        self._plans = plans
        self._audience = audience
        self._rank = rank
        self._make_reader = make_reader
        self._is_strict = is_strict
        self._reader = make_reader()
        self._open: dict[RequestId, _OpenRead] = {}
        self._next_call: actions.StartCall | None = None

    # --- what the transfer thread calls -----------------------------------------------------------------------------

    def take(self, steps: Sequence[WorkerStep]) -> None:
        """Do what the steps ask for, each in the order `WorkerStep` prescribes; runs no engine call."""
        for step in steps:
            for order in step.reads:
                if order.part == 0:
                    self._open.setdefault(order.request_id, _OpenRead(order))
        for step in steps:
            for peer in step.peers:
                self._plans.learn(peer)
            for order in step.reads:
                self._take_order(order)
            for request_id in step.cancels:
                self._feed(events.ReadCancelled(request_id=request_id))
            for incarnation in step.forget:
                self._plans.forget(incarnation)

    def run_call(self) -> events.CallEnded | None:
        """Run the engine call whose turn it is, to be told to the machine by `call_ended`; None when there is none."""
        call, self._next_call = self._next_call, None
        if call is None:
            return None
        session, batch = self._plans.call(call.request_id, call.call_index)
        result = self._read((session, batch))
        return events.CallEnded(
            request_id=call.request_id,
            call_index=call.call_index,
            outcome=result.outcome,
            reason=result.reason,
            num_bytes=batch.num_bytes if result.outcome is Outcome.DONE else 0,
            num_descriptors=len(batch),
        )

    def call_ended(self, ended: events.CallEnded) -> None:
        """Let the machine choose the next call; after steps that came meanwhile, so that a cancel stops it in time."""
        self._feed(ended)

    def idle_wait_s(self) -> float | None:
        """How long there is nothing to do unless a step comes; None: for ever."""
        timer_s = self._reader.next_timer()
        return None if timer_s is None else max(0.0, timer_s - boot_s())

    def fire_timer(self) -> None:
        """Let the machine do what is due."""
        timer_s = self._reader.next_timer()
        if timer_s is not None and timer_s <= boot_s():
            self._feed(events.TimerFired())

    def cancel_all(self) -> None:
        """No further call: every open read ends as what it has come to, that of `run_call` when it is told."""
        for request_id in list(self._open):
            self._feed(events.ReadCancelled(request_id=request_id))

    def end_all(self, outcome: Outcome, reason: str) -> None:
        """Answer every open order, past the machine."""
        for read in list(self._open.values()):
            self._answer(ended_as(read.first, self._rank, outcome, reason))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _take_order(self, order: ReadOrder) -> None:
        """Plan it; whatever the planner says or raises, no call was made yet."""
        read = self._open.get(order.request_id)
        if read is None or read.first.transfer_id != order.transfer_id or read.num_parts != order.part:
            return  # it came twice, or its read has ended: the machine broke, or a part before it failed
        if order.part == 0 and read.first is not order:
            return
        read.num_parts += 1
        event: events.ReaderEvent
        try:
            calls = self._plans.plan(order)
        except Exception as error:
            if not isinstance(error, MooncakeAscendError):
                logger.exception("an order could not be planned; please report this: transfer_id=%s", order.transfer_id)
                self._audience.count(names.INVARIANTS_BROKEN, "reader")
            event = events.ReadRefused(
                transfer_id=order.transfer_id,
                request_id=order.request_id,
                reason=f"the read cannot be planned: {error}",
                part=order.part,
            )
        else:
            event = events.ReadPlanned(
                transfer_id=order.transfer_id,
                request_id=order.request_id,
                session=calls[0][0] if calls else "",
                num_calls=len(calls),
                part=order.part,
                generation=order.generation,
                is_last=order.is_last,
            )
        if counters.ORDERS_IGNORED in self._feed(event):  # it came again after it had ended
            self._open.pop(order.request_id, None)
            self._plans.drop(order.request_id)

    def _read(self, call: Call) -> ReadResult:
        """One engine call. Engines do not raise for what peers do; if one does, nothing is known of its bytes."""
        session, batch = call
        try:
            result = self._engine.read(session, batch)
        except Exception as error:
            logger.exception("the transfer engine raised; please report this: session=%s", session)
            result = ReadResult(outcome=Outcome.UNKNOWN, reason=f"the transfer engine raised {type(error).__name__}: {error}")
        if result.outcome is Outcome.UNKNOWN and self._fence():
            return ReadResult(outcome=Outcome.FAILED, reason=f"{result.reason} (fenced: nothing of it can land any more)")
        return result

    def _fence(self) -> bool:
        try:
            holds = self._engine.fence()
        except Exception:
            logger.exception("the transfer engine raised while it was fenced; please report this")
            holds = False
        self._audience.count(names.FENCES, "fenced" if holds else "not_fenced")
        return holds

    def _feed(self, event: events.ReaderEvent) -> set[str]:
        """Let the machine take an event and do what it asks for; returns the names of what it counted."""
        try:
            wanted = self._reader.handle(event, boot_s())
        except Exception as error:
            self._start_over(event, error)
            return set()
        for action in wanted:
            self._do(action)
        return {action.name for action in wanted if isinstance(action, actions.Count)}

    def _do(self, action: actions.ReaderAction) -> None:
        match action:
            case actions.StartCall():
                assert self._next_call is None, "one call at a time"
                self._next_call = action
            case actions.EndRead():
                self._answer(action.ended)
            case actions.Count():
                self._audience.count(action.name, action.reason, action.amount)
            case actions.Note():
                logger.warning("transfer_id=%s %s", action.transfer_id, action.text)

    def _answer(self, ended: ReadEnded) -> None:
        """The one place that answers an order, once."""
        self._plans.drop(ended.request_id)
        if self._open.pop(ended.request_id, None) is None:
            return
        if ended.outcome is Outcome.DONE and ended.num_bytes:
            self._audience.observe(names.READ_DURATION, ended.seconds)
        if ended.outcome is not Outcome.DONE:
            logger.warning(
                "transfer_id=%s request_id=%s read %s: %s",
                ended.transfer_id,
                ended.request_id,
                ended.outcome.value,
                ended.reason,
            )
        self._audience.read_ended(ended)

    def _start_over(self, event: events.ReaderEvent, error: Exception) -> None:
        """The machine raised between two calls: its reads end, with what is known of the call that ended last."""
        logger.error(
            "the reader's state machine broke; please report this: event=%s", msgspec.to_builtins(event), exc_info=error
        )
        self._audience.count(names.INVARIANTS_BROKEN, "reader")
        if self._is_strict:
            raise error
        if isinstance(event, events.CallEnded) and event.outcome is Outcome.UNKNOWN and event.request_id in self._open:
            self._answer(ended_as(self._open[event.request_id].first, self._rank, Outcome.UNKNOWN, event.reason))
        self.end_all(Outcome.FAILED, f"the reader's state machine broke: {error}")
        self._reader = self._make_reader()
        self._next_call = None


def ended_as(order: ReadOrder, rank: int, outcome: Outcome, reason: str) -> ReadEnded:
    """An answer past the machine."""
    return ReadEnded(
        transfer_id=order.transfer_id,
        request_id=order.request_id,
        rank=rank,
        outcome=outcome,
        reason=reason,
        num_bytes=0,
        num_descriptors=0,
        seconds=0.0,
    )
