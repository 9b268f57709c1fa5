"""runtime.pool_scheduler: lookups never block vLLM's scheduler thread, and every receive is reported once. In-memory store."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.contract.pool_engines import BLOCK_TOKENS, GROUP, NAMESPACE, WAIT_S, Engine, engine, hashes
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines import store_codes
from vllm_mooncake_ascend.engines.base import StoreAnswer, StoreHealth, StoreKey
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.planner.pool_keys import Shard
from vllm_mooncake_ascend.pool import actions, counters
from vllm_mooncake_ascend.pool.settings import PoolSettings
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.pool_lookups import PoolLookups
from vllm_mooncake_ascend.testing.held_store import Gate
from vllm_mooncake_ascend.testing.memory_store import MemoryPool
from vllm_mooncake_ascend.types import RequestId


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    """A pool that one engine has put blocks 0 to 5 of prompt `a` into, and lends memory to."""
    made = MemoryPool()
    with engine(made, seed=1) as writer:
        writer.save("writer", hashes(6), range(10, 16))
        yield made


def count_of(made: Engine, name: str, reason: str = "") -> float:
    """A counter of the scheduler since its statistics were taken last."""
    return float(made.scheduler.take_stats().get("counters", {}).get(name, {}).get(reason, 0))


# --- lookups -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_blocks", "family", "num_hit"), [(6, "a", 6), (8, "a", 6), (3, "a", 3), (6, "b", 0)])
def test_a_lookup_finds_the_longest_prefix(pool: MemoryPool, num_blocks: int, family: str, num_hit: int) -> None:
    """Goal: as much as is there, never more. Method: prompts shorter and longer than what is stored, and a strange one."""
    with engine(pool) as made:
        request_id = made.arrive("r", hashes(num_blocks, family))
        found = made.hit_tokens(request_id)
    assert num_hit * BLOCK_TOKENS == found


def test_only_what_is_beyond_the_local_hit_is_offered(pool: MemoryPool) -> None:
    """Goal: nothing is loaded that is here. Method: four of six blocks are local."""
    with engine(pool) as made:
        request_id = made.arrive("r", hashes(6), num_local_tokens=4 * BLOCK_TOKENS)
        found = made.hit_tokens(request_id, 4 * BLOCK_TOKENS)
    assert 2 * BLOCK_TOKENS == found


def test_lookups_run_on_threads_of_their_own(pool: MemoryPool) -> None:
    """Goal: the scheduler thread never waits for the store. Method: which threads called it; what feeding says meanwhile."""
    with engine(pool) as made:
        gate = made.scheduler_store.hold("exists")
        request_id = made.arrive("r", hashes(6))
        assert gate.entered.wait(WAIT_S)
        meanwhile = made.scheduler.hit_tokens(request_id, 0)
        gate.open()
        found = made.hit_tokens(request_id)
        threads = {thread for name, thread in made.scheduler_store.threads if name == "exists"}
    assert (None, 6 * BLOCK_TOKENS) == (meanwhile, found)
    assert {"mooncake-ascend-pool-lookup-0", "mooncake-ascend-pool-lookup-1"} >= threads


def test_a_slow_store_costs_a_request_its_lookup_wait(pool: MemoryPool) -> None:
    """Goal: late is a miss. Method: a lookup that hangs until vLLM has admitted the request; the late answer is counted."""
    with engine(pool, lookup_wait_s=0.01) as made:
        gate = made.scheduler_store.hold("exists")
        slow = made.arrive("slow", hashes(6))
        assert gate.entered.wait(WAIT_S)
        assert made.hit_tokens(slow) == 0
        made.allocate(slow, range(6), num_tokens=0)
        gate.open()
        made.step_until(lambda: count_of(made, counters.LOOKUPS_TOO_LATE) == 1)
        still = made.scheduler.hit_tokens(slow, 0)
    assert 0 == still


def test_the_scheduler_thread_is_woken_by_answers_and_by_the_end_of_waiting(pool: MemoryPool) -> None:
    """Goal: a sleeping engine need not poll. Method: clear the event, then wait for it: for an answer, and for a late one."""
    with engine(pool, lookup_wait_s=0.05) as made:
        gate = made.scheduler_store.hold("exists")
        request_id = made.arrive("r", hashes(6))
        assert gate.entered.wait(WAIT_S)
        assert made.scheduler.hit_tokens(request_id, 0) is None
        made.news.clear()
        is_told_of_lateness = made.news.wait(WAIT_S)
        made.news.clear()
        gate.open()
        is_told_of_answer = made.news.wait(WAIT_S)
    assert (True, True) == (is_told_of_lateness, is_told_of_answer)


def test_a_lookup_that_raises_is_a_miss_and_one_line(pool: MemoryPool, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a bug in a lookup harms nobody. Method: a store that raises, two requests."""
    with engine(pool) as made:
        made.scheduler_store.fail("exists", ZeroDivisionError("a bug"))
        found = [made.hit_tokens(made.arrive(name, hashes(6))) for name in ("r1", "r2")]
    assert ([0, 0], 1) == (found, sum("a lookup in the pool raised" in record.message for record in caplog.records))


class Listing:
    """A store that has every key but `missing`, and writes down what it was asked for, call by call."""

    def __init__(self, *missing: StoreKey) -> None:
        self.calls: list[list[StoreKey]] = []
        self._missing = missing

    def exists(self, keys: Sequence[StoreKey]) -> StoreAnswer:
        self.calls.append(list(keys))
        found = [store_codes.exists_result(int(key not in self._missing)) for key in keys]
        return StoreAnswer(results=tuple(found), is_lost=False)


def lookup(store: Listing, *, num_hashes: int, groups: tuple[GroupLayout, ...], shards: tuple[Shard, ...]) -> int:
    """End token of one lookup of a prompt with so many hashes of four tokens."""
    settings = PoolSettings(
        namespace=NAMESPACE,
        groups=groups,
        hash_tokens=BLOCK_TOKENS,
        num_ranks=1,
        can_report_unknown_at_once=True,
        max_saved_blocks=1,
    )
    wanted = actions.StartLookup(
        lookup_id=1,
        request_id=RequestId("r"),
        namespace=NAMESPACE,
        hashes=hashes(num_hashes),
        first_token=0,
        end_token=num_hashes * BLOCK_TOKENS,
    )
    return PoolLookups(store, settings, shards, answered=lambda *_: None, clock=boot_s).run(wanted).end_token


def test_a_lookup_asks_for_every_shard_within_the_limit_of_a_call() -> None:
    """Goal: no call above MAX_LOOKUP_KEYS, all keys asked. Method: three shards of more blocks than one call takes in all."""
    store = Listing()
    shards = tuple(Shard(group_index=0, name=f"{index:024d}", ranks=(index,)) for index in range(3))
    num_blocks = limits.MAX_LOOKUP_KEYS // 2
    found = lookup(store, num_hashes=num_blocks, groups=(GROUP,), shards=shards)
    assert [limits.MAX_LOOKUP_KEYS, num_blocks] == [len(call) for call in store.calls]
    assert (num_blocks * BLOCK_TOKENS, 3 * num_blocks) == (found, len({key for call in store.calls for key in call}))


def test_one_missing_shard_ends_the_prefix() -> None:
    """Goal: a block is there when all its shards are. Method: block 2 of the second shard is missing."""
    shards = tuple(Shard(group_index=0, name=f"{index:024d}", ranks=(index,)) for index in range(2))
    missing = f"{NAMESPACE}/0/{shards[1].name}/{hashes(3)[2].hex()}"
    found = lookup(Listing(missing), num_hashes=6, groups=(GROUP,), shards=shards)
    assert 2 * BLOCK_TOKENS == found


def test_blocks_of_several_hashes_are_known_by_their_last() -> None:
    """Goal: groups with other block sizes. Method: blocks of eight tokens, hashes of four; the second block is missing."""
    wide = GroupLayout(tokens_per_block=2 * BLOCK_TOKENS, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
    shards = tuple(Shard(group_index=index, name="0" * 24, ranks=(0,)) for index in range(2))
    missing = f"{NAMESPACE}/1/{shards[1].name}/{hashes(4)[3].hex()}"
    store = Listing(missing)
    found = lookup(store, num_hashes=6, groups=(GROUP, wide), shards=shards)
    asked = [key.rpartition("/")[2] for key in store.calls[0] if key.split("/")[1] == "1"]
    assert (2 * BLOCK_TOKENS, [hashes(6)[index].hex() for index in (1, 3, 5)]) == (found, asked)


# --- a store that is not there -----------------------------------------------------------------------------------------------


def test_a_dead_store_is_asked_once_and_comes_back(pool: MemoryPool) -> None:
    """Goal: the breaker, and recovery without a restart. Method: kill the master, look up twice, start it, look up again."""
    with engine(pool) as made:
        pool.kill_master()
        lost = [made.hit_tokens(made.arrive(name, hashes(6))) for name in ("r1", "r2")]
        num_calls = sum(name == "exists" for name, _ in made.scheduler_store.threads)
        pool.start_master()
        made.step_until(lambda: count_of(made, counters.BREAKER_CLOSED) == 1)
        made.save("writer", hashes(6), range(10, 16))
        found = made.hit_tokens(made.arrive("r3", hashes(6)))
    assert ([0, 0], 1, 6 * BLOCK_TOKENS) == (lost, num_calls, found)


def test_a_master_that_is_not_there_at_the_start_is_joined_later(pool: MemoryPool, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: an engine starts without the pool. Method: no master at the start; one request; then there is one."""
    pool.stop_master()
    with engine(pool) as made:
        before = made.hit_tokens(made.arrive("r1", hashes(6)))
        told = [record.message for record in caplog.records if "cannot be used yet" in record.message]
        pool.start_master()
        made.step_until(lambda: count_of(made, counters.BREAKER_CLOSED) == 1)
        after = made.hit_tokens(made.arrive("r2", hashes(6)))
    assert (0, 6 * BLOCK_TOKENS, 2) == (before, after, len(told))  # the scheduler and its worker each say it once


def test_a_store_that_raises_when_probed_is_not_healthy(pool: MemoryPool) -> None:
    """Goal: the control thread survives. Method: `health` raises for a while; the breaker closes when it does no more."""
    with engine(pool) as made:
        pool.kill_master()
        made.scheduler_store.fail("health", ZeroDivisionError("a bug"))
        assert made.hit_tokens(made.arrive("r1", hashes(6))) == 0
        made.step_until(lambda: any(name == "health" for name, _ in made.scheduler_store.threads))
        pool.start_master()
        made.scheduler_store.heal("health")
        made.step_until(lambda: count_of(made, counters.BREAKER_CLOSED) == 1)


# --- receives --------------------------------------------------------------------------------------------------------------


def test_a_load_is_reported_once_and_its_blocks_are_unpinned(pool: MemoryPool) -> None:
    """Goal: one report a receive. Method: load, then look at pins, reports and what there is to do."""
    with engine(pool) as made:
        report = made.load("r", hashes(6), range(20, 26))
        made.step_until(lambda: made.num_pinned == 0)
        state = (made.scheduler.num_waiting, made.scheduler.has_pending, len(made.reports))
    assert report is not None
    assert (True, (0, False, 1)) == (report.ok, state)


def break_machine(made: Engine, request_id: RequestId) -> None:
    """Do what vLLM never does: allocate twice for one receive. The machine's assertion fails."""
    made.allocate(request_id, range(20, 26), num_tokens=6 * BLOCK_TOKENS)


def loading(made: Engine, name: str = "r") -> tuple[RequestId, Gate]:
    """A request whose load is under way, held at its worker."""
    gate = made.stores[0].hold("get")
    request_id = made.arrive(name, hashes(6))
    made.allocate(request_id, range(20, 26), num_tokens=made.hit_tokens(request_id))
    assert gate.entered.wait(WAIT_S)
    return request_id, gate


def test_a_broken_machine_fails_what_is_owed_and_turns_the_pool_off(pool: MemoryPool, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a bug of ours costs hits, never a request or a wrong block. Method: break it with a load under way and another
    request about to get blocks; look at reports, pins, hits, orders and the counter."""
    with engine(pool, is_strict=False) as made:
        first, gate = loading(made)
        second = made.arrive("second", hashes(6))
        assert made.hit_tokens(second) > 0
        break_machine(made, first)
        made.allocate(second, range(30, 36), num_tokens=6 * BLOCK_TOKENS)
        gate.open()
        made.step()
        made.step()
        reports = [(report.request_id, report.ok, report.block_ids) for report in made.reports]
        after = (made.hit_tokens(made.arrive("third", hashes(6))), made.scheduler.chain(first), made.scheduler.has_pending)
        num_broken = count_of(made, names.INVARIANTS_BROKEN, "pool_scheduler")
    assert [(first, False, tuple(range(20, 26))), (second, False, tuple(range(30, 36)))] == reports
    assert ((0, None, False), 6, 1) == (after, made.num_pinned, num_broken)
    assert any("please report this" in record.message for record in caplog.records)


def test_where_a_failed_receive_keeps_its_blocks_the_report_waits_for_the_ranks(pool: MemoryPool) -> None:
    """Goal: no late byte reaches a live block on older vLLM either. Method: break it during a load; then let the load end."""
    with engine(pool, is_strict=False, can_report_unknown_at_once=False) as made:
        request_id, gate = loading(made)
        break_machine(made, request_id)
        made.step()
        early = list(made.reports)
        gate.open()
        made.step_until(lambda: bool(made.reports))
    assert ([], [(request_id, False)]) == (early, [(report.request_id, report.ok) for report in made.reports])


def test_in_strict_mode_a_broken_machine_is_raised(pool: MemoryPool) -> None:
    """Goal: tests see every bug. Method: break it; the call that brought the event raises, and so does the next."""
    with engine(pool) as made:
        request_id, gate = loading(made)
        with pytest.raises(LocalProtocolError):
            break_machine(made, request_id)
        with pytest.raises(LocalProtocolError):
            made.scheduler.drain()
        gate.open()


# --- the end -----------------------------------------------------------------------------------------------------------------


def test_closing_waits_for_a_lookup_under_way_and_leaves_no_thread(pool: MemoryPool) -> None:
    """Goal: nothing survives. Method: close with a lookup held; `engine` counts threads."""
    with engine(pool) as made:
        gate = made.scheduler_store.hold("exists")
        made.arrive("r", hashes(6))
        assert gate.entered.wait(WAIT_S)
        closing = threading.Thread(target=made.scheduler.close)
        closing.start()
        gate.open()
        closing.join()
        made.scheduler.close()
        health = made.scheduler_store.health()
    assert StoreHealth.CLOSED is health


def test_own_cost_of_a_long_prompt_is_small(pool: MemoryPool) -> None:
    """Goal: 0.3 ms on the scheduler thread for 8,192 blocks. Method: the best of many arrivals and questions; the bound is
    loose, as machines are busy."""
    names_of_blocks = hashes(8_192, "b")
    with engine(pool) as made:
        costs_s = []
        for index in range(50):
            started_s = boot_s()
            request_id = made.arrive(f"r{index}", names_of_blocks)
            made.scheduler.hit_tokens(request_id, 0)
            costs_s.append(boot_s() - started_s)
            made.hit_tokens(request_id)
            made.end(request_id)
    assert min(costs_s) < 0.0003
