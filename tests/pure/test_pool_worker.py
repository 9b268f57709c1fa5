"""Gets and puts of a worker: given these events, exactly these actions."""

from __future__ import annotations

import pytest

from tests.pure.pool_stage import WorkerStage, ends
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.types import Outcome

DONE, REFUSED, FAILED, UNKNOWN = Outcome.DONE, Outcome.REFUSED, Outcome.FAILED, Outcome.UNKNOWN


def get(load_id: int = 1, call_index: int = 0) -> actions.StartGet:
    return actions.StartGet(load_id=load_id, call_index=call_index)


def put(save_id: int = 1, call_index: int = 0) -> actions.StartPut:
    return actions.StartPut(save_id=save_id, call_index=call_index)


def cancel(stage: WorkerStage, load_id: int = 1) -> list[object]:
    return stage.feed(events.LoadCancelled(load_id=load_id))


def test_without_a_client_no_call_is_made_until_a_probe_says_so() -> None:
    """Goal: what the shell knows need not be found out by a call. Method: StoreLost; a load; two healthy probes; a load."""
    stage = WorkerStage()

    assert [] == stage.feed(events.StoreLost())
    (refused,) = stage.plan_load()
    for _ in range(limits.PROBES_TO_CLOSE):
        assert [actions.ProbeStore()] == stage.wait(stage.now + limits.STORE_PROBE_S)
        stage.feed(events.ProbeEnded(is_healthy=True))
    assert (REFUSED, counters.STORE_LOST) == (refused.ended.outcome, refused.ended.reason)
    assert [get(2)] == stage.plan_load(load_id=2)


# --- gets ------------------------------------------------------------------------------------------------------------------


def test_a_load_is_got_call_by_call() -> None:
    """Goal: one call of a load at a time, and one end. Method: two calls, a second each."""
    stage = WorkerStage()

    assert [get()] == stage.plan_load()
    stage.now = 1.0
    assert [get(call_index=1)] == stage.got(DONE, DONE)
    stage.now = 2.0
    (end,) = stage.got(DONE, call_index=1)
    assert (1, 3, DONE, (), "", 24, 2.0) == (
        end.ended.load_id,
        end.ended.rank,
        end.ended.outcome,
        end.ended.failed_block_ids,
        end.ended.reason,
        end.ended.num_bytes,
        end.ended.seconds,
    )


def test_loads_take_turns() -> None:
    """Goal: a short load does not wait behind a long one. Method: three loads of two calls, two gets at once."""
    stage = WorkerStage()
    assert [get(1)] == stage.plan_load(1)
    assert [get(2)] == stage.plan_load(2)
    assert [] == stage.plan_load(3)

    assert [get(3)] == stage.got(DONE, DONE, load_id=1)
    assert [get(1, 1)] == stage.got(DONE, DONE, load_id=2)


@pytest.mark.parametrize(
    ("outcomes", "num_missing", "expected"),
    [
        ((DONE, FAILED), 0, (FAILED, counters.FAILED, (11, 12))),
        ((FAILED, DONE), 1, (FAILED, counters.MISSING, (10, 12))),
        ((REFUSED, REFUSED), 0, (REFUSED, counters.REFUSED, (10, 11, 12))),
        ((DONE, REFUSED), 0, (FAILED, counters.REFUSED, (11, 12))),
    ],
)
def test_the_first_key_that_does_not_come_ends_the_load(
    outcomes: tuple[Outcome, ...], num_missing: int, expected: tuple[Outcome, str, tuple[int, ...]]
) -> None:
    """Goal: exactly the blocks that did not come are named, and the worst outcome speaks. Method: first, last, both keys."""
    stage = WorkerStage()
    stage.plan_load()

    (end,) = stage.got(*outcomes, num_missing=num_missing)
    assert expected == (end.ended.outcome, end.ended.reason, end.ended.failed_block_ids)


def fenced(stage: WorkerStage, *, holds: bool = True) -> list[object]:
    return stage.feed(events.FenceEnded(holds=holds))


def test_an_unknown_get_ends_its_load_when_the_store_is_fenced() -> None:
    """Goal: bytes of it may land at any time until then. Method: an hour and a cancel change nothing; the fence does, once."""
    stage = WorkerStage()
    stage.plan_load()

    assert [actions.FenceStore()] == stage.got(FAILED, UNKNOWN, num_missing=1)
    assert [] == stage.wait(3_600.0) + cancel(stage)
    (end,) = fenced(stage)
    assert (FAILED, counters.UNKNOWN, (10, 11, 12)) == (end.ended.outcome, end.ended.reason, end.ended.failed_block_ids)
    assert [] == fenced(stage)


def test_a_fence_that_does_not_hold_is_tried_again_after_longer_and_longer() -> None:
    """Goal: no end without a fence, and no busy loop. Method: two that do not hold, then one that does."""
    stage = WorkerStage()
    stage.plan_load()
    stage.got(UNKNOWN, DONE)

    pause_s = limits.FENCE_RETRY_MIN_S
    assert [] == fenced(stage, holds=False) + stage.wait(0.9 * pause_s)
    assert [actions.FenceStore()] == stage.wait(pause_s)
    assert [] == fenced(stage, holds=False) + stage.wait(2.9 * pause_s)
    assert [actions.FenceStore()] == stage.wait(3 * pause_s)
    assert [(1, FAILED, counters.UNKNOWN)] == ends(fenced(stage))


def test_no_get_and_no_save_starts_until_the_fence_holds() -> None:
    """Goal: a fence cannot hold while calls go on, and what was got meanwhile would be lost. Method: one get hangs, one is
    unknown, a load and a save wait; the fence comes after the hanging one, and then they start."""
    stage = WorkerStage()
    stage.plan_load(1)
    stage.plan_load(2)

    assert [] == stage.got(UNKNOWN, DONE, load_id=1) + stage.plan_load(3) + stage.plan_save()
    assert [actions.FenceStore()] == stage.got(DONE, DONE, load_id=2)
    assert [get(3), get(2, 1), put()] == fenced(stage)[1:]


def test_a_lost_store_is_fenced_all_the_same() -> None:
    """Goal: a fence needs no master. Method: the get that is unknown is also the sign of a dead store."""
    stage = WorkerStage()
    stage.plan_load()

    assert [actions.FenceStore()] == stage.got(UNKNOWN, UNKNOWN, is_lost=True)
    assert [(1, FAILED, counters.STORE_LOST)] == ends(fenced(stage))


def test_a_cancelled_load_ends_when_its_call_has_ended() -> None:
    """Goal: no byte is asked for after the end. Method: cancel twice during a call; the next one does not start."""
    stage = WorkerStage()
    stage.plan_load()

    assert [] == cancel(stage) + cancel(stage)
    assert [(1, FAILED, counters.STOPPED)] == ends(stage.got(DONE, DONE))


def test_a_load_whose_last_call_came_is_done_though_it_was_cancelled() -> None:
    """Goal: the truth is told; who cancelled decides what it is worth. Method: cancel during the only call."""
    stage = WorkerStage()
    stage.plan_load(calls=((10,),))
    cancel(stage)

    assert [(1, DONE, "")] == ends(stage.got(DONE))


def test_a_cancel_may_come_before_its_order() -> None:
    """Goal: orders and cancels may cross. Method: cancel, then the order."""
    stage = WorkerStage()
    cancel(stage)

    assert [(1, REFUSED, counters.STOPPED)] == ends(stage.plan_load())


def test_an_order_that_is_not_this_ranks_is_done_at_once() -> None:
    """Goal: every rank ends every order. Method: orders without a call."""
    stage = WorkerStage()

    assert [(1, DONE, "")] == ends(stage.plan_load(calls=()))
    assert [(1, DONE, "")] == ends(stage.plan_save(calls=()))


def test_an_order_that_comes_twice_is_taken_once() -> None:
    """Goal: nothing is put or got twice. Method: plan and refuse again what is under way."""
    stage = WorkerStage()
    stage.plan_load()
    stage.plan_save()
    again = events.LoadRefused(load_id=1, block_ids=(10,))

    assert [] == stage.plan_load() + stage.plan_save() + stage.feed(again)


def test_what_cannot_be_planned_is_refused_by_name_of_its_blocks() -> None:
    """Goal: a broken order fails its request, and nothing else. Method: refuse a load and a save."""
    stage = WorkerStage()

    (end,) = stage.feed(events.LoadRefused(load_id=1, block_ids=(10,)))
    assert (REFUSED, (10,)) == (end.ended.outcome, end.ended.failed_block_ids)
    assert [(1, REFUSED, counters.REFUSED)] == ends(stage.feed(events.SaveRefused(save_id=1, chain=1)))


def test_no_get_starts_after_the_load_had_its_time() -> None:
    """Goal: nothing is got whose lease may be over. Method: two loads hang, a third waits for its turn too long."""
    stage = WorkerStage()
    for load_id in (1, 2, 3):
        stage.plan_load(load_id)

    assert [(3, REFUSED, counters.TOO_LATE)] == ends(stage.wait(limits.LOAD_WAIT_S))
    stage.now = 60.0
    assert [(1, FAILED, counters.TOO_LATE)] == ends(stage.got(DONE, DONE, load_id=1))


def test_an_end_nobody_waits_for_changes_nothing() -> None:
    """Goal: doubled events do no harm. Method: ends of unknown calls."""
    stage = WorkerStage()
    stage.plan_load()

    assert [] == stage.got(DONE, call_index=1) + stage.got(DONE, load_id=9) + stage.put(DONE)
    assert 3 == stage.counts[counters.EVENTS_IGNORED, ""]


# --- puts ------------------------------------------------------------------------------------------------------------------


def test_saves_are_put_one_after_the_other() -> None:
    """Goal: order is kept. Method: two saves; the second starts after the last call of the first."""
    stage = WorkerStage()

    assert [put()] == stage.plan_save()
    assert [] == stage.plan_save(2)
    assert [put(call_index=1)] == stage.put(DONE, DONE)
    ended, started = stage.put(DONE, call_index=1)
    assert ([(1, DONE, "")], put(2)) == (ends([ended]), started)


def test_a_gap_ends_all_saves_of_its_chain_and_no_other() -> None:
    """Goal: nothing is put that no prefix reaches. Method: chain 1, 2, 1; the first fails, a later one comes."""
    stage = WorkerStage()
    stage.plan_save(1, chain=1)
    stage.plan_save(2, chain=2)
    stage.plan_save(3, chain=1)

    done = stage.put(DONE, FAILED)
    assert [(1, FAILED, counters.FAILED), (3, REFUSED, counters.GAP)] == ends(done)
    assert put(2) == done[-1]
    assert [(4, REFUSED, counters.GAP)] == ends(stage.plan_save(4, chain=1))


def test_a_full_queue_drops_the_oldest_that_waits() -> None:
    """Goal: what is newest is likeliest to be wanted, and memory is bounded. Method: room for four blocks, three saves wait."""
    stage = WorkerStage(max_queued_blocks=4)
    stage.plan_save(1, chain=1)
    stage.plan_save(2, chain=2)
    done = stage.plan_save(3, chain=3)

    assert [(2, REFUSED, counters.DROPPED)] == ends(done)
    assert 3 == stage.machine.num_queued_save_blocks


def test_a_save_too_large_for_the_queue_is_dropped_itself() -> None:
    """Goal: the queue always drains. Method: a save of five blocks behind one under way, room for four."""
    stage = WorkerStage(max_queued_blocks=4)
    stage.plan_save(1)

    assert [(2, REFUSED, counters.DROPPED)] == ends(stage.plan_save(2, chain=2, calls=(5,)))


def test_a_save_of_any_size_is_put_when_none_is_ahead_of_it() -> None:
    """Goal: a long prompt that the local cache had before the pool came is saved. Method: five blocks, room for four."""
    stage = WorkerStage(max_queued_blocks=4)

    assert [put()] == stage.plan_save(1, calls=(5,))


def test_a_full_store_is_tried_once_more() -> None:
    """Goal: a store that evicts in the background loses us nothing. Method: full, a moment later taken."""
    stage = WorkerStage()
    stage.plan_save()

    assert [] == stage.put(DONE, FAILED, is_full=True)
    assert [put()] == stage.wait(limits.FULL_RETRY_S)
    assert [put(call_index=1)] == stage.put(DONE, DONE)


def test_a_store_that_stays_full_is_left_alone_for_a_while() -> None:
    """Goal: no pins wait for room. Method: full twice; what waits and what comes is refused, until the pause is over."""
    stage = WorkerStage()
    stage.plan_save(1, chain=1)
    stage.plan_save(2, chain=2)
    stage.put(DONE, FAILED, is_full=True)
    stage.wait(limits.FULL_RETRY_S)

    assert [(1, FAILED, counters.FULL), (2, REFUSED, counters.FULL)] == ends(stage.put(DONE, FAILED, is_full=True))
    assert [(3, REFUSED, counters.FULL)] == ends(stage.plan_save(3, chain=3))
    stage.wait(stage.now + limits.FULL_PAUSE_MIN_S)
    assert [put(4)] == stage.plan_save(4, chain=4)


def test_pauses_of_a_full_store_grow_and_start_anew_after_a_success() -> None:
    """Goal: a pool that is too small costs little. Method: time until a save is taken, after failures and a success."""
    stage = WorkerStage()
    pauses_s = []
    for number, is_taken in enumerate((False, False, True, False), 1):
        stage.plan_save(number, chain=number, calls=(1,))
        if is_taken:
            stage.put(DONE, save_id=number)
            continue
        stage.put(FAILED, save_id=number, is_full=True)
        stage.wait(stage.now + limits.FULL_RETRY_S)
        stage.put(FAILED, save_id=number, is_full=True)
        probe = 100 * number
        pause_s = 0.0
        while ends(stage.plan_save(probe, chain=probe, calls=(1,))):
            pause_s += 0.5
            probe += 1
            stage.now += 0.5
        stage.put(FAILED, save_id=probe)
        pauses_s.append(pause_s)

    assert [1.0, 2.0, 1.0] == pauses_s


def test_a_save_that_waits_too_long_is_dropped() -> None:
    """Goal: its blocks are wanted back. Method: one put hangs, another save waits."""
    stage = WorkerStage()
    stage.plan_save(1, chain=1)
    stage.plan_save(2, chain=2)

    assert [(2, REFUSED, counters.TOO_LATE)] == ends(stage.wait(limits.SAVE_WAIT_S))
    assert [put(call_index=1)] == stage.put(DONE, DONE)


def test_an_unknown_put_says_so() -> None:
    """Goal: its blocks must stay. Method: one key unknown, one without room: the worst speaks, and nothing is tried again."""
    stage = WorkerStage()
    stage.plan_save()

    assert [(1, UNKNOWN, counters.FULL)] == ends(stage.put(UNKNOWN, FAILED, is_full=True))


# --- the store is lost -------------------------------------------------------------------------------------------------------


def test_a_lost_store_ends_everything_that_waits() -> None:
    """Goal: no thread is sent into a dead store. Method: a get finds it dead while a load and saves wait."""
    stage = WorkerStage(max_gets_at_once=1)
    stage.plan_load(1)
    stage.plan_load(2)
    stage.plan_save(1, chain=1)
    stage.plan_save(2, chain=2)

    done = stage.got(UNKNOWN, UNKNOWN, is_lost=True)

    assert [(2, REFUSED, "store_lost"), (2, REFUSED, "store_lost")] == ends(done)
    assert [(3, REFUSED, "store_lost")] == ends(stage.plan_load(3))
    assert [(3, REFUSED, "store_lost")] == ends(stage.plan_save(3, chain=3))


def test_a_healthy_store_is_used_again() -> None:
    """Goal: hits come back without a restart. Method: lost, two healthy probes, then orders."""
    stage = WorkerStage()
    stage.plan_save()
    stage.put(UNKNOWN, UNKNOWN, is_lost=True)
    for _ in range(limits.PROBES_TO_CLOSE):
        assert [actions.ProbeStore()] == stage.wait(stage.now + limits.STORE_PROBE_S)
        stage.feed(events.ProbeEnded(is_healthy=True))

    assert [get()] == stage.plan_load()
    assert [put(2)] == stage.plan_save(2, chain=2)
