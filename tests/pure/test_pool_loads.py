"""Loads of the scheduler: given these events, exactly these actions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.pool_stage import R, SchedulerStage, blocks, pin, report, unpin
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.types import Outcome
from vllm_mooncake_ascend.wire.pool_steps import LoadOrder

ALL = (10, 11, 12, 13, 14, 15)
CANCEL = actions.CancelLoad(load_id=1)


def loading(**settings: Any) -> SchedulerStage:
    stage = SchedulerStage(**settings)
    stage.loading()
    return stage


def test_a_load_is_pinned_and_ordered_for_exactly_its_range() -> None:
    """Goal: the local prefix is neither pinned nor written. Method: two local blocks, three from the pool."""
    stage = SchedulerStage()
    stage.arrive(num_local_tokens=8)
    stage.answer(20)
    stage.ask(8)

    order = LoadOrder(load_id=1, request_id=R, namespace="n", groups=blocks(2, 5))
    assert [pin(12, 13, 14), actions.OrderLoad(order=order)] == stage.allocate(12, 8)
    assert 3 == stage.machine.num_pinned_blocks


def test_a_load_that_came_is_unpinned_and_reported_once() -> None:
    """Goal: one report. Method: the end comes twice."""
    stage = loading()

    assert [unpin(*ALL), report()] == stage.load_ended()
    assert [] == stage.load_ended()


def test_every_rank_must_have_loaded() -> None:
    """Goal: half of the heads is no KV. Method: two ranks end one after the other."""
    stage = loading(num_ranks=2)

    assert [] == stage.load_ended()
    assert [unpin(*ALL), report()] == stage.load_ended(rank=1)


def test_a_load_is_awaited_as_long_as_a_request_waits_for_it() -> None:
    """Goal: an engine waits at its workers for them alone. Method: a load that comes, one that is given up while it hangs."""
    stage = loading(num_ranks=2)
    stage.load_ended()
    assert 1 == stage.machine.num_loading
    stage.load_ended(rank=1)
    assert 0 == stage.machine.num_loading

    stage = loading()
    stage.wait(limits.LOAD_WAIT_S)
    assert (0, 6) == (stage.machine.num_loading, stage.machine.num_pinned_blocks)


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.FAILED])
def test_a_failed_load_names_the_blocks_that_did_not_come(outcome: Outcome) -> None:
    """Goal: older vLLM computes what is missing and keeps the rest. Method: two blocks failed."""
    stage = loading()

    assert [unpin(*ALL), report((14, 15), ok=False)] == stage.load_ended(outcome, failed=(14, 15))


def test_a_request_is_let_down_once() -> None:
    """Goal: no loop of lookups and failed loads. Method: ask again after the failure."""
    stage = loading()
    stage.load_ended(Outcome.FAILED, failed=ALL)

    assert 0 == stage.ask()


def test_blocks_are_kept_until_all_ranks_have_ended_while_the_request_computes() -> None:
    """Goal: late bytes land in blocks of nobody. Method: report when the load is late, unpin at the end, an hour later."""
    stage = loading()

    assert [CANCEL, report(ALL, ok=False)] == stage.wait(limits.LOAD_WAIT_S)
    assert 6 == stage.machine.num_quarantined_blocks
    stage.end()
    assert [] == stage.wait(3_600.0)
    assert [unpin(*ALL)] == stage.load_ended(Outcome.FAILED, failed=(15,))
    assert 0 == stage.machine.num_quarantined_blocks


def test_the_report_waits_for_all_ranks_where_blocks_are_given_back() -> None:
    """Goal: as above on vLLM < 0.30. Method: no report until the rank has ended, an hour later."""
    stage = loading(can_report_unknown_at_once=False)

    assert [CANCEL] == stage.wait(3_600.0)
    assert [unpin(*ALL), report((15,), ok=False)] == stage.load_ended(Outcome.FAILED, failed=(15,))


def test_an_unknown_end_is_none() -> None:
    """Goal: a rank that has not fenced keeps the blocks. Method: a worker that breaks the rule, then keeps it."""
    stage = loading()

    assert [] == stage.load_ended(Outcome.UNKNOWN, failed=ALL)
    assert [unpin(*ALL), report(ALL, ok=False)] == stage.load_ended(Outcome.FAILED, failed=ALL)


def test_a_load_that_takes_too_long_is_given_up() -> None:
    """Goal: a stopped owner of memory costs ten seconds, not sixty. Method: no end within load_wait_s, then a late one."""
    stage = loading()

    assert [CANCEL, report(ALL, ok=False)] == stage.wait(limits.LOAD_WAIT_S)
    stage.now = 60.0
    assert [unpin(*ALL)] == stage.load_ended()
    assert 1 == stage.counts[counters.LOADS_ENDED, counters.TOO_LATE]


def test_what_one_rank_could_not_do_is_not_waited_for_on_another() -> None:
    """Goal: the request computes at once. Method: one of two ranks fails, the other has fenced much later."""
    stage = loading(num_ranks=2)

    assert [CANCEL, report(ALL, ok=False)] == stage.load_ended(Outcome.FAILED, failed=(10,))
    assert [] == stage.wait(100.0)
    assert [unpin(*ALL)] == stage.load_ended(Outcome.FAILED, rank=1)


def test_an_aborted_load_is_reported_too() -> None:
    """Goal: vLLM frees an aborted request only after its report. Method: abort, then the rank's end; old and new vLLM."""
    stage = loading()
    assert [CANCEL, report(ALL, ok=False)] == stage.end()
    assert [unpin(*ALL)] == stage.load_ended(Outcome.FAILED, failed=ALL)

    old = loading(can_report_unknown_at_once=False)
    assert [CANCEL] == old.end()
    assert [unpin(*ALL), report((15,), ok=False)] == old.load_ended(Outcome.FAILED, failed=(15,))


def test_a_rank_that_never_ends_keeps_the_blocks() -> None:
    """Goal: no waiting turns silence into an end. Method: an hour."""
    stage = loading()
    stage.wait(3_600.0)

    assert 6 == stage.machine.num_pinned_blocks
    assert 1 == stage.counts[counters.LOADS_OVERDUE, ""]
    assert [unpin(*ALL)] == stage.load_ended()


def test_what_was_not_offered_is_reported_failed() -> None:
    """Goal: vLLM never waits for what will not come. Method: more tokens than offered, a stranger, a request let down."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(8)

    assert [report((10, 11, 12), ok=False)] == stage.allocate(12)
    assert [report((10,), ok=False)] == stage.allocate(4)
    assert [report((10,), "stranger", ok=False)] == stage.allocate(4, request_id="stranger")


def test_no_remote_tokens_start_nothing() -> None:
    """Goal: vLLM calls a second time, with none, after every load; nothing is owed for that. Method: before and after one."""
    stage = loading()
    stage.load_ended()

    assert [] == stage.allocate(0)


def test_less_than_offered_is_loaded() -> None:
    """Goal: vLLM may cap what it takes. Method: two of six blocks."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(24)

    assert [pin(10, 11)] == stage.allocate(8)[:1]


def test_a_reset_gives_up_what_is_being_loaded() -> None:
    """Goal: no KV of other weights. Method: reset while the ranks load; their success comes too late."""
    stage = loading()

    assert [CANCEL, report(ALL, ok=False)] == stage.feed(events.PoolReset(namespace="n2"))
    assert [unpin(*ALL)] == stage.load_ended()


def test_a_request_id_may_come_again_while_its_old_load_has_not_ended() -> None:
    """Goal: loads are told apart by their own numbers. Method: the new request loads and ends while the old blocks wait."""
    stage = loading()
    stage.end()
    stage.now = 1.0
    stage.arrive()
    stage.answer(24, 2)
    stage.allocate(24)

    assert [unpin(*ALL), report()] == stage.load_ended(load_id=2)
    assert 6 == stage.machine.num_quarantined_blocks


def test_only_the_window_and_the_newest_state_are_loaded() -> None:
    """Goal: groups load what they need. Method: full attention, a window of four tokens and a state over six blocks; null
    blocks where vLLM holds nothing."""
    groups = tuple(
        GroupLayout(tokens_per_block=4, kernel_blocks_per_block=1, window_tokens=window, has_recurrent_state=is_state)
        for window, is_state in ((0, False), (4, False), (0, True))
    )
    stage = SchedulerStage(groups=groups)
    stage.arrive(num_prompt_tokens=25)
    stage.answer(24)
    table = (ALL, (0, 0, 0, 0, 24, 25), (0, 0, 0, 0, 0, 35))
    allocated = events.BlocksAllocated(
        request_id=R, num_local_tokens=0, num_remote_tokens=24, block_ids=table, loaded_block_ids=(*ALL, 25, 35)
    )

    _, ordered = stage.feed(allocated)

    assert [ALL, (25,), (35,)] == [group.block_ids for group in ordered.order.groups]


def test_a_full_table_of_loads_offers_nothing() -> None:
    """Goal: what vLLM waits for is bounded. Method: as many loads as may be, and one more request."""
    stage = SchedulerStage()
    for number in range(limits.MAX_LOADS):
        stage.arrive(f"r{number}")
        stage.answer(24, number + 1)
        stage.allocate(24, request_id=f"r{number}")
    stage.arrive("more")
    stage.answer(24, limits.MAX_LOADS + 1)

    assert 0 == stage.ask(request_id="more")
