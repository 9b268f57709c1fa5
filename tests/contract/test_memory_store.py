"""The in-memory store beyond the contract: its faults, and where it is stricter than Mooncake."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_mooncake_ascend.engines.base import KeyOutcome
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.testing.memory import Bytes
from vllm_mooncake_ascend.testing.memory_store import CLIENT_TTL_S, GetFault, MemoryPool, MemoryStore, PutFault
from vllm_mooncake_ascend.testing.store_world import memory_for, names, store_batch_of, values

NUM_BYTES, NUM_BUFFERS = 1_024, 4
KEYS = names("key", 2)


class Pair:
    """`owner` lends memory and has put KEYS; `store` has `target` registered."""

    def __init__(self) -> None:
        self.pool = MemoryPool()
        self.owner: MemoryStore = self.pool.client(segment_bytes=1 << 20)
        self.store: MemoryStore = self.pool.client()
        for store in (self.owner, self.store):
            store.connect()
        self.put(KEYS)
        self.target: Bytes = memory_for(self.store, 2, NUM_BYTES)
        self.batch: StoreBatch = store_batch_of(self.target, NUM_BUFFERS)

    def put(self, keys: list[str]) -> tuple[KeyOutcome, ...]:
        source = memory_for(self.owner, len(keys), NUM_BYTES)
        source[:] = values(keys, NUM_BYTES)
        return self.owner.put(keys, store_batch_of(source)).outcomes

    def get(self) -> tuple[KeyOutcome, ...]:
        return self.store.get(KEYS, self.batch).outcomes

    def num_landed(self) -> list[int]:
        """Buffers written, of each key."""
        return [int(row.reshape(NUM_BUFFERS, -1).any(axis=1).sum()) for row in self.target]


def test_an_ordered_failure_strikes_one_key_once() -> None:
    """The other key is DONE, and so is the next get of this one."""
    pair = Pair()
    pair.pool.inject_get(KEYS[0], GetFault(code=-707, num_landed=2))
    assert (KeyOutcome.FAILED, KeyOutcome.DONE) == pair.get()
    assert [2, 4] == pair.num_landed()
    assert (KeyOutcome.DONE, KeyOutcome.DONE) == pair.get()


def test_late_bytes_land_when_told() -> None:
    """However late that is."""
    pair = Pair()
    pair.pool.inject_get(KEYS[1], GetFault(code=-800, num_landed=1, lands_late=True))
    assert (KeyOutcome.DONE, KeyOutcome.UNKNOWN) == pair.get()
    pair.pool.advance(1_000.0)
    assert [4, 1] == pair.num_landed()
    pair.pool.deliver()
    assert np.array_equal(values(KEYS, NUM_BYTES), pair.target)


def test_a_fence_keeps_late_bytes_away_for_ever() -> None:
    """The same, fenced."""
    pair = Pair()
    pair.pool.inject_get(KEYS[1], GetFault(code=-800, num_landed=1, lands_late=True))
    pair.get()
    assert pair.store.fence()
    pair.pool.deliver()
    assert [4, 1] == pair.num_landed()


def test_bytes_of_a_stopped_owner_land_when_it_goes_on() -> None:
    """Unless it is killed first."""
    landed = []
    for is_killed in (False, True):
        pair = Pair()
        pair.owner.stop()
        assert (KeyOutcome.UNKNOWN, KeyOutcome.UNKNOWN) == pair.get()
        if is_killed:
            pair.owner.kill()
        pair.owner.resume()
        landed.append(pair.num_landed())
    assert [[4, 4], [2, 2]] == landed


def test_keys_of_a_dead_owner_are_missing_after_a_while() -> None:
    """Until then the master still names them."""
    pair = Pair()
    pair.owner.kill()
    assert (KeyOutcome.DONE, KeyOutcome.DONE) == pair.store.exists(KEYS).outcomes
    pair.pool.advance(CLIENT_TTL_S)
    assert (KeyOutcome.MISSING, KeyOutcome.MISSING) == pair.store.exists(KEYS).outcomes


def test_accepted_is_not_stored() -> None:
    """As when another client died while it put the same key."""
    pair = Pair()
    other = names("other", 1)
    pair.pool.inject_put(other[0], PutFault(code=0))
    assert (KeyOutcome.ACCEPTED,) == pair.put(other)
    assert (KeyOutcome.MISSING,) == pair.store.exists(other).outcomes


def test_a_key_can_be_evicted_between_lookup_and_get() -> None:
    """Whatever its object lease: the master may have been restarted."""
    pair = Pair()
    assert (KeyOutcome.DONE, KeyOutcome.DONE) == pair.store.exists(KEYS).outcomes
    pair.pool.evict(KEYS[0])
    assert (KeyOutcome.MISSING, KeyOutcome.DONE) == pair.get()


def test_object_leases_keep_a_full_pool_full() -> None:
    """What was looked up is not evicted, so puts stay FULL until the object leases are over, and then a bit longer."""
    pool = MemoryPool()
    store = pool.client(segment_bytes=2 * NUM_BYTES)
    store.connect()
    source = memory_for(store, 2, NUM_BYTES)
    store.put(KEYS, store_batch_of(source))
    store.exists(KEYS)
    more, batch = names("more", 1), store_batch_of(source[:1])
    outcomes = [store.put(more, batch).outcomes[0]]
    pool.advance(pool.object_lease_s)
    outcomes += [store.put(more, batch).outcomes[0] for _ in range(2)]
    assert [KeyOutcome.FULL, KeyOutcome.FULL, KeyOutcome.ACCEPTED] == outcomes


def test_buffers_that_overlap_are_our_bug() -> None:
    """Two keys of a get that share a byte."""
    pair = Pair()
    rows = pair.batch.addresses.copy()
    rows[1] = rows[0] + NUM_BYTES - 1
    with pytest.raises(LocalProtocolError, match="overlap"):
        pair.store.get(KEYS, StoreBatch(addresses=rows, lengths_bytes=pair.batch.lengths_bytes))


def test_reusing_an_unresolved_target_is_our_bug() -> None:
    """Its late bytes would overwrite the new ones; after the fence it may be used."""
    pair = Pair()
    pair.pool.inject_get(KEYS[0], GetFault(code=-800))
    pair.get()
    with pytest.raises(LocalProtocolError, match="fence first"):
        pair.get()
    assert pair.store.fence()
    assert (KeyOutcome.DONE, KeyOutcome.DONE) == pair.get()
