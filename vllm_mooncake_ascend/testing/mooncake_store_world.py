"""The real world of the store's contract: stores under test in this process, owners and master in processes of their own."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore, StoreAnswer, StoreKey
from vllm_mooncake_ascend.engines.native_store import StoreSettings
from vllm_mooncake_ascend.engines.sealed_store import SealedStore
from vllm_mooncake_ascend.engines.store import MooncakeStore
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.testing import store_peer
from vllm_mooncake_ascend.testing.line_process import LineProcess
from vllm_mooncake_ascend.testing.memory import Bytes
from vllm_mooncake_ascend.testing.pool_master import PoolMaster
from vllm_mooncake_ascend.testing.store_world import MIB, Owner


class ProcessOwner:
    """A `store_peer` process."""

    def __init__(self, master_address: str, segment_bytes: int, *, is_sealed: bool = False) -> None:
        arguments = ["--master", master_address, "--segment-bytes", str(segment_bytes), *(["--sealed"] if is_sealed else [])]
        self._process = LineProcess(store_peer.__name__, arguments)
        self._process.answer(store_peer.Answer)

    def put(self, keys: Sequence[StoreKey], value_bytes: int) -> tuple[KeyOutcome, ...]:
        return self._ask(store_peer.Put(keys=tuple(keys), value_bytes=value_bytes))

    def get(self, keys: Sequence[StoreKey], value_bytes: int) -> tuple[KeyOutcome, ...]:
        return self._ask(store_peer.Get(keys=tuple(keys), value_bytes=value_bytes))

    def overwrite(self, key: StoreKey, by: StoreKey, *, num_bytes: int | None = None) -> None:
        self._ask(store_peer.Overwrite(key=key, by=by, num_bytes=num_bytes))

    def close(self) -> None:
        self._ask(store_peer.Close())

    def stop(self) -> None:
        self._process.stop()

    def resume(self) -> None:
        self._process.resume()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        self._process.end()

    def _ask(self, command: store_peer.Command) -> tuple[KeyOutcome, ...]:
        self._process.ask(command)
        return self._process.answer(store_peer.Answer).outcomes


class MooncakeStoreWorld:
    """One master; clients come as they are asked for."""

    def __init__(self, *, late_watch_s: float, is_sealed: bool = False) -> None:
        self._is_sealed = is_sealed
        self.late_watch_s = late_watch_s
        self.call_bound_s = 8.0
        """A call that finds the master dead takes up to 4.7 s; one key of a dead owner a second."""
        self._master = PoolMaster()
        self._stores: list[KVStore] = []
        self._owners: list[ProcessOwner] = []

    @property
    def master_address(self) -> str:
        return self._master.address

    @property
    def metrics_address(self) -> str:
        """Where the master answers over HTTP."""
        return self._master.metrics_address

    def store(self, *, segment_bytes: int = 0) -> KVStore:
        store = self.store_with(
            StoreSettings(host="127.0.0.1", protocol="tcp", master_address=self.master_address, segment_bytes=segment_bytes)
        )
        return SealedStore(store) if self._is_sealed else store

    def store_with(self, settings: StoreSettings) -> MooncakeStore:
        """A store with other settings than the contract needs; closed at the end like all."""
        store = MooncakeStore(settings)
        self._stores.append(store)
        return store

    def owner(self, *, segment_bytes: int = 64 * MIB) -> ProcessOwner:
        owner = ProcessOwner(self._master.address, segment_bytes, is_sealed=self._is_sealed)
        self._owners.append(owner)
        return owner

    def shorten_object_leases(self) -> None:
        assert not self._stores, "clients know the master's address"
        self._master.end()
        self._master = PoolMaster(object_lease_s=0.001)

    def kill_master(self) -> None:
        self._master.kill()

    def stop_master(self) -> None:
        self._master.stop()

    def resume_master(self) -> None:
        self._master.resume()

    def start_master(self) -> None:
        self._master.start()

    def get_while_stopping(
        self, store: KVStore, owner: Owner, keys: Sequence[StoreKey], batch: StoreBatch, seen: Bytes
    ) -> StoreAnswer:
        """A get that beats the stop is repeated; the first byte to land triggers the stop. Takes Mooncake's 60 s."""
        for _ in range(20):
            answers: list[StoreAnswer] = []
            getter = threading.Thread(target=lambda into=answers: into.append(store.get(keys, batch)))
            getter.start()
            while not seen.any() and not answers:
                pass
            owner.stop()
            getter.join()
            if set(answers[0].outcomes) != {KeyOutcome.DONE}:
                return answers[0]
            owner.resume()
            seen[:] = 0
        raise AssertionError("no get could be interrupted in 20 attempts")

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        for store in self._stores:
            store.close()
        for owner in self._owners:
            owner.end()
        self._master.end()
