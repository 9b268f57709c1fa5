"""runtime.flight_recorder: a transfer's story is complete, short and bounded."""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.runtime import flight_recorder
from vllm_mooncake_ascend.runtime.flight_recorder import FlightRecorder
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages

T1, R1 = TransferId("t1"), RequestId("r1")


def named(request_id: str, transfer_id: str) -> actions.NameTransfer:
    """The action that binds a request to its transfer."""
    return actions.NameTransfer(request_id=RequestId(request_id), transfer_id=TransferId(transfer_id))


def test_a_story_is_told_in_order_with_the_time_between() -> None:
    """Goal: the reader sees what led to what. Method: an action, then an event that knows only the request."""
    recorder = FlightRecorder()
    recorder.note(named("r1", "t1"), 10.0)
    recorder.note(events.PrefillPreempted(request_id=R1), 10.25)
    assert (
        "  +0.000 s NameTransfer(request_id='r1', transfer_id='t1')\n  +0.250 s PrefillPreempted(request_id='r1')"
    ) == recorder.story("t1")


def test_a_block_table_is_counted_not_printed() -> None:
    """Goal: a million blocks cost one number. Method: an event with a large table."""
    recorder = FlightRecorder()
    ended = events.PrefillEnded(request_id=R1, has_kv=True, num_tokens=9, block_ids=((1,) * 100_000,), reason="")
    recorder.note(ended, 0.0)
    expected = "  +0.000 s PrefillEnded(request_id='r1', has_kv=True, num_tokens=9, block_ids=<100000 in 1>, reason='')"
    assert expected == recorder.story("r1")


@pytest.mark.parametrize("length", [1, 10_000])
def test_a_line_is_never_longer_than_its_limit(length: int) -> None:
    """Goal: what clients choose cannot flood the log. Method: ids of any length."""
    recorder = FlightRecorder()
    recorder.note(named("r" * length, "t1"), 0.0)
    assert len(recorder.story("t1")) <= flight_recorder.MAX_LINE_CHARS + len("  +0.000 s ")


def test_a_transfer_keeps_its_last_lines() -> None:
    """Goal: one busy transfer is bounded. Method: more events than lines."""
    recorder = FlightRecorder()
    for second in range(2 * flight_recorder.MAX_LINES):
        recorder.note(named("r1", "t1"), float(second))
    assert flight_recorder.MAX_LINES == recorder.story("t1").count("\n") + 1


def test_the_transfer_untouched_longest_is_forgotten_first() -> None:
    """Goal: many transfers are bounded. Method: one more than the limit, the first touched again in between."""
    recorder = FlightRecorder()
    for number in range(flight_recorder.MAX_TRANSFERS):
        recorder.note(named(f"r{number}", f"t{number}"), 0.0)
    recorder.note(named("r0", "t0"), 1.0)
    recorder.note(named("new", "new"), 2.0)
    assert (True, "", True) == (recorder.story("t0") != "", recorder.story("t1"), recorder.story("new") != "")


def test_a_readers_own_request_id_names_no_local_request() -> None:
    """Goal: a remote request of the same name joins no stories. Method: a reader speaks, then the local request acts."""
    recorder = FlightRecorder()
    spoken = messages.Subscribe(incarnation=Incarnation("d"), expected=Incarnation("p"), transfer_id=T1, request_id=R1)
    recorder.note(events.ReaderSpoke(peer=b"1", message=spoken), 0.0)
    recorder.note(events.PrefillPreempted(request_id=R1), 1.0)
    assert (1, 1) == (recorder.story("t1").count("\n") + 1, recorder.story("r1").count("\n") + 1)


def test_what_concerns_no_transfer_is_not_noted() -> None:
    """Goal: timers do not push stories out. Method: an event without ids."""
    recorder = FlightRecorder()
    recorder.note(events.TimerFired(), 0.0)
    assert recorder.story("") == ""
