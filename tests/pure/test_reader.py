"""Reader: given these events, exactly these actions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from tests.pure.stage import Stage, T
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.p2p import actions, counters, events, reader
from vllm_mooncake_ascend.p2p.reader import Reader
from vllm_mooncake_ascend.p2p.settings import ReaderSettings
from vllm_mooncake_ascend.types import Outcome, RequestId


class ReaderStage(Stage):
    """A reader of rank 3."""

    def __init__(self) -> None:
        super().__init__(Reader(3, ReaderSettings()))

    def plan(self, request_id: str = "r", num_calls: int = 2) -> list[Any]:
        return self.feed(events.ReadPlanned(transfer_id=T, request_id=RequestId(request_id), session="s", num_calls=num_calls))

    def cancel(self, request_id: str = "r") -> list[Any]:
        return self.feed(events.ReadCancelled(request_id=RequestId(request_id)))

    def call_ended(self, request_id: str = "r", index: int = 0, outcome: Outcome = Outcome.DONE) -> list[Any]:
        return self.feed(
            events.CallEnded(
                request_id=RequestId(request_id),
                call_index=index,
                outcome=outcome,
                reason="why" if outcome is not Outcome.DONE else "",
                num_bytes=10,
                num_descriptors=2,
            )
        )


def call(request_id: str = "r", index: int = 0) -> actions.StartCall:
    return actions.StartCall(transfer_id=T, request_id=RequestId(request_id), call_index=index)


def ends(done: list[Any]) -> list[tuple[str, Outcome]]:
    return [(action.ended.request_id, action.ended.outcome) for action in done if isinstance(action, actions.EndRead)]


def test_calls_run_one_after_another() -> None:
    """Goal: one engine call at a time, and one end. Method: a read of two calls, a second apart."""
    stage = ReaderStage()
    stage.now = 100.0

    assert [call(index=0)] == stage.plan()
    stage.now = 101.0
    assert [call(index=1)] == stage.call_ended(index=0)
    stage.now = 102.5
    (end,) = stage.call_ended(index=1)

    ended = end.ended
    assert (3, Outcome.DONE, 20, 4, 2.5) == (ended.rank, ended.outcome, ended.num_bytes, ended.num_descriptors, ended.seconds)
    assert (0, None) == (stage.machine.num_reads, stage.machine.next_timer())


def test_reads_take_turns() -> None:
    """Goal: no read waits behind the whole of another. Method: a long read and a short one."""
    stage = ReaderStage()
    stage.plan("long", 3)
    stage.plan("short", 1)

    assert [call("short")] == stage.call_ended("long", 0)
    done = stage.call_ended("short", 0)

    assert [("short", Outcome.DONE)] == ends(done)
    assert call("long", 1) in done


def num_lines(do: Callable[[], object]) -> int:
    """Lines of the reader's code that run, each turn of a loop anew."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != reader.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return count


def test_reads_that_wait_for_parts_cost_the_others_nothing() -> None:
    """Goal: a decode engine may read from hundreds of prefills that run. Method: lines of code for the same call of another
    read, beside few that wait and beside many."""

    def lines_beside(num_waiting: int) -> int:
        stage = ReaderStage()
        for number in range(num_waiting):
            part = {"transfer_id": T, "request_id": RequestId(f"w{number}"), "session": "s", "num_calls": 1, "is_last": False}
            stage.feed(events.ReadPlanned(**part))
            stage.call_ended(f"w{number}")
        return num_lines(lambda: (stage.plan("r", 1), stage.call_ended("r")))

    assert lines_beside(2) == lines_beside(100)


def test_a_read_without_calls_is_done() -> None:
    """Goal: a rank that holds nothing of it answers all the same. Method: a plan of no call."""
    assert [("r", Outcome.DONE)] == ends(ReaderStage().plan(num_calls=0))


def test_a_read_that_cannot_be_planned_is_refused() -> None:
    """Goal: one answer for every order. Method: the planner says no."""
    refused = events.ReadRefused(transfer_id=T, request_id=RequestId("r"), reason="too many descriptors")

    assert [("r", Outcome.REFUSED)] == ends(ReaderStage().feed(refused))


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.FAILED, Outcome.UNKNOWN])
def test_a_call_that_is_not_done_ends_the_read_with_its_outcome(outcome: Outcome) -> None:
    """Goal: no further call after a bad one. Method: the first of two calls."""
    stage = ReaderStage()
    stage.plan()

    assert [("r", outcome)] == ends(stage.call_ended(outcome=outcome))


def test_a_refused_call_after_a_done_one_is_a_failed_read() -> None:
    """Goal: refused means that no byte moved. Method: the second of two calls is refused."""
    stage = ReaderStage()
    stage.plan()
    stage.call_ended(index=0)

    assert [("r", Outcome.FAILED)] == ends(stage.call_ended(index=1, outcome=Outcome.REFUSED))


def test_a_cancelled_read_ends_after_the_call_under_way() -> None:
    """Goal: an end is an end: no byte of it can land. Method: cancel, cancel again, then the call ends."""
    stage = ReaderStage()
    stage.plan()

    assert [] == stage.cancel()
    assert [] == stage.cancel()
    assert [("r", Outcome.FAILED)] == ends(stage.call_ended())


def test_a_cancelled_read_that_was_all_done_is_done() -> None:
    """Goal: tell what is known. Method: cancel during the last call."""
    stage = ReaderStage()
    stage.plan(num_calls=1)
    stage.cancel()

    assert [("r", Outcome.DONE)] == ends(stage.call_ended())


def test_a_cancelled_read_that_waits_for_its_turn_ends_at_once() -> None:
    """Goal: refused before the first byte, failed after it. Method: cancel two reads while a third one is called."""
    stage = ReaderStage()
    stage.plan("begun")
    stage.plan("calling", 3)
    stage.plan("fresh")
    stage.call_ended("begun", 0)

    assert [("fresh", Outcome.REFUSED)] == ends(stage.cancel("fresh"))
    assert [("begun", Outcome.FAILED)] == ends(stage.cancel("begun"))


def test_a_cancel_that_comes_before_its_order_is_remembered() -> None:
    """Goal: the order of events in one step does not matter. Method: cancel, then the order."""
    stage = ReaderStage()
    stage.cancel()

    assert [("r", Outcome.REFUSED)] == ends(stage.plan())


def test_a_repeated_order_is_ignored() -> None:
    """Goal: nothing is written twice, least of all after its end. Method: the order again, during and after."""
    stage = ReaderStage()
    stage.plan(num_calls=1)
    assert [] == stage.plan(num_calls=1)
    stage.call_ended()

    assert [] == stage.plan(num_calls=1)
    assert 2 == stage.counts[counters.ORDERS_IGNORED, ""]


def test_the_end_of_a_call_that_is_not_under_way_is_ignored() -> None:
    """Goal: events that come twice do no harm. Method: the same end again, and one of a stranger."""
    stage = ReaderStage()
    stage.plan()
    stage.call_ended(index=0)

    assert [] == stage.call_ended(index=0)
    assert [] == stage.call_ended("stranger", index=1)


def test_a_read_that_takes_too_long_starts_no_further_call() -> None:
    """Goal: the bound on one transfer. Method: the first call outlasts read_wait_s."""
    stage = ReaderStage()
    stage.plan()

    assert [] == stage.wait(limits.READ_WAIT_S)
    assert [("r", Outcome.FAILED)] == ends(stage.call_ended())


def test_a_read_that_never_gets_its_turn_is_refused() -> None:
    """Goal: a silent engine holds up only the read it works on. Method: another read's call never ends."""
    stage = ReaderStage()
    stage.plan("stuck")
    stage.plan("waiting")

    assert [("waiting", Outcome.REFUSED)] == ends(stage.wait(limits.READ_WAIT_S))


def test_what_is_remembered_is_bounded() -> None:
    """Goal: nothing grows for ever. Method: one cancel more than is remembered; the oldest is forgotten."""
    stage = ReaderStage()
    for number in range(limits.MAX_REMEMBERED_READS + 1):
        stage.cancel(f"r{number}")

    assert [call("r0")] == stage.plan("r0")
