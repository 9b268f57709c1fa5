"""The master's name comes to stand for another machine while the old one is silent: clients go after it without a restart.

A relay is the name. Mooncake keeps the IP addresses that it found for a name, for minutes while something accepts there, and
makes its next connections to them, too; a new client looks the name up. So the relay leads to the old master, which is stopped,
until the clients are closed, and to the new one from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from vllm_mooncake_ascend.engines.base import KeyOutcome, StoreHealth
from vllm_mooncake_ascend.engines.native_store import StoreSettings
from vllm_mooncake_ascend.engines.store import MooncakeStore
from vllm_mooncake_ascend.testing.mooncake_store_world import ProcessOwner
from vllm_mooncake_ascend.testing.pool_master import PoolMaster
from vllm_mooncake_ascend.testing.store_world import KIB, MIB, all_of, memory_for, names, store_batch_of, values
from vllm_mooncake_ascend.testing.tcp_relay import TcpRelay

pytestmark = pytest.mark.engine
NOTICED_S = 60.0


class Moving:
    """A master behind a name, another one that will be, and a store that knows only the name."""

    def __init__(self) -> None:
        self.old, self.new = PoolMaster(), PoolMaster()
        self.relay = TcpRelay(self.old.address)
        self.machines = frozenset({"10.0.0.1"})
        self.stores: list[MooncakeStore] = []

    def store(self, *, segment_bytes: int) -> MooncakeStore:
        settings = StoreSettings(
            host="127.0.0.1", protocol="tcp", master_address=self.relay.address, segment_bytes=segment_bytes
        )
        store = MooncakeStore(settings, resolve=lambda _address: self.machines)
        store.connect()
        self.stores.append(store)
        return store

    def move(self) -> None:
        """The old machine falls silent, and the name stands for the new one."""
        self.old.stop()
        self.machines = frozenset({"10.0.0.2"})

    def connect(self, store: MooncakeStore) -> None:
        """With clients that look the name up."""
        self.relay.point_at(self.new.address)
        store.connect()

    def end(self) -> None:
        for store in self.stores:
            store.close()
        self.relay.end()
        for master in (self.old, self.new):
            master.end()


@pytest.fixture
def moving(mooncake_environment: None) -> Iterator[Moving]:
    made = Moving()
    yield made
    made.end()


def wait_until_closed(store: MooncakeStore) -> None:
    """Look at its health as a breaker's probes do."""
    deadline_s = time.monotonic() + NOTICED_S
    while store.health() is not StoreHealth.CLOSED:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_a_store_that_lends_memory_goes_after_its_master(moving: Moving) -> None:
    """Goal: both its clients are at the new master, and the memory it lends is. Method: put and get real bytes there."""
    store = moving.store(segment_bytes=16 * MIB)
    before, after = names("before", 2), names("after", 2)
    local = memory_for(store, 2, 64 * KIB)
    local[:] = values(before, 64 * KIB)
    batch = store_batch_of(local, 4)
    assert all_of(KeyOutcome.ACCEPTED, before) == store.put(before, batch).outcomes
    moving.move()
    wait_until_closed(store)
    assert store.put(after, batch).is_lost
    moving.connect(store)
    assert StoreHealth.CONNECTED is store.health()
    assert all_of(KeyOutcome.MISSING, before) == store.exists(before).outcomes
    local[:] = values(after, 64 * KIB)
    assert all_of(KeyOutcome.ACCEPTED, after) == store.put(after, batch).outcomes
    local[:] = 0
    assert all_of(KeyOutcome.DONE, after) == store.get(after, batch).outcomes
    assert np.array_equal(values(after, 64 * KIB), local)


def test_a_store_goes_after_its_master_in_the_midst_of_calls(moving: Moving) -> None:
    """Goal: calls under way are no obstacle, only a delay. Method: a thread that never stops asking; nothing is lent."""
    store = moving.store(segment_bytes=0)
    keys = names("asked", 2)
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            store.exists(keys)

    asker = threading.Thread(target=ask)
    asker.start()
    try:
        moving.move()
        wait_until_closed(store)
        moving.connect(store)
        assert StoreHealth.CONNECTED is store.health()
    finally:
        is_over.set()
        asker.join()
    owner = ProcessOwner(moving.new.address, 64 * MIB)
    try:
        assert all_of(KeyOutcome.ACCEPTED, keys) == owner.put(keys, 4 * KIB)
        assert all_of(KeyOutcome.DONE, keys) == store.exists(keys).outcomes
    finally:
        owner.end()


def test_a_fence_does_not_part_the_clients_of_a_store(moving: Moving) -> None:
    """Goal: never one client at the old master and one at the new. Method: a get that the silent master leaves UNKNOWN, and
    the fence behind it, before any look at the health."""
    store = moving.store(segment_bytes=16 * MIB)
    keys = names("lost", 2)
    batch = store_batch_of(memory_for(store, 2, 4 * KIB))
    moving.move()
    assert all_of(KeyOutcome.UNKNOWN, keys) == store.get(keys, batch).outcomes
    moving.relay.point_at(moving.new.address)
    assert store.fence()
    assert StoreHealth.CLOSED is store.health()
    moving.connect(store)
    assert StoreHealth.CONNECTED is store.health()
    assert all_of(KeyOutcome.MISSING, keys) == store.exists(keys).outcomes
    assert all_of(KeyOutcome.ACCEPTED, keys) == store.put(keys, batch).outcomes


@pytest.mark.parametrize("segment_bytes", [0, 16 * MIB], ids=["lends nothing", "lends memory"])
def test_behind_a_virtual_address_nothing_has_to_move(moving: Moving, segment_bytes: int) -> None:
    """Goal: where the address stays and leads to another machine, as a Kubernetes service's does, the next connection is at
    the new master. Method: the relay leads there at once, the name stands for what it did; calls until they are answered."""
    store = moving.store(segment_bytes=segment_bytes)
    keys = names("virtual", 2)
    moving.old.stop()
    moving.relay.point_at(moving.new.address)
    deadline_s = time.monotonic() + NOTICED_S
    while set(store.exists(keys).outcomes) != {KeyOutcome.MISSING} or store.health() is not StoreHealth.CONNECTED:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    if segment_bytes > 0:
        batch = store_batch_of(memory_for(store, 2, 4 * KIB))
        while store.put(keys, batch).outcomes != all_of(KeyOutcome.ACCEPTED, keys):
            assert time.monotonic() < deadline_s
            assert store.fence()
        assert all_of(KeyOutcome.DONE, keys) == store.get(keys, batch).outcomes
