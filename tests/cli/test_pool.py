"""`pool` counts what is in a pool by whose it is, and drops one namespace and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.cli import pool, pool_census, pool_clear
from vllm_mooncake_ascend.cli.main import build_app
from vllm_mooncake_ascend.cli.master_http import Segment, metrics_address
from vllm_mooncake_ascend.cli.pool_census import Census
from vllm_mooncake_ascend.cli.pool_clear import Cleared
from vllm_mooncake_ascend.engines import environment
from vllm_mooncake_ascend.engines.base import KeyOutcome
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.planner.pool_keys import PoolKey
from vllm_mooncake_ascend.testing.memory_store import MemoryPool, MemoryStore
from vllm_mooncake_ascend.testing.mooncake_store_world import MooncakeStoreWorld
from vllm_mooncake_ascend.testing.store_world import KIB, MIB, all_of, memory_for, store_batch_of

OURS, THEIRS = "0f" * 16, "ab" * 16
VALUE_BYTES = 4 * KIB


def keys_of(namespace: str, count: int, *, group_index: int = 0, shard: str = "00" * 12) -> list[str]:
    return [
        str(PoolKey(namespace=namespace, group_index=group_index, shard=shard, block_hash=index.to_bytes(32, "big")))
        for index in range(count)
    ]


# --- counting ---------------------------------------------------------------------------


def census_of(keys: list[str], sizes: dict[str, int]) -> Census:
    shards, num_others = pool_census.shards_of(keys)
    segment = Segment(name="127.0.0.1:1", status="OK", used_bytes=70, capacity_bytes=100)
    return pool_census.census(shards, num_others, sizes=sizes, totals={"master_evicted_key_count": 3.0}, segments=(segment,))


def test_keys_are_counted_by_namespace() -> None:
    """Two groups of ours, one shard of another's, and two keys in no form of ours."""
    first, second, theirs = keys_of(OURS, 3), keys_of(OURS, 1, group_index=1), keys_of(THEIRS, 2)
    found = census_of([*first, *theirs, "vllm@layer0@abc", *second, f"{OURS}/0/not-a-shard/00"], {})
    counted = [(holding.namespace, holding.num_objects, holding.num_shards) for holding in found.namespaces]
    assert ([(OURS, 4, 2), (THEIRS, 2, 1)], 2, 8, 3) == (counted, found.num_others, found.num_objects, found.evicted_objects)


def test_bytes_are_those_of_one_object_of_each_shard() -> None:
    """Three of 10 bytes and two of 100; of another namespace the size could not be had."""
    small, large, theirs = keys_of(OURS, 3), keys_of(OURS, 2, group_index=1), keys_of(THEIRS, 1)
    found = census_of([*small, *large, *theirs], {small[0]: 10, large[0]: 100})
    assert {OURS: 230, THEIRS: None} == {holding.namespace: holding.num_bytes for holding in found.namespaces}


def test_a_namespace_that_is_not_there_has_no_objects() -> None:
    """Asked of a pool that has another's."""
    found = census_of(keys_of(THEIRS, 2), {})
    assert (0, 2) == (found.objects_of(OURS), found.objects_of(THEIRS))


# --- clearing ---------------------------------------------------------------------------


def filled(*keys: str) -> tuple[MemoryPool, MemoryStore]:
    """A pool in memory that holds these, and a client of it."""
    memory = MemoryPool()
    store = memory.client(segment_bytes=64 * MIB)
    store.connect()
    local = memory_for(store, 1, 64)
    for key in keys:
        store.put([key], store_batch_of(local))
    return memory, store


def test_only_the_namespace_is_dropped() -> None:
    """Ours beside another's and beside keys of other forms, one of which begins like ours."""
    ours, others = keys_of(OURS, 3), [*keys_of(THEIRS, 2), OURS, f"{OURS}0/0/x"]
    memory, store = filled(*ours, *others)
    keys = pool_clear.keys_of_namespace(list(memory.objects), OURS)
    assert Cleared(removed=3) == pool_clear.clear(store, keys, namespace=OURS)
    assert set(others) == set(memory.objects)


def test_what_is_in_use_or_gone_is_told() -> None:
    """One was looked up a moment ago, one was evicted since the keys were listed."""
    keys = keys_of(OURS, 3)
    memory, store = filled(*keys)
    store.exists(keys[:1])
    memory.evict(keys[1])
    cleared = pool_clear.clear(store, keys, namespace=OURS)
    assert (1, 1, 1, 0, False) == (cleared.removed, cleared.gone, cleared.in_use, cleared.unknown, cleared.is_complete)
    assert "object lease" in " ".join(cleared.reasons)


def test_a_silent_master_is_asked_once() -> None:
    """It dies before keys for two calls are removed: all are unknown, and the second call is not made."""
    keys = keys_of(OURS, limits.MAX_LOOKUP_KEYS + 1)
    memory, store = filled()
    memory.kill_master()
    asked: list[int] = []
    cleared = pool_clear.clear(store, keys, namespace=OURS, on_progress=asked.append)
    assert (len(keys), [limits.MAX_LOOKUP_KEYS], False) == (cleared.unknown, asked, cleared.is_complete)


# --- the command ------------------------------------------------------------------------


def test_the_master_is_found_as_engines_find_it() -> None:
    """The option counts more than the variable."""
    environ = {"MOONCAKE_MASTER": "10.0.0.1:50051"}
    found = [pool.settings(option, environ).master_address for option in ("", "10.0.0.2:50051")]
    assert ["10.0.0.1:50051", "10.0.0.2:50051"] == found


def test_the_metrics_port_is_mooncakes_own_unless_told() -> None:
    """Of a plain address, also an IPv6 one; of a master with stand-ins it must be told."""
    found = [metrics_address(address) for address in ("10.0.0.1:50051", "[::1]:50051")]
    assert ["10.0.0.1:9003", "[::1]:9003"] == found
    with pytest.raises(ConfigError, match="--metrics"):
        metrics_address("etcd://10.0.0.1:2379")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["stat", "--metrics", "127.0.0.1:9"], "metrics port of a mooncake_master"),
        (["stat", "--master", "nonsense"], "nonsense"),
        (["clear", "--namespace", "mine", "--master", "127.0.0.1:9"], "32 hex digits"),
        (["clear", "--namespace", OURS], "MOONCAKE_MASTER"),
    ],
)
def test_what_cannot_be_done_is_told(words: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody there, no address, no namespace, no pool."""
    for name in ("MOONCAKE_MASTER", "MOONCAKE_CONFIG_PATH"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(build_app(), ["pool", *words])
    assert (2, True) == (result.exit_code, complaint in " ".join(result.output.split()))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[MooncakeStoreWorld]:
    """A real master, and clients in processes of their own."""
    pytest.importorskip("mooncake")
    for name, value in (
        environment.safe_defaults({}, protocol="tcp", host="127.0.0.1") | environment.store_defaults({})
    ).items():
        monkeypatch.setenv(name, value)
    world = MooncakeStoreWorld(late_watch_s=0.0)
    yield world
    world.close()


@pytest.mark.engine
def test_a_real_pool_is_counted_and_cleared(world: MooncakeStoreWorld) -> None:
    """Ours and another's in a real pool; one of ours is under an object lease. Counting grants none: all but that one go, and
    nothing of the other's."""
    ours, theirs = keys_of(OURS, 70), keys_of(THEIRS, 2)
    owner = world.owner()
    assert all_of(KeyOutcome.ACCEPTED, [*ours, *theirs]) == owner.put([*ours, *theirs], VALUE_BYTES)
    assert (KeyOutcome.DONE,) == owner.get(ours[:1], VALUE_BYTES)
    before = run(world, "stat", "--namespace", OURS)
    held = {holding["namespace"]: (holding["num_objects"], holding["num_bytes"]) for holding in before["namespaces"]}
    assert {OURS: (70, 70 * VALUE_BYTES), THEIRS: (2, 2 * VALUE_BYTES)} == held
    assert [64 * MIB] == [segment["capacity_bytes"] for segment in before["segments"]]
    cleared = run(world, "clear", "--namespace", OURS, "--yes", code=1)
    assert (69, 1, 0) == (cleared["removed"], cleared["in_use"], cleared["unknown"])
    assert all_of(KeyOutcome.DONE, theirs) == owner.get(theirs, VALUE_BYTES)


@pytest.mark.engine
def test_nothing_is_dropped_without_a_yes(world: MooncakeStoreWorld) -> None:
    """The question is answered with no; then there is nothing of that namespace in a pool."""
    keys = keys_of(OURS, 3)
    owner = world.owner()
    owner.put(keys, VALUE_BYTES)
    words = ["pool", "clear", "--master", world.master_address, "--metrics", world.metrics_address, "--namespace", OURS]
    refused = CliRunner().invoke(build_app(), words, input="n\n")
    assert (1, True) == (refused.exit_code, "drop 3 objects" in refused.output)
    assert all_of(KeyOutcome.DONE, keys) == owner.get(keys, VALUE_BYTES)
    run(world, "stat", "--namespace", THEIRS, code=1)


def run(world: MooncakeStoreWorld, *words: str, code: int = 0) -> dict[str, object]:
    options = ("--master", world.master_address, "--metrics", world.metrics_address, "--json")
    result = CliRunner().invoke(build_app(), ["pool", words[0], *options, *words[1:]])
    assert code == result.exit_code, result.output
    return json.loads(result.stdout)
