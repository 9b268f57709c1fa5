"""The store on real Mooncake beyond the contract: its settings."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import KeyOutcome
from vllm_mooncake_ascend.engines.native_store import StoreSettings
from vllm_mooncake_ascend.engines.store import MooncakeStore
from vllm_mooncake_ascend.errors import ConfigError, EngineError
from vllm_mooncake_ascend.testing.mooncake_store_world import MooncakeStoreWorld
from vllm_mooncake_ascend.testing.store_world import KIB, MIB, all_of, memory_for, names, store_batch_of, values

SETTINGS = StoreSettings(host="127.0.0.1", protocol="tcp", master_address="127.0.0.1:9", segment_bytes=16 * MIB)


@pytest.fixture
def world(mooncake_environment: None) -> Iterator[MooncakeStoreWorld]:
    """A master and whoever asks for a client."""
    world = MooncakeStoreWorld(late_watch_s=1.0)
    yield world
    world.close()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("changes", "word"), [({"segment_bytes": MIB}, "16 MiB"), ({"protocol": "ascend"}, "ascend"), ({"protocol": "ib"}, "'ib'")]
)
def test_settings_that_cannot_work_are_named(mooncake_environment: None, changes: dict[str, object], word: str) -> None:
    """Mooncake would say -600, or take TCP without a word."""
    with pytest.raises(ConfigError, match=word):
        MooncakeStore(msgspec.structs.replace(SETTINGS, **changes))


@pytest.mark.engine
@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1", "no.such.host.invalid:9", "[::1]:9"])
def test_an_address_without_a_master_is_named(mooncake_environment: None, address: str) -> None:
    """At once, by a look at its port."""
    with pytest.raises(EngineError, match="nobody listens"):
        MooncakeStore(msgspec.structs.replace(SETTINGS, master_address=address)).connect()


@pytest.mark.engine
def test_nobody_waits_for_a_stopped_master(world: MooncakeStoreWorld) -> None:
    """Its port accepts, and Mooncake's setup would hold the GIL for 2.4 s. The threads of this process go on, and connecting
    fails soon and by name; when the master goes on it can be done."""
    store = world.store_with(msgspec.structs.replace(SETTINGS, master_address=world.master_address))
    world.stop_master()
    started_s = time.monotonic()
    with pytest.raises(EngineError, match="does not answer"):
        store.connect()
    assert time.monotonic() - started_s < 2 * limits.STORE_CONNECT_S
    world.resume_master()
    store.connect()


@pytest.mark.engine
def test_one_client_for_all_loses_what_it_lends_in_a_fence(world: MooncakeStoreWorld) -> None:
    """Two owners, one of them this store with soft pins and copies asked for; the other one is killed, a get of its key is
    UNKNOWN, and the fence takes our own segment along. The store works on."""
    options = {"reads_apart": False, "soft_pin": True, "num_replicas": 2, "master_address": world.master_address}
    dead, store = world.owner(), world.store_with(msgspec.structs.replace(SETTINGS, **options))
    store.connect()
    ours, lost = names("ours", 2), names("lost", 2)
    local = memory_for(store, 2, 64 * KIB)
    local[:] = values(ours, 64 * KIB)
    batch = store_batch_of(local, 4)
    assert all_of(KeyOutcome.ACCEPTED, ours) == store.put(ours, batch).outcomes
    assert all_of(KeyOutcome.DONE, ours) == store.get(ours, batch).outcomes
    dead.put(lost, 64 * KIB)
    dead.kill()
    assert KeyOutcome.UNKNOWN in store.get(lost, batch).outcomes
    assert store.fence()
    assert KeyOutcome.DONE not in store.get(ours, batch).outcomes
