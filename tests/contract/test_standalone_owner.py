"""A store that lends nothing, on a pool whose memory belongs to a `mooncake_client`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from vllm_mooncake_ascend.engines.base import KeyOutcome, StoreHealth
from vllm_mooncake_ascend.engines.store import MooncakeStore
from vllm_mooncake_ascend.testing.standalone_pool import StandalonePool
from vllm_mooncake_ascend.testing.store_world import KIB, all_of, judged, memory_for, names, store_batch_of, values

pytestmark = pytest.mark.engine
WAIT_S = 30.0
DEAD_CALL_S = 8.0
"""As the store's contract has it."""


@pytest.fixture
def pool(mooncake_environment: None) -> Iterator[StandalonePool]:
    made = StandalonePool(has_ssd=False)
    yield made
    made.end()


@pytest.fixture
def store(pool: StandalonePool) -> Iterator[MooncakeStore]:
    made = MooncakeStore(pool.settings)
    made.connect()
    yield made
    made.close()


def until(question: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_every_call_works_on_memory_of_another_process(store: MooncakeStore) -> None:
    """Goal: the mode is whole. Method: put, find, get by another cut, fence, find again, remove once no lease is left."""
    keys, never = names("alone", 4), names("never", 1)
    local = memory_for(store, 4, 64 * KIB)
    local[:] = values(keys, 64 * KIB)
    assert all_of(KeyOutcome.ACCEPTED, keys) == store.put(keys, store_batch_of(local, 3)).outcomes
    assert (KeyOutcome.DONE,) * 4 + (KeyOutcome.MISSING,) == store.exists((*keys, *never)).outcomes
    local[:] = 0
    assert all_of(KeyOutcome.DONE, keys) == store.get(keys, store_batch_of(local, 5)).outcomes
    assert np.array_equal(values(keys, 64 * KIB), local)
    assert (StoreHealth.CONNECTED, True) == (store.health(), store.fence())
    assert all_of(KeyOutcome.DONE, keys) == store.exists(keys).outcomes
    assert all_of(KeyOutcome.IN_USE, keys) == store.remove(keys, prefix="alone/").outcomes
    until(lambda: store.remove(keys, prefix="alone/").outcomes == all_of(KeyOutcome.MISSING, keys))


def test_a_killed_owner_costs_its_objects_and_a_new_one_takes_over(pool: StandalonePool, store: MooncakeStore) -> None:
    """Goal: we live on, nothing is DONE that is not, the master is not taken for lost; with a new owner the same store works.
    Method: kill the owner of all memory, and start another one."""
    lost, later = names("lost", 2), names("later", 2)
    local = memory_for(store, 2, 64 * KIB)
    local[:] = values(lost, 64 * KIB)
    batch = store_batch_of(local, 4)
    assert all_of(KeyOutcome.ACCEPTED, lost) == store.put(lost, batch).outcomes
    pool.owner.child.reap()
    for call in (store.get, store.put):
        started_s = time.monotonic()
        answer = call(lost if call == store.get else later, batch)
        assert (all_of(KeyOutcome.UNKNOWN, lost), False) == (answer.outcomes, answer.is_lost)
        assert time.monotonic() - started_s < DEAD_CALL_S
    assert (True, StoreHealth.CONNECTED) == (store.fence(), store.health())
    pool.restart(pool.owner)
    fresh = names("fresh", 2)
    local[:] = values(fresh, 64 * KIB)
    until(lambda: store.put(fresh, batch).outcomes == all_of(KeyOutcome.ACCEPTED, fresh) and store.fence())
    local[:] = 0
    assert all_of(KeyOutcome.DONE, fresh) == judged(store.get(fresh, batch), fresh, local)
    until(lambda: store.exists(lost).outcomes == all_of(KeyOutcome.MISSING, lost))
