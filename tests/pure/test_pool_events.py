"""What the pool's machine tells of blocks that are in the pool, and of those that are not any more."""

from __future__ import annotations

from typing import Any

from tests.pure.pool_stage import HASHES, SchedulerStage, WorkerStage, saved
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.pool.told import Told
from vllm_mooncake_ascend.types import Outcome

KV_EVENTS = (actions.Stored, actions.NotStored, actions.Gone)


def told(done: list[Any]) -> list[Any]:
    """Those actions that are about KV events."""
    return [action for action in done if isinstance(action, KV_EVENTS)]


def gone(*positions: int) -> actions.Gone:
    return actions.Gone(blocks=tuple((0, HASHES[position]) for position in positions))


def computing(**settings: Any) -> SchedulerStage:
    """One request that found nothing in the pool, and somebody who listens."""
    stage = SchedulerStage(**({"tells_events": True} | settings))
    stage.arrive()
    stage.answer(0)
    return stage


def stored() -> SchedulerStage:
    """All six blocks are in the pool and told to be; the request has ended."""
    stage = computing()
    stage.compute(24)
    stage.save_ended()
    stage.end()
    return stage


def load_again(stage: SchedulerStage) -> None:
    """A second request finds them all, and its load begins."""
    stage.arrive()
    stage.answer(24, lookup_id=2)
    stage.ask()
    stage.allocate(24)


def test_a_save_is_told_when_every_rank_has_put_it() -> None:
    """Goal: no router sends a request to half a block. Method: two ranks, one after the other."""
    stage = computing(num_ranks=2)
    stage.compute(8)

    assert [] == told(stage.save_ended())
    assert [actions.Stored(save_id=1)] == told(stage.save_ended(rank=1))


def test_a_save_that_failed_anywhere_is_not_told() -> None:
    """Goal: only what can be loaded is told. Method: one of two ranks fails, or does not know."""
    for outcome in (Outcome.FAILED, Outcome.UNKNOWN, Outcome.REFUSED):
        stage = computing(num_ranks=2)
        stage.compute(8)
        stage.save_ended()

        assert [actions.NotStored(save_id=1)] == told(stage.save_ended(outcome, rank=1))


def test_nothing_is_told_where_nobody_listens() -> None:
    """Goal: events cost nothing when they are off. Method: a save, and a reset."""
    stage = computing(tells_events=False)
    stage.compute(8)

    assert [] == told(stage.save_ended() + stage.feed(events.PoolReset(namespace="m")))


def test_a_save_that_leans_on_a_block_that_is_not_there_is_not_told() -> None:
    """Goal: a router never counts on a prefix with a hole. Method: save 2 leans on save 1, which fails."""
    stage = computing()
    stage.compute(8)
    stage.arrive("second")
    stage.compute(12, "second")
    stage.save_ended(Outcome.FAILED, 1)

    assert [actions.NotStored(save_id=2)] == told(stage.save_ended(Outcome.DONE, 2))


def test_a_reset_takes_everything_back() -> None:
    """Goal: nobody is sent for what is of the past. Method: what was told, and a save under way."""
    stage = stored()
    stage.arrive("second", hashes=[b"x"])
    stage.compute(4, "second", table=((20,),))

    assert [gone(0, 1, 2, 3, 4, 5)] == told(stage.feed(events.PoolReset(namespace="m")))
    assert [actions.NotStored(save_id=2)] == told(stage.save_ended(save_id=2))


def test_a_lost_store_takes_everything_back() -> None:
    """Goal: a master that comes back empty has misled nobody. Method: a lookup finds it dead; elsewhere a save does."""
    by_lookup, by_save = stored(), stored()
    by_lookup.arrive("second")
    by_save.arrive("second", hashes=[b"x"])
    by_save.compute(4, "second", table=((20,),))

    assert [gone(0, 1, 2, 3, 4, 5)] == told(by_lookup.answer(0, lookup_id=2, is_lost=True))
    assert [gone(0, 1, 2, 3, 4, 5), actions.NotStored(save_id=2)] == told(
        by_save.save_ended(Outcome.REFUSED, 2, reason=counters.STORE_LOST)
    )


def test_a_key_that_was_missing_is_taken_back_once() -> None:
    """Goal: what the store evicted is not told for ever. Method: two ranks miss the third block of a load."""
    stage = SchedulerStage(tells_events=True, num_ranks=2)
    stage.arrive()
    stage.answer(0)
    stage.compute(24)
    stage.save_ended()
    stage.save_ended(rank=1)
    stage.end()
    load_again(stage)

    first = stage.load_ended(Outcome.FAILED, failed=(12, 13), missing=(12,))
    second = stage.load_ended(Outcome.FAILED, rank=1, failed=(12, 13, 14), missing=(12,))
    assert [gone(2)] == told(first + second)


def test_a_key_that_was_missing_is_saved_again() -> None:
    """Goal: an evicted prefix comes back with the next request that has it. Method: the third of six known blocks is missing;
    its request computes it anew. What leans on it is saved with it."""
    stage = stored()
    load_again(stage)
    stage.load_ended(Outcome.FAILED, failed=(12, 13, 14, 15), missing=(12,))

    assert [(2, (12, 13, 14, 15))] == saved(stage.compute(24))


def test_a_key_that_was_missing_before_a_reset_says_nothing() -> None:
    """Goal: equal hashes of two namespaces are not mixed up. Method: a load of the old one ends after the new one has all."""
    stage = stored()
    load_again(stage)
    stage.feed(events.PoolReset(namespace="m"))
    stage.arrive("third")
    stage.compute(24, "third", table=((20, 21, 22, 23, 24, 25),))
    stage.save_ended(save_id=2)

    assert [] == told(stage.load_ended(Outcome.FAILED, failed=(12,), missing=(12,)))


def test_what_cannot_be_remembered_is_taken_back() -> None:
    """Goal: bounded memory, and no block that stays told for ever. Method: room for two names."""
    done: list[Any] = []
    memory = Told(done.append, is_heard=True, max_names=2)
    memory.stored(1, [(0, b"a"), (0, b"b")])
    memory.stored(2, [(0, b"a"), (1, b"a")])

    assert [actions.Stored(save_id=1), actions.Stored(save_id=2), actions.Gone(blocks=((0, b"b"),))] == done


def test_a_worker_names_the_blocks_that_were_missing() -> None:
    """Goal: only what is certain is taken back. Method: a call in which all that failed was missing, and a mixed one."""
    missing = []
    for num_missing in (1, 2):
        stage = WorkerStage()
        stage.plan_load(calls=((10, 11, 12), (13,)))
        done = stage.got(Outcome.DONE, Outcome.FAILED, Outcome.FAILED, num_missing=num_missing)
        missing += [
            (one.ended.missing_block_ids, one.ended.failed_block_ids) for one in done if isinstance(one, actions.EndLoad)
        ]

    assert [((), (11, 12, 13)), ((11, 12), (11, 12, 13))] == missing
