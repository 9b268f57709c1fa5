"""The in-memory world of the store's contract: instant, deterministic."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore, StoreAnswer, StoreKey
from vllm_mooncake_ascend.engines.sealed_store import SealedStore
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.testing.memory import Bytes
from vllm_mooncake_ascend.testing.memory_store import MemoryPool, MemoryStore
from vllm_mooncake_ascend.testing.store_world import MIB, Owner, judged, memory_for, store_batch_of, values


class MemoryOwner:
    """Another client of the same `MemoryPool`."""

    def __init__(self, memory: MemoryStore, *, is_sealed: bool) -> None:
        self._memory = memory
        self._store: KVStore = SealedStore(memory) if is_sealed else memory
        memory.connect()

    def put(self, keys: Sequence[StoreKey], value_bytes: int) -> tuple[KeyOutcome, ...]:
        source = memory_for(self._store, len(keys), value_bytes)
        source[:] = values(keys, value_bytes)
        return self._store.put(keys, store_batch_of(source)).outcomes

    def get(self, keys: Sequence[StoreKey], value_bytes: int) -> tuple[KeyOutcome, ...]:
        target = memory_for(self._store, len(keys), value_bytes)
        return judged(self._store.get(keys, store_batch_of(target)), keys, target)

    def overwrite(self, key: StoreKey, by: StoreKey, *, num_bytes: int | None = None) -> None:
        self._memory.overwrite(key, by, num_bytes)

    def stop(self) -> None:
        self._memory.stop()

    def resume(self) -> None:
        self._memory.resume()

    def kill(self) -> None:
        self._memory.kill()

    def close(self) -> None:
        self._store.close()


class MemoryStoreWorld:
    """One pool, and time that passes when told."""

    def __init__(self, *, is_sealed: bool = False) -> None:
        self._is_sealed = is_sealed
        self.call_bound_s = 5.0
        self.late_watch_s = 1_000.0
        self.pool = MemoryPool()

    def store(self, *, segment_bytes: int = 0) -> KVStore:
        memory = self.pool.client(segment_bytes=segment_bytes)
        return SealedStore(memory) if self._is_sealed else memory

    def owner(self, *, segment_bytes: int = 64 * MIB) -> MemoryOwner:
        return MemoryOwner(self.pool.client(segment_bytes=segment_bytes), is_sealed=self._is_sealed)

    def shorten_object_leases(self) -> None:
        self.pool.object_lease_s = 0.0

    def kill_master(self) -> None:
        self.pool.kill_master()

    def stop_master(self) -> None:
        self.pool.stop_master()

    def resume_master(self) -> None:
        self.pool.start_master()

    def start_master(self) -> None:
        self.pool.start_master()

    def get_while_stopping(
        self, store: KVStore, owner: Owner, keys: Sequence[StoreKey], batch: StoreBatch, seen: Bytes
    ) -> StoreAnswer:
        owner.stop()
        answer = store.get(keys, batch)
        assert np.count_nonzero(seen), "it was stopped in the midst of it"
        return answer

    def pass_time(self, seconds: float) -> None:
        self.pool.advance(seconds)
