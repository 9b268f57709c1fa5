"""Contract of a store in trouble: owners that die or stop, a master that dies or stops, the fence, closing."""

from __future__ import annotations

import numpy as np

from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore, StoreHealth
from vllm_mooncake_ascend.errors import EngineError
from vllm_mooncake_ascend.testing.contract_world import refuses
from vllm_mooncake_ascend.testing.memory import region_of
from vllm_mooncake_ascend.testing.store_world import (
    KIB,
    MIB,
    StoreCheck,
    StoreWorld,
    all_of,
    comes_true,
    connected,
    memory_for,
    names,
    store_batch_of,
    timed,
    values,
)
from vllm_mooncake_ascend.types import Outcome

_DONE, _MISSING, _ACCEPTED = KeyOutcome.DONE, KeyOutcome.MISSING, KeyOutcome.ACCEPTED


def killed_owner_is_never_done_and_the_others_live(world: StoreWorld) -> None:
    """One of two owners is killed: its keys are UNKNOWN within the bound, the master's answer is not lost, and after the
    fence the keys of the other owner, and what we lend ourselves, are as they were."""
    dead, alive, store = world.owner(), world.owner(), connected(world, segment_bytes=16 * MIB)
    lost, kept, ours = names("lost", 3), names("kept", 3), names("ours", 3)
    dead.put(lost, 64 * KIB)
    alive.put(kept, 64 * KIB)
    source = memory_for(store, 3, 64 * KIB)
    source[:] = values(ours, 64 * KIB)
    assert all_of(_ACCEPTED, ours) == store.put(ours, store_batch_of(source)).outcomes
    dead.kill()
    target = memory_for(store, 3, 64 * KIB)
    answer = timed(world, lambda: store.get(lost, store_batch_of(target, 4)))
    assert (all_of(KeyOutcome.UNKNOWN, lost), False) == (answer.outcomes, answer.is_lost)
    assert store.fence()
    for keys in (kept, ours):
        target[:] = 0
        assert all_of(_DONE, keys) == store.get(keys, store_batch_of(target, 4)).outcomes
        assert np.array_equal(values(keys, 64 * KIB), target)


def fence_spares_what_we_lend_even_after_an_unknown_put(world: StoreWorld) -> None:
    """Our own memory is full, so puts go to an owner that was killed, and a get does: both UNKNOWN. After the fence what lies
    in our memory is still in the pool."""
    dead, store = world.owner(), connected(world, segment_bytes=32 * MIB)
    ours, more, lost = names("ours", 24), names("more", 24), names("lost", 2)
    dead.put(lost, MIB)
    source = memory_for(store, 24, MIB)
    source[:] = values(ours, MIB)
    assert all_of(_ACCEPTED, ours) == store.put(ours, store_batch_of(source)).outcomes
    assert all_of(_DONE, ours) == store.exists(ours).outcomes
    dead.kill()
    assert {_ACCEPTED, KeyOutcome.UNKNOWN} == set(timed(world, lambda: store.put(more, store_batch_of(source)).outcomes))
    assert all_of(KeyOutcome.UNKNOWN, lost) == timed(world, lambda: store.get(lost, store_batch_of(source[:2])).outcomes)
    assert store.fence()
    source[:] = 0
    assert all_of(_DONE, ours) == store.get(ours, store_batch_of(source)).outcomes
    assert np.array_equal(values(ours, MIB), source)


def dead_master_is_noticed_and_forgiven(world: StoreWorld) -> None:
    """By a store that lends nothing, and so has no pings of its own (see `_master_dies`)."""
    _master_dies(world, connected(world))


def dead_master_is_noticed_by_a_store_that_lends_memory(world: StoreWorld) -> None:
    """The same, told by its pings (see `_master_dies`)."""
    _master_dies(world, connected(world, segment_bytes=16 * MIB))


def _master_dies(world: StoreWorld, store: KVStore) -> None:
    """It is killed: every call says so within the bound and moves nothing. It comes back at its address: the same store
    works again without being told, and all old keys are MISSING."""
    owner = world.owner()
    keys, later = names("before", 2), names("after", 2)
    owner.put(keys, 4 * KIB)
    target = memory_for(store, 2, 4 * KIB)
    world.kill_master()
    batch = store_batch_of(target)
    calls = (
        lambda: store.exists(keys),
        lambda: store.get(keys, batch),
        lambda: store.put(later, batch),
        lambda: store.remove(keys, prefix="before/"),
    )
    for call in calls:
        answer = timed(world, call)
        assert {KeyOutcome.UNKNOWN, KeyOutcome.REFUSED} >= set(answer.outcomes)
        assert answer.is_lost
    assert comes_true(world, lambda: store.health() is StoreHealth.UNREACHABLE)
    assert np.count_nonzero(target) == 0
    world.start_master()
    assert store.fence()
    assert comes_true(world, lambda: store.health() is StoreHealth.CONNECTED)
    assert all_of(_MISSING, keys) == store.exists(keys).outcomes
    assert all_of(_MISSING, keys) == store.get(keys, batch).outcomes
    assert comes_true(world, lambda: owner.put(later, 4 * KIB) == all_of(_ACCEPTED, later))
    assert all_of(_DONE, later) == store.get(later, batch).outcomes


def stopped_master_is_noticed(world: StoreWorld) -> None:
    """It is frozen: calls end within the bound and say that it is lost; when it goes on, all is as before."""
    owner, store = world.owner(), connected(world)
    keys, others = names("kept", 2), names("others", 2)  # what is to be removed may be, when the master goes on
    owner.put(keys + others, 4 * KIB)
    target = memory_for(store, 2, 4 * KIB)
    world.stop_master()
    for call in (lambda: store.exists(keys), lambda: store.remove(others, prefix="others/")):
        answer = timed(world, call)
        assert {KeyOutcome.UNKNOWN, KeyOutcome.REFUSED} >= set(answer.outcomes)
        assert answer.is_lost
    world.resume_master()
    assert comes_true(world, lambda: store.health() is StoreHealth.CONNECTED)
    assert all_of(_DONE, keys) == store.get(keys, store_batch_of(target)).outcomes


def store_without_a_master_fails_soon_and_connects_later(world: StoreWorld) -> None:
    """Calls before `connect` are REFUSED, `connect` fails within the bound, and works once there is a master; memory that
    was registered before can be used."""
    store = world.store(segment_bytes=16 * MIB)
    keys = names("first", 2)
    source = memory_for(store, 2, 4 * KIB)
    assert all_of(KeyOutcome.REFUSED, keys) == store.put(keys, store_batch_of(source)).outcomes
    assert StoreHealth.CLOSED is store.health()
    world.kill_master()
    assert Outcome.FAILED is timed(world, lambda: _connect_failure(store))
    world.start_master()
    store.connect()
    store.connect()
    source[:] = values(keys, 4 * KIB)
    assert all_of(_ACCEPTED, keys) == store.put(keys, store_batch_of(source)).outcomes
    source[:] = 0
    assert all_of(_DONE, keys) == store.get(keys, store_batch_of(source)).outcomes
    assert np.array_equal(values(keys, 4 * KIB), source)


def closed_store_refuses(world: StoreWorld) -> None:
    """After close every call, registering and connecting are REFUSED; close and fence may come again."""
    owner, store = world.owner(), connected(world)
    keys = names("shut", 2)
    owner.put(keys, 4 * KIB)
    target = memory_for(store, 2, 4 * KIB)
    store.close()
    store.close()
    batch = store_batch_of(target)
    for answer in (store.get(keys, batch), store.put(keys, batch), store.exists(keys), store.remove(keys, prefix="shut/")):
        assert all_of(KeyOutcome.REFUSED, keys) == answer.outcomes
    assert StoreHealth.CLOSED is store.health()
    assert Outcome.REFUSED is _connect_failure(store)
    assert refuses(lambda: store.register([region_of(target)]))
    assert store.fence()


def late_bytes_never_land_behind_the_fence(world: StoreWorld) -> None:
    """The owner is stopped in the midst of a get and goes on after our fence: not one byte of it lands any more."""
    owner, store = world.owner(), connected(world)
    keys = names("late", 32)
    owner.put(keys, MIB)
    target = memory_for(store, 32, MIB)
    batch = store_batch_of(target, 4)
    assert all_of(_DONE, keys) == store.get(keys, batch).outcomes
    target[:] = 0
    answer = world.get_while_stopping(store, owner, keys, batch, target[:, :: 256 * KIB])
    assert KeyOutcome.UNKNOWN in answer.outcomes
    assert store.fence()
    target[:] = 0
    owner.resume()
    world.pass_time(world.late_watch_s)
    assert np.count_nonzero(target) == 0


def _connect_failure(store: KVStore) -> Outcome | None:
    try:
        store.connect()
    except EngineError as error:
        return error.outcome
    return None


CHECKS: tuple[StoreCheck, ...] = (
    killed_owner_is_never_done_and_the_others_live,
    fence_spares_what_we_lend_even_after_an_unknown_put,
    dead_master_is_noticed_and_forgiven,
    dead_master_is_noticed_by_a_store_that_lends_memory,
    stopped_master_is_noticed,
    store_without_a_master_fails_soon_and_connects_later,
    closed_store_refuses,
    late_bytes_never_land_behind_the_fence,
)
