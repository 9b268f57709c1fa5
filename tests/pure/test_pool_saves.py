"""Saves and the book of the scheduler: given these events, exactly these actions."""

from __future__ import annotations

from tests.pure.pool_stage import HASHES, R, SchedulerStage, blocks, pin, saved, unpin
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.pool.known import Known
from vllm_mooncake_ascend.types import Outcome, RequestId
from vllm_mooncake_ascend.wire.pool_steps import SaveOrder


def started(**settings: int) -> SchedulerStage:
    """One request that found nothing in the pool."""
    stage = SchedulerStage(**settings)
    stage.arrive()
    stage.answer(0)
    return stage


def test_the_whole_blocks_of_a_chunk_are_pinned_and_ordered() -> None:
    """Goal: a block is saved when all its tokens are computed. Method: a chunk that ends in the third block."""
    order = SaveOrder(save_id=1, chain=1, request_id=R, namespace="n", groups=blocks(0, 2))

    assert [pin(10, 11), actions.OrderSave(order=order)] == started().compute(11)


def test_each_chunk_saves_what_is_new() -> None:
    """Goal: no block twice. Method: chunks of uneven lengths, one of them of no whole block."""
    stage = started()

    assert [(1, (10, 11))] == saved(stage.compute(11))
    assert [] == saved(stage.compute(11))
    assert [(2, (12, 13, 14))] == saved(stage.compute(20))


def test_a_save_is_unpinned_when_every_rank_has_ended_it() -> None:
    """Goal: no rank reads a block that was given back. Method: two ranks, one after the other, one twice."""
    stage = started(num_ranks=2)
    stage.compute(8)

    assert [] == stage.save_ended() + stage.save_ended()
    assert [unpin(10, 11)] == stage.save_ended(rank=1)
    assert 0 == stage.machine.num_pinned_blocks


def test_an_unknown_put_keeps_its_pins() -> None:
    """Goal: no call reads a block of another request. Method: unpinned only after the quarantine."""
    stage = started()
    stage.compute(8)

    assert [] == stage.save_ended(Outcome.UNKNOWN)
    assert [] == stage.wait(limits.QUARANTINE_S - 1)
    assert [unpin(10, 11)] == stage.wait(limits.QUARANTINE_S)


def test_nothing_is_saved_behind_a_gap() -> None:
    """Goal: no objects that no prefix reaches. Method: the first save fails while the request goes on."""
    stage = started()
    stage.compute(8)
    stage.save_ended(Outcome.FAILED)

    assert [] == stage.compute(24)


def test_what_there_is_no_room_for_is_saved_later() -> None:
    """Goal: saves never starve an engine of blocks, and a prompt computed faster than it is saved is saved all the same.
    Method: bound three; four blocks, two more while these are saved, and an end."""
    stage = started(max_saved_blocks=3)

    assert [(1, (10, 11, 12))] == saved(stage.compute(16))
    assert [] == stage.compute(24)
    stage.save_ended()
    assert [(2, (13, 14, 15))] == saved(stage.compute(24))
    assert 2 == stage.counts[counters.SAVES_ENDED, counters.CAPACITY]


def test_a_prefix_that_is_being_saved_is_not_saved_twice() -> None:
    """Goal: many requests with one system prompt put it once. Method: a second one computes the same and one more block."""
    stage = started()
    stage.compute(8)
    stage.arrive("second")

    assert [(2, (22,))] == saved(stage.compute(12, "second", table=((20, 21, 22),)))
    assert 2 == stage.counts[counters.BLOCKS_SHARED, ""]


def test_what_failed_is_saved_by_the_next_who_has_it() -> None:
    """Goal: a gap does not last. Method: the first save fails; another request has the blocks from the local cache."""
    stage = started()
    stage.compute(8)
    stage.save_ended(Outcome.FAILED)
    stage.arrive("second")

    assert [(2, (10, 11, 12))] == saved(stage.compute(12, "second"))


def test_a_save_behind_the_failed_one_of_another_request_is_done_again() -> None:
    """Goal: a gap that one request left is closed though another went on from there. Method: save 2 leans on save 1, which
    fails; a third request has all blocks."""
    stage = started()
    stage.compute(8)
    stage.arrive("second")
    assert [(2, (12,))] == saved(stage.compute(12, "second"))
    stage.save_ended(Outcome.FAILED, 1)
    stage.save_ended(Outcome.DONE, 2)
    stage.arrive("third")

    assert [(3, (10, 11, 12))] == saved(stage.compute(12, "third"))


def test_a_local_prefix_that_the_pool_has_is_not_saved_again() -> None:
    """Goal: turning the pool on costs nothing where it does not help. Method: all blocks were saved by an earlier request."""
    stage = started()
    stage.compute(16)
    stage.save_ended()
    stage.end()
    stage.arrive(num_local_tokens=16)

    assert [(2, (14, 15))] == saved(stage.compute(24))


def test_a_loaded_prefix_is_not_saved_again() -> None:
    """Goal: what came from the pool is in it. Method: load four blocks, compute two."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(16)
    stage.allocate(16)
    stage.load_ended()

    assert [(1, (14, 15))] == saved(stage.compute(24))


def test_a_lost_store_makes_it_forget_what_was_saved() -> None:
    """Goal: hits come back after the master came back empty. Method: a save fails with the store; the next chunk saves all."""
    stage = started()
    stage.compute(8)
    stage.save_ended()
    stage.compute(12)
    stage.save_ended(Outcome.UNKNOWN, 2, reason=counters.STORE_LOST)
    stage.arrive("second")

    assert [(3, (10, 11, 12))] == saved(stage.compute(12, "second"))


def test_nothing_is_saved_while_the_breaker_is_open() -> None:
    """Goal: no pins for a dead store. Method: a lookup finds it dead; afterwards the chunk that follows saves all there is."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(0, is_lost=True)
    assert [] == stage.compute(8)

    for _ in range(limits.PROBES_TO_CLOSE):
        stage.wait(stage.now + limits.STORE_PROBE_S)
        stage.feed(events.ProbeEnded(is_healthy=True))
    assert [(1, (10, 11, 12))] == saved(stage.compute(12))


def test_progress_of_a_step_before_a_preemption_is_not_saved() -> None:
    """Goal: its blocks are no longer the request's. Method: the output comes back after the preemption."""
    stage = started()
    scheduled = stage.machine.chain(R)
    stage.feed(events.RequestPreempted(request_id=R))

    assert [] == stage.compute(8, chain=scheduled)
    assert 1 == stage.counts[counters.STALE_PROGRESS, ""]
    assert [(1, (10, 11))] == saved(stage.compute(8))


def test_progress_of_an_earlier_request_of_the_same_id_is_not_saved() -> None:
    """Goal: request ids come again. Method: end, come again, and the old step's output."""
    stage = started()
    scheduled = stage.machine.chain(R)
    stage.end()
    assert [] == stage.compute(8, chain=scheduled)
    stage.arrive()

    assert [] == stage.compute(8, chain=scheduled)


def test_saves_outlive_their_request() -> None:
    """Goal: pins keep the bytes, whatever becomes of the request. Method: abort, preempt, and then the ends."""
    stage = started()
    stage.compute(8)
    stage.feed(events.RequestPreempted(request_id=R))

    assert [] == stage.end()
    assert [unpin(10, 11)] == stage.save_ended()
    assert 0 == stage.machine.num_requests


def test_what_was_computed_before_a_reset_is_not_saved_after_it() -> None:
    """Goal: no KV of old weights under new keys. Method: a request that lives through the reset, and one that comes after."""
    stage = started()
    scheduled = stage.machine.chain(R)
    stage.feed(events.PoolReset(namespace="n2"))

    assert [] == stage.compute(8, chain=scheduled) + stage.compute(8)
    stage.arrive("later")
    (_, ordered) = stage.compute(8, "later")
    assert "n2" == ordered.order.namespace


def test_a_save_from_before_a_reset_says_nothing_of_the_new_namespace() -> None:
    """Goal: the new namespace gets its own objects. Method: the same blocks are saved before and after, ends crossed."""
    stage = started()
    stage.compute(8)
    stage.feed(events.PoolReset(namespace="n2"))
    stage.arrive("later")
    assert [(2, (10, 11))] == saved(stage.compute(8, "later"))
    stage.save_ended(save_id=1)
    stage.arrive("third")

    assert [] == saved(stage.compute(8, "third"))


def test_a_request_that_must_not_save_does_not() -> None:
    """Goal: the connector decides who saves. Method: may_save False."""
    stage = SchedulerStage()
    stage.arrive(may_save=False)

    assert [] == stage.compute(24)


def test_groups_with_larger_blocks_are_named_by_their_last_hash() -> None:
    """Goal: the hash of a block covers all its tokens. Method: a group of two hashes a block, one of one with nulls."""
    groups = tuple(
        GroupLayout(tokens_per_block=size, kernel_blocks_per_block=1, window_tokens=window, has_recurrent_state=False)
        for size, window in ((8, 0), (4, 4))
    )
    stage = SchedulerStage(groups=groups)
    stage.arrive()
    stage.answer(0)

    (_, ordered) = stage.compute(20, table=((10, 11, 12), (0, 0, 0, 23, 24)))

    assert [((10, 11), (HASHES[1], HASHES[3])), ((23, 24), (HASHES[3], HASHES[4]))] == [
        (group.block_ids, group.hashes) for group in ordered.order.groups
    ]


def test_hashes_that_are_not_there_yet_are_waited_for() -> None:
    """Goal: no block without a name is saved, and none is skipped. Method: two hashes for three blocks, then more."""
    stage = SchedulerStage()
    hashes = HASHES[:2]
    stage.arrive(hashes=hashes, num_prompt_tokens=8)
    assert [(1, (10, 11))] == saved(stage.compute(12))
    hashes += HASHES[2:4]

    assert [(2, (12, 13))] == saved(stage.compute(16))


def test_what_is_known_is_forgotten_after_a_while() -> None:
    """Goal: a prefix that was evicted is saved again some day. Method: two ages of five minutes."""
    known = Known()
    known.age(0.0)
    known.learn([(0, b"a")], 0.0)
    known.age(limits.KNOWN_STORED_S)
    assert known.has((0, b"a"))
    known.age(2 * limits.KNOWN_STORED_S)
    assert not known.has((0, b"a"))


def test_what_is_known_is_bounded() -> None:
    """Goal: memory does not grow with traffic. Method: a bound of two names; the oldest are forgotten."""
    known = Known(max_names=2)
    for index in range(6):
        known.learn([(0, bytes([index]))], 0.0)

    assert [False, False, True, True, True, True] == [known.has((0, bytes([index]))) for index in range(6)]


def test_a_stranger_has_no_chain() -> None:
    """Goal: steps of requests without a book carry none. Method: ask for one."""
    assert None is SchedulerStage().machine.chain(RequestId("stranger"))
