"""runtime.pool_worker: bytes go into the pool and come out of it, and every order is answered once. In-memory store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from tests.contract.pool_engines import NAMESPACE, WAIT_S, Engine, engine, hashes
from vllm_mooncake_ascend.devices.cpu import CpuDevice
from vllm_mooncake_ascend.engines.base import KeyOutcome, KeyResult, KVStore, StoreAnswer, StoreHealth
from vllm_mooncake_ascend.engines.native_store import MIN_SEGMENT_BYTES, StoreSettings
from vllm_mooncake_ascend.engines.sealed_store import SealedStore
from vllm_mooncake_ascend.engines.store import MooncakeStore
from vllm_mooncake_ascend.errors import DeviceError, LocalProtocolError
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.planner.pool_keys import key_prefix
from vllm_mooncake_ascend.pool import counters
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.pool_worker import PoolWorkerShell
from vllm_mooncake_ascend.testing.memory_store import GetFault, MemoryPool, PutFault
from vllm_mooncake_ascend.testing.pool_master import PoolMaster
from vllm_mooncake_ascend.types import Outcome, RequestId
from vllm_mooncake_ascend.wire.pool_steps import GroupBlocks, LoadEnded, LoadOrder, PoolStep, SaveEnded, SaveOrder

_TRANSFER_FAIL, _FULL = -800, -200
STORED = tuple(range(10, 16))
LOADED = tuple(range(20, 26))


def blocks(block_ids: Sequence[int], family: str = "a") -> tuple[GroupBlocks, ...]:
    return (GroupBlocks(group_index=0, block_ids=tuple(block_ids), hashes=tuple(hashes(len(block_ids), family))),)


def load(load_id: int = 1, block_ids: Sequence[int] = LOADED, family: str = "a") -> LoadOrder:
    return LoadOrder(load_id=load_id, request_id=RequestId("r"), namespace=NAMESPACE, groups=blocks(block_ids, family))


def save(save_id: int = 1, block_ids: Sequence[int] = STORED, family: str = "a", chain: int = 0) -> SaveOrder:
    groups = blocks(block_ids, family)
    return SaveOrder(save_id=save_id, chain=chain or save_id, request_id=RequestId("r"), namespace=NAMESPACE, groups=groups)


def ended(worker: PoolWorkerShell, count: int) -> list[LoadEnded | SaveEnded]:
    """The next answers, this many."""
    found: list[LoadEnded | SaveEnded] = []
    deadline_s = boot_s() + WAIT_S
    while len(found) < count:
        assert boot_s() < deadline_s, f"{len(found)} of {count} answers came"
        worker.wait(0.05)
        results = worker.take_results()
        if results is not None:
            found += (*results.loads, *results.saves)
    return found


def key_of(made: Engine, index: int, rank: int = 0) -> str:
    """Key of block `index` of prompt `a` at a rank."""
    shard = next(shard for shard in made.shards if rank in shard.ranks)
    return key_prefix(NAMESPACE, 0, shard.name) + hashes(index + 1)[index].hex()


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    """A pool that one engine has put blocks 0 to 5 of prompt `a` into, and lends memory to."""
    made = MemoryPool()
    with engine(made, seed=1) as writer:
        writer.save("writer", hashes(6), STORED)
        yield made


# --- bytes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("total_heads", [1, 2])
def test_what_one_engine_saves_another_loads(tp_size: int, total_heads: int) -> None:
    """Goal: the right bytes at every rank. Method: two engines of one or two ranks, heads shared out or held by all."""
    pool = MemoryPool()
    options = {"tp_size": tp_size, "total_heads": min(tp_size, total_heads)}
    seed = 1
    with engine(pool, seed=seed, **options) as writer, engine(pool, **options) as reader:
        if total_heads == 1:
            for memory in writer.memories[1:]:
                memory[:] = writer.memories[0]
        writer.save("w", hashes(6), STORED)
        report = reader.load("r", hashes(6), LOADED)
        expected = [writer.block(block, rank) for rank in range(tp_size) for block in STORED]
        found = [reader.block(block, rank) for rank in range(tp_size) for block in LOADED]
        untouched = [reader.block(block, rank).any() for rank in range(tp_size) for block in STORED]
    assert report is not None
    assert report.ok
    assert np.array_equal(expected, found)
    assert not any(untouched)


def test_ranks_that_hold_the_same_bytes_store_each_block_once() -> None:
    """Goal: replicated KV is stored once, by whoever is its writer, whatever the TP of who loads. Method: two ranks save
    eight blocks; a store each counts the keys it was given; one rank loads them."""
    pool = MemoryPool()
    with engine(pool, seed=1, tp_size=2) as writer, engine(pool) as reader:
        writer.memories[1][:] = writer.memories[0]
        writer.save("w", hashes(8), range(10, 18))
        num_objects = len(pool.objects)
        has_put = [any(name == "put" for name, _ in store.threads) for store in writer.stores]
        report = reader.load("r", hashes(8), range(20, 28))
        found = [reader.block(20 + index) for index in range(8)]
        expected = [writer.block(10 + index) for index in range(8)]
    assert report is not None
    assert (8, [True, True], True) == (num_objects, has_put, report.ok)
    assert np.array_equal(expected, found)


def test_figures_of_a_load_and_a_save() -> None:
    """Goal: answers and statistics say what was moved. Method: six blocks of 128 bytes each way."""
    with engine(MemoryPool(), seed=1) as made:
        worker = made.workers[0]
        worker.submit(PoolStep(shards=made.shards, saves=(save(),)))
        (saved,) = ended(worker, 1)
        worker.submit(PoolStep(loads=(load(),)))
        (loaded,) = ended(worker, 1)
        stats = worker.take_stats()
    assert (Outcome.DONE, 0, 768, "") == (saved.outcome, saved.rank, saved.num_bytes, saved.reason)
    assert (Outcome.DONE, 0, 768, "") == (loaded.outcome, loaded.rank, loaded.num_bytes, loaded.reason)
    assert {"": 768} == stats["counters"][counters.PUT_BYTES] == stats["counters"][counters.GET_BYTES]
    assert 1 == len(stats["histograms"][names.POOL_GET_DURATION]) == len(stats["histograms"][names.POOL_PUT_DURATION])


# --- what cannot be planned ------------------------------------------------------------------------------------------------


def test_an_order_that_cannot_be_planned_is_refused(pool: MemoryPool, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a wrong order harms nobody. Method: the null block, one out of range, one twice, a strange group; a good one."""
    strange = LoadOrder(
        load_id=4,
        request_id=RequestId("r"),
        namespace=NAMESPACE,
        groups=(GroupBlocks(group_index=7, block_ids=(3,), hashes=(b"1",)),),
    )
    bad = (load(1, (0,)), load(2, (999,)), load(3, (5, 5)), strange)
    with engine(pool) as made:
        made.workers[0].submit(PoolStep(loads=(*bad, load(5))))
        found = {one.load_id: one for one in ended(made.workers[0], 5) if isinstance(one, LoadEnded)}
    assert [Outcome.REFUSED] * 4 + [Outcome.DONE] == [found[index].outcome for index in range(1, 6)]
    assert [(0,), (999,), (5, 5), (3,)] == [found[index].failed_block_ids for index in range(1, 5)]
    assert 4 == sum("cannot be planned" in record.message for record in caplog.records)


def test_a_save_before_the_shards_are_known_is_refused() -> None:
    """Goal: a block is never saved by a rank that cannot know that it is the writer. Method: without, then with shards."""
    with engine(MemoryPool(), seed=1) as made:
        made.workers[0].submit(PoolStep(saves=(save(1),)))
        before = ended(made.workers[0], 1)
        made.workers[0].submit(PoolStep(shards=made.shards, saves=(save(2),)))
        after = ended(made.workers[0], 1)
    assert [Outcome.REFUSED, Outcome.DONE] == [before[0].outcome, after[0].outcome]


# --- outcomes ----------------------------------------------------------------------------------------------------------------


def test_a_key_that_is_gone_fails_its_block_and_those_behind(pool: MemoryPool) -> None:
    """Goal: evicted between lookup and load. Method: one of six keys goes; the request is told, the reason is `missing`."""
    with engine(pool) as made:
        pool.evict(key_of(made, 3))
        made.workers[0].submit(PoolStep(loads=(load(),)))
        (found,) = ended(made.workers[0], 1)
    assert isinstance(found, LoadEnded)
    assert (Outcome.FAILED, counters.MISSING, (LOADED[3],)) == (found.outcome, found.reason, found.failed_block_ids)


def test_a_broken_object_fails_its_block_and_is_put_anew() -> None:
    """Goal: what was written over in the pool reaches no request, and bars nobody. Method: sealed stores; a byte of one of six
    objects is changed; load, save once more, load."""
    pool = MemoryPool()

    def make_store(num_bytes: int) -> KVStore:
        return SealedStore(pool.client(segment_bytes=num_bytes))

    made = Engine(make_store, seed=1)
    try:
        made.workers[0].submit(PoolStep(shards=made.shards, saves=(save(),)))
        ended(made.workers[0], 1)
        broken = pool.objects[key_of(made, 3)]
        broken.value = broken.value[:40] + b"?" + broken.value[41:]
        made.workers[0].submit(PoolStep(loads=(load(),)))
        (found,) = ended(made.workers[0], 1)
        errors = made.workers[0].take_stats()["counters"][names.POOL_STORE_ERRORS]
        is_gone = key_of(made, 3) not in pool.objects
        made.workers[0].submit(PoolStep(saves=(save(2),)))
        ended(made.workers[0], 1)
        made.workers[0].submit(PoolStep(loads=(load(2),)))
        (again,) = ended(made.workers[0], 1)
    finally:
        made.close()
    assert isinstance(found, LoadEnded)
    assert (Outcome.FAILED, counters.MISSING, (LOADED[3],)) == (found.outcome, found.reason, found.missing_block_ids)
    assert (LOADED[3],) == found.failed_block_ids
    assert ({"-801": 1.0}, True, Outcome.DONE) == (errors, is_gone, again.outcome)


@pytest.mark.parametrize(
    ("code", "outcome", "reason"),
    [
        (_FULL, Outcome.FAILED, counters.FULL),
        (_TRANSFER_FAIL, Outcome.UNKNOWN, counters.UNKNOWN),
    ],
)
def test_a_save_ends_as_its_worst_key(code: int, outcome: Outcome, reason: str) -> None:
    """Goal: full and unknown are told apart, and counted by code. Method: faults for the first key; full twice, as a
    full store is tried once more."""
    pool = MemoryPool()
    with engine(pool, seed=1) as made:
        pool.inject_put(key_of(made, 0), *[PutFault(code=code)] * 2)
        made.workers[0].submit(PoolStep(shards=made.shards, saves=(save(),)))
        (found,) = ended(made.workers[0], 1)
        errors = made.workers[0].take_stats()["counters"][names.POOL_STORE_ERRORS]
    assert (outcome, reason, {str(code): 1.0 + (code == _FULL)}) == (found.outcome, found.reason, errors)


def test_an_unknown_get_ends_only_behind_the_fence(pool: MemoryPool) -> None:
    """Goal: no late byte reaches a block after its report. Method: bytes held back by the owner; hold the fence; ask for the
    end; let the fence go, and then the bytes."""
    with engine(pool) as made:
        pool.inject_get(key_of(made, 2), GetFault(code=_TRANSFER_FAIL, num_landed=1, lands_late=True))
        gate = made.stores[0].hold("fence")
        made.workers[0].submit(PoolStep(loads=(load(),)))
        assert gate.entered.wait(WAIT_S)
        made.workers[0].submit(PoolStep(loads=(load(2, (30, 31)),)))
        is_told_early = made.workers[0].wait(0.05)
        gate.open()
        first, second = ended(made.workers[0], 2)
        before = made.memories[0].copy()
        pool.deliver()
        stays = np.array_equal(before, made.memories[0])
    assert (False, Outcome.FAILED, Outcome.DONE, True) == (is_told_early, first.outcome, second.outcome, stays)


@pytest.mark.parametrize("call", ["get", "put"])
def test_a_store_that_raises_leaves_every_key_unknown(pool: MemoryPool, call: str) -> None:
    """Goal: nothing is assumed about a call that raised. Method: a load is fenced and FAILED, a save UNKNOWN; both go on."""
    with engine(pool, seed=5) as made:
        made.stores[0].fail(call, ZeroDivisionError("a bug"))
        step = PoolStep(loads=(load(),)) if call == "get" else PoolStep(shards=made.shards, saves=(save(family="b"),))
        made.workers[0].submit(step)
        (found,) = ended(made.workers[0], 1)
        num_fences = sum(name == "fence" for name, _ in made.stores[0].threads)
        made.stores[0].heal(call)
        made.workers[0].submit(PoolStep(shards=made.shards, loads=(load(2),), saves=(save(2, family="c"),)))
        later = ended(made.workers[0], 2)
    assert ((Outcome.FAILED, 1) if call == "get" else (Outcome.UNKNOWN, 0)) == (found.outcome, num_fences)
    assert [Outcome.DONE] * 2 == [one.outcome for one in later]


class Mute:
    """A store that answers gets with nothing, or with an outcome that no get has."""

    def __init__(self, store: KVStore, results: tuple[KeyResult, ...]) -> None:
        self._store = store
        self._results = results

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get(self, *_: object) -> StoreAnswer:
        return StoreAnswer(results=self._results, is_lost=False)


@pytest.mark.parametrize("num_results", [0, 6])
def test_an_answer_that_makes_no_sense_is_unknown(pool: MemoryPool, num_results: int) -> None:
    """Goal: anything unlisted is UNKNOWN. Method: too few results, and results of another call; a fence ends it."""
    result = KeyResult(outcome=KeyOutcome.IN_USE, code=0, reason="")

    def make_store(num_bytes: int) -> KVStore:
        return Mute(pool.client(segment_bytes=num_bytes), (result,) * num_results)  # type: ignore[return-value]

    made = Engine(make_store)
    try:
        made.workers[0].submit(PoolStep(loads=(load(),)))
        (found,) = ended(made.workers[0], 1)
        num_fences = sum(name == "fence" for name, _ in made.stores[0].threads)
    finally:
        made.close()
    assert (Outcome.FAILED, counters.UNKNOWN, 1) == (found.outcome, found.reason, num_fences)


# --- threads -----------------------------------------------------------------------------------------------------------------


def test_no_call_holds_up_steps_or_other_loads(pool: MemoryPool) -> None:
    """Goal: the model-runner thread never waits, and no load behind a save or another load. Method: hold the put; then hold
    one get of two."""
    with engine(pool, seed=5) as made:
        worker = made.workers[0]
        put = made.stores[0].hold("put")
        worker.submit(PoolStep(shards=made.shards, saves=(save(family="b"),)))
        assert put.entered.wait(WAIT_S)
        worker.submit(PoolStep(loads=(load(1),)))
        (beside_a_put,) = ended(worker, 1)
        get = made.stores[0].hold("get")
        worker.submit(PoolStep(loads=(load(2),)))
        assert get.entered.wait(WAIT_S)
        made.stores[0].let_pass("get")
        worker.submit(PoolStep(loads=(load(3, (30, 31)),)))
        (beside_a_get,) = ended(worker, 1)
        get.open()
        put.open()
        ended(worker, 2)
    assert isinstance(beside_a_put, LoadEnded)
    assert isinstance(beside_a_get, LoadEnded)
    assert [(1, Outcome.DONE), (3, Outcome.DONE)] == [(one.load_id, one.outcome) for one in (beside_a_put, beside_a_get)]


def test_a_cancelled_load_starts_no_call(pool: MemoryPool) -> None:
    """Goal: cancels are heard while calls are under way. Method: two gets held, a third load cancelled."""
    with engine(pool) as made:
        get = made.stores[0].hold("get")
        made.workers[0].submit(PoolStep(loads=(load(1), load(2, range(30, 36)), load(3, range(40, 46)))))
        assert get.entered.wait(WAIT_S)
        made.workers[0].submit(PoolStep(cancels=(3,)))
        (cancelled,) = ended(made.workers[0], 1)
        get.open()
        ended(made.workers[0], 2)
    assert isinstance(cancelled, LoadEnded)
    assert (3, Outcome.REFUSED, counters.STOPPED) == (cancelled.load_id, cancelled.outcome, cancelled.reason)


class NotingDevice:
    """Writes down which thread bound it. `before` comes first, in the thread."""

    def __init__(self, before: Callable[[str], None] = lambda _: None) -> None:
        self.threads: list[str] = []
        self._before = before

    def bind_thread(self) -> None:
        name = threading.current_thread().name
        self._before(name)
        self.threads.append(name)


def test_every_thread_binds_the_device_first(pool: MemoryPool) -> None:
    """Goal: an accelerator's current device is thread-local. Method: which threads bound it, and which called the store."""
    device = NotingDevice()
    with engine(pool, seed=5, device=device) as made:
        made.workers[0].submit(PoolStep(shards=made.shards, loads=(load(),), saves=(save(family="b"),)))
        ended(made.workers[0], 2)
        callers = {thread for name, thread in made.stores[0].threads if name in ("get", "put")}
    kinds = ("pool-get-0", "pool-get-1", "pool-plan-0", "pool-put-0", "pool-worker")
    assert [f"mooncake-ascend-{kind}" for kind in kinds] == sorted(device.threads)
    assert callers <= set(device.threads)


# --- outages -----------------------------------------------------------------------------------------------------------------


def test_a_dead_store_is_called_once_and_comes_back(pool: MemoryPool) -> None:
    """Goal: the breaker of a worker, and recovery. Method: kill the master, load three times, start it, save and load again."""
    with engine(pool, seed=5) as made:
        worker = made.workers[0]
        pool.kill_master()
        lost = []
        for number in (1, 2, 3):
            worker.submit(PoolStep(loads=(load(number),)))
            lost += ended(worker, 1)
        num_gets = sum(name == "get" for name, _ in made.stores[0].threads)
        pool.start_master()
        closed = {"": 0.0}
        while not closed.get("", 0.0):
            made.workers[0].wait(0.02)
            closed = worker.take_stats().get("counters", {}).get(counters.BREAKER_CLOSED, {})
        worker.submit(PoolStep(shards=made.shards, saves=(save(),)))
        again = ended(worker, 1)
        worker.submit(PoolStep(loads=(load(4),)))
        again += ended(worker, 1)
    assert [counters.STORE_LOST] * 3 == [one.reason for one in lost]
    assert ([Outcome.FAILED, Outcome.REFUSED, Outcome.REFUSED], 1) == ([one.outcome for one in lost], num_gets)
    assert [Outcome.DONE] * 2 == [one.outcome for one in again]


# --- failure and the end -----------------------------------------------------------------------------------------------------


def failing_thread(kind: str, failure: threading.Event) -> NotingDevice:
    """A device that lets one thread wait for `failure`, and then fails it."""

    def before(name: str) -> None:
        if kind in name:
            assert failure.wait(WAIT_S)
            raise DeviceError("the device is gone")

    return NotingDevice(before)


def test_when_a_thread_fails_all_orders_end_behind_the_close_of_the_store(
    pool: MemoryPool, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: nothing is reused while it can be written, no order is left open, and later ones are refused. Method: the put
    thread fails with a get under way, a save waiting for it; ask for ends before and after the get ends."""
    failure = threading.Event()
    with engine(pool, seed=5, is_strict=False, device=failing_thread("put", failure)) as made:
        get = made.stores[0].hold("get")
        made.workers[0].submit(PoolStep(shards=made.shards, loads=(load(),), saves=(save(family="b"),)))
        assert get.entered.wait(WAIT_S)
        failure.set()
        is_told_early = made.workers[0].wait(0.05)
        get.open()
        found = ended(made.workers[0], 2)
        made.workers[0].submit(PoolStep(loads=(load(2),), saves=(save(2),)))
        late = ended(made.workers[0], 2)
        health = made.stores[0].health()
    assert (False, StoreHealth.CLOSED) == (is_told_early, health)
    assert [Outcome.FAILED] * 2 == [one.outcome for one in found]
    assert [Outcome.REFUSED] * 2 == [one.outcome for one in late]
    assert any("has failed" in record.message for record in caplog.records)


def test_orders_of_a_store_that_cannot_be_closed_stay_open(pool: MemoryPool, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a call that never ends keeps its blocks. Method: a get that outlasts the close; look; then it ends, and all is
    answered at shutdown."""
    failure = threading.Event()
    with engine(pool, is_strict=False, device=failing_thread("put", failure), close_wait_s=0.01) as made:
        get = made.stores[0].hold("get")
        made.workers[0].submit(PoolStep(loads=(load(),)))
        assert get.entered.wait(WAIT_S)
        failure.set()
        deadline_s = boot_s() + WAIT_S
        while not any("do not end" in record.message for record in caplog.records):
            assert boot_s() < deadline_s
            made.workers[0].wait(0.01)
        before = made.workers[0].take_results()
        get.open()
        made.workers[0].close()
        (found,) = ended(made.workers[0], 1)
    assert (None, Outcome.FAILED) == (before, found.outcome)


def test_in_strict_mode_a_failure_is_raised(pool: MemoryPool) -> None:
    """Goal: tests see it. Method: a thread fails; the next call of the model-runner thread raises."""
    failure = threading.Event()
    failure.set()
    made = Engine(lambda num_bytes: pool.client(segment_bytes=num_bytes), device=failing_thread("put", failure))
    try:
        with pytest.raises(LocalProtocolError):
            ended(made.workers[0], 1)
    finally:
        made.close()


def test_closing_answers_every_order_and_leaves_no_thread(pool: MemoryPool) -> None:
    """Goal: a shutdown leaves no order open. Method: close with a get and a put held, orders queued behind each, one late."""
    with engine(pool, seed=5) as made:
        worker = made.workers[0]
        get, put = made.stores[0].hold("get"), made.stores[0].hold("put")
        worker.submit(
            PoolStep(
                shards=made.shards,
                loads=tuple(load(number, range(10 * number, 10 * number + 6)) for number in (1, 2, 3)),
                saves=(save(1, family="b"), save(2, family="c")),
            )
        )
        assert get.entered.wait(WAIT_S)
        assert put.entered.wait(WAIT_S)
        closing = threading.Thread(target=worker.close)
        closing.start()
        is_told_early = worker.wait(0.05)
        get.open()
        put.open()
        closing.join()
        worker.submit(PoolStep(loads=(load(4),)))
        found = ended(worker, 6)
        worker.close()
        nothing_more = worker.take_results()
    assert (False, None) == (is_told_early, nothing_more)
    assert {Outcome.FAILED: 5, Outcome.REFUSED: 1} == {
        outcome: [one.outcome for one in found].count(outcome) for outcome in (Outcome.FAILED, Outcome.REFUSED)
    }


# --- the real store ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("mooncake_environment")
def test_two_engines_share_a_real_pool_that_comes_late_and_comes_back() -> None:
    """Goal: all of it on Mooncake. Method: engines start without a master; it starts; save and load; it is killed and comes
    back empty; save and load again."""
    master = PoolMaster()
    master.kill()

    def make_store(num_bytes: int) -> KVStore:
        segment_bytes = MIN_SEGMENT_BYTES if num_bytes else 0
        settings = StoreSettings(host="127.0.0.1", protocol="tcp", master_address=master.address, segment_bytes=segment_bytes)
        return MooncakeStore(settings)

    num_threads = threading.active_count()
    writer = Engine(make_store, seed=1, device=CpuDevice())
    reader = Engine(make_store, device=CpuDevice())
    try:
        is_right = []
        for attempt, family in enumerate("ab"):
            if attempt:
                master.kill()
                assert reader.load("lost", hashes(6), LOADED) is None
                writer.computed(writer.arrive("lost", hashes(2, "z"), may_load=False), (40, 41))
                writer.step_until(lambda: not writer.workers[0].is_usable)
            master.start()
            for made in (writer, reader):
                made.step_until_usable()
            writer.save(f"w{attempt}", hashes(6, family), STORED)
            reader.memories[0][:] = 0
            report = reader.load(f"r{attempt}", hashes(6, family), LOADED)
            if report is None or not report.ok:  # an idle client finds out with its first call that the master was away
                reader.step_until_usable()
                report = reader.load(f"again{attempt}", hashes(6, family), LOADED)
            same = np.array_equal([writer.block(one) for one in STORED], [reader.block(one) for one in LOADED])
            is_right.append((report is not None and report.ok, same))
    finally:
        writer.close()
        reader.close()
        master.end()
    assert ([(True, True)] * 2, num_threads) == (is_right, threading.active_count())
