"""Engines that share a pool: the two shells of each on real memory, driven as a connector drives them."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from vllm_mooncake_ascend.devices.cpu import CpuDevice
from vllm_mooncake_ascend.engines.base import KVStore, StoreHealth
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout
from vllm_mooncake_ascend.planner.pool_keys import shards
from vllm_mooncake_ascend.pool import actions, events
from vllm_mooncake_ascend.pool.settings import PoolSettings, WorkerSettings
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.pool_scheduler import PoolSchedulerShell
from vllm_mooncake_ascend.runtime.pool_worker import BindsThread, PoolWorkerShell
from vllm_mooncake_ascend.testing.held_store import HeldStore
from vllm_mooncake_ascend.testing.memory import Bytes, address_of, pattern, region_of
from vllm_mooncake_ascend.testing.memory_store import MemoryPool
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.pool_steps import PoolStep
from vllm_mooncake_ascend.wire.steps import Report

WAIT_S = 30.0
NAMESPACE = "0" * 32
BLOCK_TOKENS = 4
ROW_BYTES = 16
BLOCK_BYTES = BLOCK_TOKENS * ROW_BYTES
NUM_BLOCKS = 64
GROUP = GroupLayout(tokens_per_block=BLOCK_TOKENS, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)


def hashes(num_blocks: int, family: str = "a") -> list[bytes]:
    """Names of the blocks of one prompt."""
    return [f"{family}{index:07d}".encode() for index in range(num_blocks)]


def layout_of(memory: Bytes, *, tp_rank: int = 0, tp_size: int = 1, total_heads: int = 1) -> RankLayout:
    """K and V of one layer, each `[blocks, tokens, row]`, in the two halves of `memory`; one head a rank."""
    planes = tuple(
        Plane(
            name=f"layers.0/{part}",
            group_index=0,
            base_address=address_of(memory) + index * NUM_BLOCKS * BLOCK_BYTES,
            num_blocks=NUM_BLOCKS,
            tokens_per_block=BLOCK_TOKENS,
            first_head=tp_rank if total_heads > 1 else 0,
            num_heads=1,
            total_heads=total_heads,
            bytes_per_token_head=ROW_BYTES,
            block_stride_bytes=BLOCK_BYTES,
            token_stride_bytes=ROW_BYTES,
            head_stride_bytes=ROW_BYTES,
        )
        for index, part in enumerate("kv")
    )
    return RankLayout(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        session="",
        groups=(GROUP,),
        planes=planes,
        regions=(region_of(memory),),
    )


class Engine:
    """One engine with `tp_size` workers. `seed` fills its memory; 0 leaves it empty.

    Args:
        make_store: a client that lends so many bytes; one for the scheduler, then one for each worker.
        total_heads: fewer than `tp_size`: all ranks hold the same bytes.
        close_wait_s: how long a worker's store waits for calls under way when it is closed.
        settings: other than usual ones of the scheduler's or the workers' machines.
    """

    def __init__(
        self,
        make_store: Callable[[int], KVStore],
        *,
        seed: int = 0,
        tp_size: int = 1,
        total_heads: int = 1,
        is_strict: bool = True,
        device: BindsThread | None = None,
        close_wait_s: float = WAIT_S,
        **settings: Any,
    ) -> None:
        num_bytes = 2 * NUM_BLOCKS * BLOCK_BYTES
        self.memories = [
            pattern(seed + rank, num_bytes) if seed else np.zeros(num_bytes, dtype=np.uint8) for rank in range(tp_size)
        ]
        layouts = [
            layout_of(memory, tp_rank=rank, tp_size=tp_size, total_heads=total_heads)
            for rank, memory in enumerate(self.memories)
        ]
        self.shards = shards(layouts)
        self.news = threading.Event()
        self.pins: collections.Counter[int] = collections.Counter()
        self.reports: list[Report] = []
        chosen: dict[str, Any] = {
            "namespace": NAMESPACE,
            "groups": (GROUP,),
            "hash_tokens": BLOCK_TOKENS,
            "num_ranks": tp_size,
            "can_report_unknown_at_once": True,
            "max_saved_blocks": NUM_BLOCKS,
            "lookup_wait_s": WAIT_S,
        }
        self.scheduler_store = HeldStore(make_store(0))
        self.scheduler = PoolSchedulerShell(
            settings=PoolSettings(**chosen | settings),
            shards=self.shards,
            store=self.scheduler_store,
            is_strict=is_strict,
            wake=self.news.set,
        )
        self.scheduler.start()
        self.stores = [HeldStore(make_store(1 << 20), close_wait_s=close_wait_s) for _ in layouts]
        self.workers = [
            PoolWorkerShell(
                settings=WorkerSettings(), store=store, device=device or CpuDevice(), layout=layout, is_strict=is_strict
            )
            for store, layout in zip(self.stores, layouts, strict=True)
        ]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    # --- what vLLM would do -------------------------------------------------------------------------------------------

    def arrive(self, name: str, names: Sequence[bytes], *, num_local_tokens: int = 0, may_load: bool = True) -> RequestId:
        """A request whose prompt has these blocks."""
        event = events.RequestArrived(
            request_id=RequestId(name),
            hashes=names,
            num_prompt_tokens=len(names) * BLOCK_TOKENS,
            num_local_tokens=num_local_tokens,
            may_load=may_load,
            may_save=True,
        )
        self.scheduler.feed(event)
        return event.request_id

    def hit_tokens(self, request_id: RequestId, num_local_tokens: int = 0) -> int:
        """Ask until it is known, as vLLM does, and as rarely as there is news."""
        deadline_s = boot_s() + WAIT_S
        while (found := self.scheduler.hit_tokens(request_id, num_local_tokens)) is None:
            assert boot_s() < deadline_s, "a lookup has no end"
            self.news.wait(0.005)
            self.news.clear()
        return found

    def allocate(self, request_id: RequestId, block_ids: Sequence[int], *, num_tokens: int, num_local_tokens: int = 0) -> None:
        """Blocks for a prompt of which `num_tokens` are to be loaded behind the local ones; the order goes to the workers."""
        first = num_local_tokens // BLOCK_TOKENS
        end = (num_local_tokens + num_tokens) // BLOCK_TOKENS
        event = events.BlocksAllocated(
            request_id=request_id,
            num_local_tokens=num_local_tokens,
            num_remote_tokens=num_tokens,
            block_ids=(tuple(block_ids),),
            loaded_block_ids=tuple(block_ids[first:end]),
        )
        self.scheduler.feed(event)
        self.step()

    def computed(self, request_id: RequestId, block_ids: Sequence[int]) -> None:
        """The whole prompt's KV is written, in these blocks; the order to save goes to the workers."""
        chain = self.scheduler.chain(request_id)
        assert chain is not None
        num_tokens = len(block_ids) * BLOCK_TOKENS
        event = events.ChunkComputed(request_id=request_id, chain=chain, num_tokens=num_tokens, block_ids=(tuple(block_ids),))
        self.scheduler.feed(event)
        self.step()

    def end(self, request_id: RequestId) -> None:
        self.scheduler.feed(events.RequestEnded(request_id=request_id))
        self.step()

    def step(self) -> None:
        """Take results, do what is the scheduler thread's to do, and hand the rest to the workers."""
        self.take_results()
        orders: dict[str, list[Any]] = {"cancels": [], "loads": [], "saves": []}
        for action in self.scheduler.drain():
            match action:
                case actions.PinBlocks():
                    self.pins.update(action.block_ids)
                case actions.UnpinBlocks():
                    self.pins.subtract(action.block_ids)
                case actions.CancelLoad():
                    orders["cancels"].append(action.load_id)
                case actions.OrderLoad():
                    orders["loads"].append(action.order)
                case actions.OrderSave():
                    orders["saves"].append(action.order)
                case actions.ReportReceive():
                    self.reports.append(action.report)
        step = PoolStep(shards=self.shards, **{kind: tuple(found) for kind, found in orders.items()})
        for worker in self.workers:
            worker.submit(step)

    def take_results(self) -> None:
        """What the workers' orders have come to."""
        for worker in self.workers:
            results = worker.take_results()
            for load in results.loads if results is not None else ():
                self.scheduler.feed(events.RankLoadEnded(ended=load))
            for save in results.saves if results is not None else ():
                self.scheduler.feed(events.RankSaveEnded(ended=save))

    def step_until(self, question: Callable[[], bool]) -> None:
        deadline_s = boot_s() + WAIT_S
        while not question():
            assert boot_s() < deadline_s, "it does not come true"
            self.workers[0].wait(0.005)
            self.step()

    def step_until_usable(self) -> None:
        """Until scheduler and workers have made their way back to the pool."""
        stores = (self.scheduler_store, *self.stores)
        self.step_until(lambda: all(store.health() is StoreHealth.CONNECTED for store in stores))
        self.step_until(lambda: all(shell.is_usable for shell in (self.scheduler, *self.workers)))

    @property
    def num_pinned(self) -> int:
        """Blocks with a reference of ours."""
        return sum(1 for count in self.pins.values() if count)

    # --- whole stories ------------------------------------------------------------------------------------------------

    def save(self, name: str, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """A request computes its prompt into these blocks, and ends when all is saved, or given up."""
        request_id = self.arrive(name, names, may_load=False)
        self.computed(request_id, block_ids)
        self.step_until(lambda: not any(self.pins[block_id] for block_id in block_ids))
        self.end(request_id)

    def load(self, name: str, names: Sequence[bytes], block_ids: Sequence[int]) -> Report | None:
        """A request loads what it can into these blocks, and ends. None: the pool has nothing for it."""
        request_id = self.arrive(name, names)
        num_tokens = self.hit_tokens(request_id)
        if num_tokens:
            self.allocate(request_id, block_ids, num_tokens=num_tokens)
            self.step_until(lambda: any(report.request_id == request_id for report in self.reports))
        self.end(request_id)
        return next((report for report in self.reports if report.request_id == request_id), None)

    def block(self, block_id: int, rank: int = 0) -> Bytes:
        """`[2, block bytes]`: K and V of one block."""
        return self.memories[rank].reshape(2, NUM_BLOCKS, BLOCK_BYTES)[:, block_id].copy()


@contextlib.contextmanager
def engine(pool: MemoryPool, **options: Any) -> Iterator[Engine]:
    """An engine with stores in memory; closed at the end, with all its threads."""
    num_threads = threading.active_count()
    made = Engine(lambda num_bytes: pool.client(segment_bytes=num_bytes), **options)
    try:
        yield made
    finally:
        made.close()
    assert num_threads == threading.active_count()
