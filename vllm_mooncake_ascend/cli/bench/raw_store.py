"""Mooncake's own store client with none of our code between: the yardstick of `bench pool`. Over TCP, on loopback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.store_batch import StoreBatch

RawBuffers = tuple[list[list[int]], list[list[int]]]
"""Addresses and lengths of each key's buffers, as Mooncake takes them."""


class RawStoreFailed(RuntimeError):
    """Mooncake said no: there is nothing to measure."""


class RawStore:
    """A client that lends memory, and puts into it."""

    def __init__(self, master_address: str, region: Region, *, segment_bytes: int) -> None:
        from mooncake import store

        self._store: Any = store.MooncakeDistributedStore()
        _expect_zero("setup", self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 0, "tcp", "", master_address))
        _expect_zero("register_buffer", self._store.register_buffer(region.base_address, region.length_bytes))
        self._config = store.ReplicateConfig()
        self._config.preferred_segment = self._store.get_hostname()

    def put(self, keys: Sequence[str], buffers: RawBuffers) -> None:
        for code in self._store.batch_put_from_multi_buffers(keys, *buffers, self._config):
            _expect_zero("batch_put_from_multi_buffers", code)

    def get(self, keys: Sequence[str], buffers: RawBuffers) -> None:
        for code in self._store.batch_get_into_multi_buffers(keys, *buffers):
            if code <= 0:
                raise RawStoreFailed(f"Mooncake's batch_get_into_multi_buffers returned {code} for a key")

    def exists(self, keys: Sequence[str]) -> None:
        """All of them must be there."""
        if set(self._store.batch_is_exist(keys)) != {1}:
            raise RawStoreFailed("Mooncake's batch_is_exist did not find every key")

    def close(self) -> None:
        self._store.close()


def raw_buffers(batch: StoreBatch) -> RawBuffers:
    return batch.pointers(), batch.sizes()


def _expect_zero(call: str, code: int) -> None:
    if code != 0:
        raise RawStoreFailed(f"Mooncake's {call} returned {code}")
