"""runtime.driver: order kept, one transfer pays for a bug, nobody waits for ever because of it."""

from __future__ import annotations

import logging

import pytest

from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.runtime.driver import Action, Driver
from vllm_mooncake_ascend.testing.stub_machines import Reply, ScriptedConsumer
from vllm_mooncake_ascend.types import Incarnation, Outcome, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages
from vllm_mooncake_ascend.wire.params import RemotePrefill
from vllm_mooncake_ascend.wire.steps import ReadEnded, Report

T1, R1, P1 = TransferId("t1"), RequestId("r1"), Incarnation("p1")
PEER = PeerAddress("127.0.0.1:1")
BUG = AssertionError("a bug")
BROKEN = actions.Count(name="broken_invariants_total", reason="consumer")
PIN = actions.PinBlocks(transfer_id=T1, block_ids=(3, 4))

arrived = events.RequestArrived(
    request_id=R1,
    transfer=RemotePrefill(transfer_id=T1, incarnation=P1, address=PEER, num_tokens=16, prompt_digest=b""),
    prompt_digest=b"d",
    num_prompt_tokens=16,
)
allocated = events.BlocksAllocated(
    request_id=R1, num_local_tokens=0, num_remote_tokens=16, block_ids=((3, 4),), loaded_block_ids=(3, 4)
)
read_ended = events.RankReadEnded(
    ended=ReadEnded(
        transfer_id=T1,
        request_id=R1,
        rank=0,
        outcome=Outcome.DONE,
        reason="",
        num_bytes=1,
        num_descriptors=1,
        seconds=0.1,
    )
)


def report(*, ok: bool) -> actions.ReportReceive:
    """The report of R1."""
    return actions.ReportReceive(report=Report(request_id=R1, ok=ok, block_ids=(3, 4)))


def driven(script: list[Reply], *fed: events.ConsumerEvent, is_strict: bool = False) -> tuple[Driver, list[Action]]:
    """A driver after these events, and what it carried out."""
    done: list[Action] = []
    driver = Driver(done.append, is_strict=is_strict)
    driver.add_consumer(ScriptedConsumer(script))
    for event in fed:
        driver.feed_consumer(event)
    return driver, done


def test_actions_are_carried_out_in_the_machines_order() -> None:
    """Goal: a layout is shared before the read that needs it. Method: two events with two actions each."""
    unpin = actions.UnpinBlocks(transfer_id=T1, block_ids=(3, 4))
    _, done = driven([[PIN], [unpin, report(ok=True)]], allocated, read_ended)
    assert [PIN, unpin, report(ok=True)] == done


def test_a_role_the_engine_lacks_ignores_its_events() -> None:
    """Goal: reset_cache may be told to every engine. Method: a producer's event without a producer."""
    driver, done = driven([])
    driver.feed_producer(events.LeasesRevoked(reason="reset"))
    assert [] == done


def test_a_request_whose_machine_broke_is_reported_failed() -> None:
    """Goal: no request hangs because of a bug. Method: raise when its read ends; its blocks are not unpinned."""
    driver, done = driven([[PIN], BUG], allocated, read_ended)
    assert ([PIN, BROKEN, report(ok=False)], True) == (done, driver.is_broken(R1))


def test_a_broken_request_is_not_reported_twice() -> None:
    """Goal: vLLM dies of a second report. Method: the machine reports after the driver did."""
    _, done = driven([[PIN], BUG, [report(ok=True)]], allocated, read_ended, events.RequestEnded(request_id=R1))
    assert [PIN, BROKEN, report(ok=False)] == done


def test_a_request_without_blocks_is_not_reported_when_its_machine_breaks() -> None:
    """Goal: vLLM dies of a report it does not wait for. Method: raise before blocks are allocated."""
    driver, done = driven([BUG], arrived)
    assert ([BROKEN], True) == (done, driver.is_broken(R1))


def test_a_broken_transfer_leaves_others_alone() -> None:
    """Goal: one transfer pays. Method: another request's report after the bug."""
    other = msg_allocated("r2")
    ok = actions.ReportReceive(report=Report(request_id=RequestId("r2"), ok=True, block_ids=(9,)))
    driver, done = driven([BUG, [ok]], arrived, other)
    assert ([BROKEN, ok], False) == (done, driver.is_broken(RequestId("r2")))


def msg_allocated(request_id: str) -> events.BlocksAllocated:
    """Blocks for another request."""
    return events.BlocksAllocated(
        request_id=RequestId(request_id), num_local_tokens=0, num_remote_tokens=16, block_ids=((9,),), loaded_block_ids=(9,)
    )


def test_a_bug_is_told_with_the_transfers_story(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: the log alone explains it. Method: look for the events before the bug and the exception."""
    driven([[], [PIN], BUG], arrived, allocated, read_ended)
    (told,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    text = told.getMessage()
    assert ("RequestArrived(" in text, "PinBlocks(" in text, BUG) == (True, True, told.exc_info[1] if told.exc_info else None)


def test_strict_mode_raises_every_bug() -> None:
    """Goal: tests hear of it. Method: the same bug in strict mode."""
    with pytest.raises(AssertionError, match="a bug"):
        driven([BUG], arrived, is_strict=True)


def test_a_bug_no_transfer_is_to_blame_for_is_raised() -> None:
    """Goal: broken shared state ends the engine. Method: raise at a timer."""
    with pytest.raises(AssertionError, match="a bug"):
        driven([BUG], events.TimerFired())


@pytest.mark.parametrize(
    "message",
    [
        messages.Goodbye(incarnation=P1, reason=""),
        messages.Renewed(incarnation=P1, sequence=1, gone=()),
        messages.Gone(incarnation=P1, transfer_id=T1, request_id=R1, reason=""),
    ],
)
def test_no_message_of_a_peer_ends_the_engine(message: messages.FromProducer) -> None:
    """Goal: a bug a peer can trigger costs no more than a transfer. Method: raise at messages of each scope."""
    _, done = driven([BUG], events.ProducerSpoke(peer=PEER, message=message))
    assert [BROKEN] == done


def test_a_due_timer_is_fired_once() -> None:
    """Goal: timers run, and are not run again until they are due again. Method: a timer in the past."""
    machine = ScriptedConsumer([], timer_s=0.0)
    driver = Driver(lambda action: None, is_strict=True)
    driver.add_consumer(machine)
    waits = [driver.fire_timers(), driver.fire_timers()]
    assert ([None, None], [events.TimerFired()]) == (waits, machine.events)


def test_a_timer_to_come_is_waited_for() -> None:
    """Goal: the control thread sleeps as long as it may. Method: a timer far away."""
    machine = ScriptedConsumer([], timer_s=1e12)
    driver = Driver(lambda action: None, is_strict=True)
    driver.add_consumer(machine)
    wait_s = driver.fire_timers()
    assert (True, []) == (wait_s is not None and wait_s > 1e11, machine.events)


@pytest.mark.parametrize(("level", "has_story"), [("info", False), ("warning", True), ("error", True)])
def test_a_note_is_logged_with_its_story_when_something_is_wrong(
    level: str, has_story: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: operators read one line, and all of it when it matters. Method: a note of each level."""
    note = actions.Note(level=level, transfer_id=T1, text="something")
    with caplog.at_level(logging.INFO):
        _, done = driven([[note]], arrived)
    (told,) = caplog.records
    assert ([], level.upper(), has_story) == (done, told.levelname, "RequestArrived" in told.getMessage())
