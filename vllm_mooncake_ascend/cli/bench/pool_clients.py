"""Clients of the pool in this process: our workers, as an engine has them, and Mooncake's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from vllm_mooncake_ascend.cli.bench.pool_memory import NAMESPACE, PoolMemory, make_store
from vllm_mooncake_ascend.cli.bench.raw_store import RawBuffers, RawStore, raw_buffers
from vllm_mooncake_ascend.devices.cpu import CpuDevice
from vllm_mooncake_ascend.engines.base import StoreKey
from vllm_mooncake_ascend.pool.settings import WorkerSettings
from vllm_mooncake_ascend.runtime.pool_worker import PoolWorkerShell
from vllm_mooncake_ascend.types import Outcome
from vllm_mooncake_ascend.wire.pool_steps import LoadEnded, PoolStep, SaveEnded

END_S = 60.0


class CallFailed(RuntimeError):
    """Bytes were not put or did not come: there is nothing to measure."""


class OurClient:
    """A worker's shell with its threads."""

    def __init__(
        self, master_address: str, memory: PoolMemory, *, segment_bytes: int, is_sealed: bool = True, reads_apart: bool = True
    ) -> None:
        self._memory = memory
        self.store = make_store(master_address, segment_bytes=segment_bytes, is_sealed=is_sealed, reads_apart=reads_apart)
        self._worker = PoolWorkerShell(
            settings=WorkerSettings(), store=self.store, device=CpuDevice(), layout=memory.layout, is_strict=True
        )
        self._num_orders = 0

    def put(self, family: str, num_blocks: int) -> None:
        """Returns when the save is told to have ended."""
        self._num_orders += 1
        order = self._memory.save(self._num_orders, family, num_blocks)
        self._run(PoolStep(shards=self._memory.shards, saves=(order,)))

    def get(self, family: str, num_blocks: int) -> None:
        """Returns when the load is told to have ended."""
        self._num_orders += 1
        self._run(PoolStep(loads=(self._memory.load(self._num_orders, family, num_blocks),)))

    def remove(self, keys: Sequence[StoreKey]) -> None:
        """Make room again; what cannot go yet is left to the master."""
        self.store.remove(list(keys), prefix=NAMESPACE)

    def close(self) -> None:
        self._worker.close()

    def _run(self, step: PoolStep) -> None:
        self._worker.submit(step)
        if not self._worker.wait(END_S):
            raise CallFailed(f"no end within {END_S:.0f} s")
        results = self._worker.take_results()
        assert results is not None
        all_ended: tuple[LoadEnded | SaveEnded, ...] = (*results.loads, *results.saves)
        for ended in all_ended:
            if ended.outcome is not Outcome.DONE:
                raise CallFailed(f"{type(ended).__name__}: {ended.outcome.value} {ended.reason}")


class RawClient:
    """Calls that were prepared: names, addresses and lengths cost nothing while it is measured."""

    def __init__(self, master_address: str, memory: PoolMemory, *, segment_bytes: int) -> None:
        self._memory = memory
        self._store = RawStore(master_address, memory.layout.regions[0], segment_bytes=segment_bytes)

    def prepared_put(self, family: str, num_blocks: int) -> Callable[[], None]:
        calls = [(list(call.keys), raw_buffers(call.batch)) for call in self._memory.put_calls(family, num_blocks)]
        return lambda: self._each(self._store.put, calls)

    def prepared_get(self, family: str, num_blocks: int) -> Callable[[], None]:
        calls = [(list(call.keys), raw_buffers(call.batch)) for call in self._memory.get_calls(family, num_blocks)]
        return lambda: self._each(self._store.get, calls)

    def exists(self, keys: Sequence[StoreKey]) -> None:
        self._store.exists(keys)

    def put_small(self, keys: Sequence[StoreKey], buffers: RawBuffers) -> None:
        self._store.put(keys, buffers)

    def close(self) -> None:
        self._store.close()

    @staticmethod
    def _each(call: Callable[[list[str], RawBuffers], None], calls: Sequence[tuple[list[str], RawBuffers]]) -> None:
        for keys, buffers in calls:
            call(keys, buffers)


def seconds_of(call: Callable[[], None]) -> float:
    started_s = time.monotonic()
    call()
    return time.monotonic() - started_s
