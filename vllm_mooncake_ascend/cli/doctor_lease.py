"""The doctor's measurement of a master's object lease, which no page of the master tells: how long an object that was looked up
cannot be removed. Takes as long as the lease, and a small object of our own in the pool."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable

import numpy as np

from vllm_mooncake_ascend.cli.doctor_pool import LAG_S, Lease
from vllm_mooncake_ascend.config import PoolConfig
from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore
from vllm_mooncake_ascend.errors import MooncakeAscendError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.store_batch import StoreBatch

PREFIX = "mooncake-ascend-doctor/"
"""Of keys: no namespace of engines."""
OBJECT_BYTES = 4_096
POLL_S = 0.1


def measure_lease(config: PoolConfig) -> Lease:
    """Of the master that `config` names, as far as `config.object_lease_s`."""
    from vllm_mooncake_ascend.engines.native_store import StoreSettings
    from vllm_mooncake_ascend.engines.store import MooncakeStore

    try:
        store = MooncakeStore(
            StoreSettings(
                host=config.host,
                protocol=config.protocol,
                master_address=config.master_address,
                segment_bytes=0,
                device_name=config.device_name,
                tenant=config.tenant,
            )
        )
        store.connect()
    except MooncakeAscendError as error:
        return Lease(error=str(error))
    try:
        return lease_of(store, up_to_s=config.object_lease_s)
    finally:
        store.close()


def lease_of(
    store: KVStore,
    *,
    up_to_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Lease:
    """Look an object of our own up, and try to remove it until that works.

    Args:
        up_to_s: what the lease should be. An object that is in use longer is removed all the same: by us alone it is used.
    """
    memory = np.zeros(OBJECT_BYTES, dtype=np.uint8)
    address = int(memory.__array_interface__["data"][0])
    store.register([Region(base_address=address, length_bytes=OBJECT_BYTES)])
    batch = StoreBatch(addresses=np.array([[address]], dtype=np.int64), lengths_bytes=np.array([OBJECT_BYTES], dtype=np.int64))
    key = (f"{PREFIX}{uuid.uuid4().hex}",)
    if (put := store.put(key, batch).results[0]).outcome is not KeyOutcome.ACCEPTED:
        return Lease(error=f"an object to measure with could not be put: {put.reason}")
    started_s = clock()
    if (found := store.exists(key).results[0]).outcome is not KeyOutcome.DONE:
        return Lease(error=f"the object to measure with is not there: {found.reason or 'evicted'}")
    while True:
        removed, seconds = store.remove(key, prefix=PREFIX).results[0], clock() - started_s
        if removed.outcome in (KeyOutcome.DONE, KeyOutcome.MISSING):
            return Lease(seconds=seconds, is_over=True)
        if removed.outcome is not KeyOutcome.IN_USE:
            return Lease(error=f"the object to measure with could not be removed: {removed.reason}")
        if seconds > up_to_s + LAG_S:
            store.remove(key, prefix=PREFIX, even_in_use=True)
            return Lease(seconds=seconds)
        sleep(POLL_S)
