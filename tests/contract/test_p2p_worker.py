"""runtime.p2p_worker: every order is answered exactly once, whatever happens to it. Real memory, the in-memory engine."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest

from vllm_mooncake_ascend.devices.cpu import CpuDevice
from vllm_mooncake_ascend.engines.base import ReadResult
from vllm_mooncake_ascend.errors import DeviceError
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.reader import Reader
from vllm_mooncake_ascend.p2p.settings import ReaderSettings
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.p2p_worker import BindsThread, P2PWorker
from vllm_mooncake_ascend.runtime.read_plans import ReadPlans
from vllm_mooncake_ascend.runtime.read_runner import ReadRunner
from vllm_mooncake_ascend.testing.memory import Bytes, address_of, pattern, region_of
from vllm_mooncake_ascend.testing.memory_engine import Fails, LandsLate, MemoryNetwork, MemoryTransferEngine, WaitsFor
from vllm_mooncake_ascend.types import Incarnation, Outcome, RequestId, Session, TransferId
from vllm_mooncake_ascend.wire.steps import PeerRanks, ReadEnded, ReadOrder, WorkerStep

WAIT_S = 30.0
P1 = Incarnation("p1")
NUM_BLOCKS = 4_096
BLOCK_BYTES = 64
CALL_BLOCKS = 1_024
"""Blocks of one engine call when no two of them are neighbours."""


def layout_of(memory: Bytes, session: str) -> RankLayout:
    """One plane of blocks of one token each, over the whole of `memory`."""
    plane = Plane(
        name="layers.0/kv",
        group_index=0,
        base_address=address_of(memory),
        num_blocks=NUM_BLOCKS,
        tokens_per_block=1,
        first_head=0,
        num_heads=1,
        total_heads=1,
        bytes_per_token_head=BLOCK_BYTES,
        block_stride_bytes=BLOCK_BYTES,
        token_stride_bytes=BLOCK_BYTES,
        head_stride_bytes=BLOCK_BYTES,
    )
    group = GroupLayout(tokens_per_block=1, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
    return RankLayout(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        session=session,
        groups=(group,),
        planes=(plane,),
        regions=(region_of(memory),),
    )


class World:
    """One producer's memory and one worker that reads it."""

    def __init__(self, *, has_fence: bool = True, device: BindsThread | None = None, read_wait_s: float = WAIT_S) -> None:
        self.network = MemoryNetwork()
        self.remote = pattern(1, NUM_BLOCKS * BLOCK_BYTES)
        self.local: Bytes = np.zeros_like(self.remote)
        producer = self.network.engine()
        producer.register([region_of(self.remote)])
        self.session = producer.session
        self.peer = PeerRanks(incarnation=P1, ranks=(layout_of(self.remote, producer.session),))
        self.engine = self.network.engine(has_fence=has_fence)
        self.engine.register([region_of(self.local)])
        self.worker = P2PWorker(
            engine=self.engine,
            device=device or CpuDevice(),
            layout=msgspec.structs.replace(layout_of(self.local, self.engine.session), pp_rank=3, pp_size=4),
            read_wait_s=read_wait_s,
        )

    def submit(self, *orders: ReadOrder, cancels: Sequence[str] = ()) -> None:
        """A step with these orders, the producer's layout with it."""
        requests = tuple(RequestId(request_id) for request_id in cancels)
        self.worker.submit(WorkerStep(peers=(self.peer,), reads=orders, cancels=requests))

    def ended(self, num_reads: int) -> list[ReadEnded]:
        """The next answers, this many."""
        found: list[ReadEnded] = []
        deadline_s = boot_s() + WAIT_S
        while len(found) < num_reads:
            assert boot_s() < deadline_s, f"{len(found)} of {num_reads} answers came"
            self.worker.wait(1.0)
            found += self.worker.take_ended()
        return found


@contextlib.contextmanager
def world(*, has_fence: bool = True, device: BindsThread | None = None, read_wait_s: float = WAIT_S) -> Iterator[World]:
    """A world whose worker is closed at the end, and has nothing more to say then."""
    made = World(has_fence=has_fence, device=device, read_wait_s=read_wait_s)
    try:
        yield made
    finally:
        made.worker.close()
    assert made.worker.take_ended() == ()


def order(request_id: str = "r1", *, num_blocks: int = 4, first_block: int = 2) -> ReadOrder:
    """Read `num_blocks` tokens into every second block from `first_block` on, from the same blocks of the producer."""
    block_ids = (tuple(range(first_block, first_block + 2 * num_blocks, 2)),)
    return ReadOrder(
        transfer_id=TransferId("t1"),
        request_id=RequestId(request_id),
        incarnation=P1,
        first_token=0,
        end_token=num_blocks,
        remote_block_ids=block_ids,
        local_block_ids=block_ids,
    )


def outcomes(found: list[ReadEnded]) -> dict[str, Outcome]:
    """How each request's read ended."""
    return {ended.request_id: ended.outcome for ended in found}


def test_a_read_brings_the_bytes_and_its_figures() -> None:
    """Goal: the right bytes, and an answer that says what they cost. Method: four blocks apart; compare memory."""
    with world() as made:
        made.submit(order(first_block=2))
        (ended,) = made.ended(1)
    expected = np.zeros_like(made.local)
    for block in (2, 4, 6, 8):
        expected[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = made.remote[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
    assert (Outcome.DONE, 3, 4 * BLOCK_BYTES, 4, "") == (
        ended.outcome,
        ended.rank,
        ended.num_bytes,
        ended.num_descriptors,
        ended.reason,
    )
    assert np.array_equal(expected, made.local)


def test_many_orders_of_many_steps_get_one_answer_each() -> None:
    """Goal: exactly once under load. Method: 300 orders in 100 steps, some failing, one repeated; count the answers."""
    with world() as made:
        made.network.inject(made.session, *[Fails(outcome=Outcome.FAILED)] * 20)
        names = [f"r{number}" for number in range(300)]
        for number in range(100):
            made.submit(*[order(name) for name in names[3 * number : 3 * number + 3]])
        found = made.ended(300)
        made.submit(order("r0"))  # ended long ago: says nothing
        made.submit(order("last"))
        found += made.ended(1)
    assert sorted([*names, "last"]) == sorted(ended.request_id for ended in found)


@pytest.mark.parametrize(
    ("fault", "has_fence", "outcome"),
    [
        (Fails(outcome=Outcome.FAILED, num_landed=1), True, Outcome.FAILED),
        (Fails(outcome=Outcome.REFUSED), True, Outcome.REFUSED),
        (Fails(outcome=Outcome.UNKNOWN), True, Outcome.FAILED),
        (LandsLate(after_s=5.0), True, Outcome.FAILED),
        (LandsLate(after_s=5.0), False, Outcome.UNKNOWN),
    ],
)
def test_a_failed_read_says_what_may_still_happen(fault: Fails | LandsLate, has_fence: bool, outcome: Outcome) -> None:
    """Goal: UNKNOWN becomes FAILED exactly if the fence holds. Method: one fault each; then let time pass."""
    with world(has_fence=has_fence) as made:
        made.network.inject(made.session, fault)
        made.submit(order())
        (ended,) = made.ended(1)
        before = made.local.copy()
        made.network.advance(10.0)
        stays = np.array_equal(before, made.local)
    assert (outcome, outcome is not Outcome.UNKNOWN) == (ended.outcome, stays)


def test_an_order_that_cannot_be_planned_is_refused() -> None:
    """Goal: a wrong order harms nobody. Method: an unknown producer, block ids out of range, tables too short."""
    beyond = order("beyond", first_block=NUM_BLOCKS)
    short = ReadOrder(
        transfer_id=TransferId("t1"),
        request_id=RequestId("short"),
        incarnation=P1,
        first_token=0,
        end_token=9,
        remote_block_ids=((1,),),
        local_block_ids=((1,),),
    )
    with world() as made:
        made.worker.submit(WorkerStep(reads=(order("stranger"),)))
        made.submit(beyond, short)
        found = made.ended(3)
    assert dict.fromkeys(("stranger", "beyond", "short"), Outcome.REFUSED) == outcomes(found)


def test_a_forgotten_producer_is_not_read_from() -> None:
    """Goal: a replaced producer's layout is gone. Method: a read, forget, the same read again."""
    with world() as made:
        made.submit(order("before"))
        made.worker.submit(WorkerStep(forget=(P1,)))
        made.worker.submit(WorkerStep(reads=(order("after"),)))
        found = made.ended(2)
    assert {"before": Outcome.DONE, "after": Outcome.REFUSED} == outcomes(found)


def gate() -> WaitsFor:
    """A fault that holds a call until its gate is set."""
    return WaitsFor(gate=threading.Event(), entered=threading.Event())


def test_steps_are_taken_while_a_call_is_under_way() -> None:
    """Goal: the model-runner thread never waits for the wire. Method: submit and cancel while a call is held."""
    held = gate()
    with world() as made:
        made.network.inject(made.session, held)
        made.submit(order("first"))
        assert held.entered.wait(WAIT_S)
        made.submit(order("second"), order("third"), cancels=["third"])
        held.gate.set()
        found = made.ended(3)
    assert {"first": Outcome.DONE, "second": Outcome.DONE, "third": Outcome.REFUSED} == outcomes(found)


def test_a_cancelled_read_ends_after_its_call_under_way() -> None:
    """Goal: no answer while bytes may land. Method: cancel a read of several calls during its first."""
    held = gate()
    with world() as made:
        made.network.inject(made.session, held)
        made.submit(order(num_blocks=CALL_BLOCKS + 500))
        assert held.entered.wait(WAIT_S)
        made.submit(cancels=["r1"])
        told_early = made.worker.wait(0.05)
        held.gate.set()
        (ended,) = made.ended(1)
    assert (False, Outcome.FAILED, CALL_BLOCKS) == (told_early, ended.outcome, ended.num_descriptors)


def test_reads_take_turns_call_by_call() -> None:
    """Goal: a small read does not wait behind a big one. Method: both at once; the small one ends first."""
    with world() as made:
        made.submit(order("big", num_blocks=CALL_BLOCKS + 500), order("small"))
        found = made.ended(2)
    assert ["small", "big"] == [ended.request_id for ended in found]


def test_a_read_beyond_its_time_starts_no_further_call() -> None:
    """Goal: read_wait_s holds. Method: a time shorter than the first call takes; then the rest is left."""
    held = gate()
    with world(read_wait_s=0.01) as made:
        made.network.inject(made.session, held)
        made.submit(order(num_blocks=CALL_BLOCKS + 500))
        assert held.entered.wait(WAIT_S)
        made.worker.wait(0.02)
        held.gate.set()
        (ended,) = made.ended(1)
    assert (Outcome.FAILED, CALL_BLOCKS, True) == (ended.outcome, ended.num_descriptors, "read_wait_s" in ended.reason)


def test_closing_answers_every_order() -> None:
    """Goal: a shutdown leaves no order open. Method: close with a call held, one read queued, one step not yet taken."""
    held = gate()
    made = World()
    made.network.inject(made.session, held)
    made.submit(order("calling"))
    assert held.entered.wait(WAIT_S)
    made.submit(order("queued"))
    closing = threading.Thread(target=made.worker.close)
    closing.start()
    held.gate.set()
    closing.join()
    made.submit(order("late"))
    found = made.ended(3)
    made.worker.close()
    assert outcomes(found) == {"calling": Outcome.DONE, "queued": Outcome.REFUSED, "late": Outcome.REFUSED}


def test_closing_leaves_no_thread_and_closes_the_engine() -> None:
    """Goal: nothing survives a worker. Method: count threads; ask the engine afterwards."""
    before = threading.active_count()
    with world() as made:
        during = threading.active_count()
    result = made.engine.read(Session(made.session), _batch(made))
    assert (before, before + 1, Outcome.REFUSED) == (threading.active_count(), during, result.outcome)


def _batch(made: World) -> CopyBatch:
    """One block."""
    return CopyBatch(
        local_addresses=np.array([address_of(made.local)], dtype=np.int64),
        remote_addresses=np.array([address_of(made.remote)], dtype=np.int64),
        lengths_bytes=np.array([BLOCK_BYTES], dtype=np.int64),
    )


class RecordingDevice:
    """Writes down which thread bound it; refuses on demand."""

    def __init__(self, error: DeviceError | None = None) -> None:
        self.threads: list[str] = []
        self._error = error

    def bind_thread(self) -> None:
        self.threads.append(threading.current_thread().name)
        if self._error is not None:
            raise self._error


def test_the_transfer_thread_binds_the_device_first() -> None:
    """Goal: an accelerator's current device is thread-local. Method: a device that notes who bound it."""
    device = RecordingDevice()
    with world(device=device) as made:
        made.submit(order())
        made.ended(1)
    assert ["mooncake-ascend-transfer"] == device.threads


def test_a_device_that_cannot_be_bound_refuses_all_orders(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: decode computes locally and the log says why. Method: a device that refuses."""
    with world(device=RecordingDevice(DeviceError("no such device"))) as made:
        made.submit(order())
        (ended,) = made.ended(1)
    told = any("transfer thread has failed" in record.message for record in caplog.records)
    assert (Outcome.REFUSED, True, True) == (ended.outcome, "no such device" in ended.reason, told)


class RaisingEngine:
    """An engine with a bug: `read` and `fence` raise."""

    def __init__(self, engine: MemoryTransferEngine) -> None:
        self._engine = engine
        self.session = engine.session

    def register(self, regions: Sequence[Region]) -> None:
        self._engine.register(regions)

    def read(self, session: Session, batch: CopyBatch) -> ReadResult:
        raise ZeroDivisionError("a bug")

    def fence(self) -> bool:
        raise ZeroDivisionError("another bug")

    def close(self) -> None:
        self._engine.close()


def test_an_engine_that_raises_leaves_its_read_unknown() -> None:
    """Goal: what nobody knows is never called failed. Method: an engine whose every call raises; two orders."""
    network = MemoryNetwork()
    memory = pattern(1, NUM_BLOCKS * BLOCK_BYTES)
    engine = RaisingEngine(network.engine())
    layout = layout_of(memory, engine.session)
    worker = P2PWorker(engine=engine, device=CpuDevice(), layout=layout, read_wait_s=WAIT_S)
    step = WorkerStep(peers=(PeerRanks(incarnation=P1, ranks=(layout,)),), reads=(order("r1"), order("r2")))
    worker.submit(step)
    found: list[ReadEnded] = []
    while len(found) < 2 and worker.wait(WAIT_S):
        found += worker.take_ended()
    worker.close()
    assert {"r1": Outcome.UNKNOWN, "r2": Outcome.UNKNOWN} == outcomes(found)


class HeardOf:
    """An audience that writes down what it is told. Follows `runtime.read_runner.Audience`."""

    def __init__(self) -> None:
        self.ended: list[ReadEnded] = []
        self.counted: list[tuple[str, str]] = []

    def read_ended(self, ended: ReadEnded) -> None:
        self.ended.append(ended)

    def count(self, name: str, label: str = "", amount: float = 1.0) -> None:
        self.counted.append((name, label))

    def observe(self, name: str, value: float) -> None:
        pass


class BreakingReader(Reader):
    """A reader with a bug: it raises at the end of a call."""

    def handle(self, event: events.ReaderEvent, now: float) -> list[actions.ReaderAction]:
        if isinstance(event, events.CallEnded):
            raise ZeroDivisionError("a bug")
        return super().handle(event, now)


@pytest.mark.parametrize(
    ("fault", "outcome"), [(None, Outcome.FAILED), (LandsLate(after_s=5.0), Outcome.UNKNOWN)], ids=["done", "unknown"]
)
def test_a_broken_machine_ends_its_reads_and_is_replaced(fault: LandsLate | None, outcome: Outcome) -> None:
    """Goal: a bug costs the reads under way, and none hangs. Method: a machine that raises when the first call ends."""
    with world(has_fence=False) as made:
        made.network.inject(made.session, *([fault] if fault else []))
        heard, machines = HeardOf(), iter((BreakingReader, Reader))
        runner = ReadRunner(
            made.engine,
            ReadPlans(layout_of(made.local, made.engine.session)),
            heard,
            rank=0,
            make_reader=lambda: next(machines)(0, ReaderSettings()),
            is_strict=False,
        )
        runner.take([WorkerStep(peers=(made.peer,), reads=(order("r1"), order("r2", first_block=100)))])
        for ended in iter(runner.run_call, None):
            runner.call_ended(ended)
        runner.take([WorkerStep(reads=(order("r3", first_block=200),))])
        for ended in iter(runner.run_call, None):
            runner.call_ended(ended)
    assert {"r1": outcome, "r2": Outcome.FAILED, "r3": Outcome.DONE} == outcomes(heard.ended)
    assert ("broken_invariants_total", "reader") in heard.counted


def test_an_idle_worker_burns_no_core() -> None:
    """Goal: no busy wait of ours. Method: CPU time of this process during half a second without work."""
    with world() as made:
        start_s = time.process_time()
        made.worker.wait(0.5)
        used_s = time.process_time() - start_s
    assert used_s < 0.05


def test_statistics_count_calls_fences_and_seconds() -> None:
    """Goal: what a worker did can be counted. Method: one read done, one fenced; take twice."""
    with world() as made:
        made.submit(order("good"))
        made.ended(1)
        made.network.inject(made.session, LandsLate(after_s=5.0))
        made.submit(order("bad"))
        made.ended(1)
        stats = [made.worker.take_stats(), made.worker.take_stats()]
    assert ({"done": 1.0, "failed": 1.0}, {"fenced": 1.0}, 1, {}) == (
        stats[0]["counters"]["engine_calls_total"],
        stats[0]["counters"]["engine_fences_total"],
        len(stats[0]["histograms"]["kv_read_duration_seconds"]),
        stats[1],
    )
