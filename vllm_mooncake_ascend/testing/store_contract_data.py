"""Contract of a store that meets no trouble: what is put and got, what is refused, what a full pool and short leases do."""

from __future__ import annotations

import threading

import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import KeyOutcome, StoreHealth
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.testing.memory import address_of
from vllm_mooncake_ascend.testing.store_world import (
    KIB,
    MIB,
    StoreCheck,
    StoreWorld,
    all_of,
    connected,
    memory_for,
    names,
    store_batch_of,
    values,
)

_DONE, _MISSING, _ACCEPTED = KeyOutcome.DONE, KeyOutcome.MISSING, KeyOutcome.ACCEPTED


def values_go_in_and_come_out(world: StoreWorld) -> None:
    """Gathered from seven buffers of one client, scattered into three of another: every byte is right, nothing else moves."""
    owner, store = world.owner(), connected(world, segment_bytes=16 * MIB)
    mine, yours = names("mine", 4), names("yours", 4)
    source = memory_for(store, 4, 96 * KIB + 5)
    source[:] = values(mine, 96 * KIB + 5)
    assert all_of(_ACCEPTED, mine) == store.put(mine, store_batch_of(source, 7)).outcomes
    assert all_of(_ACCEPTED, yours) == owner.put(yours, 96 * KIB + 5)
    assert all_of(_DONE, mine) == owner.get(mine, 96 * KIB + 5)
    target = memory_for(store, 8, 96 * KIB + 5)
    answer = store.get([*yours, *mine], store_batch_of(target, 3))
    assert (all_of(_DONE, [*yours, *mine]), False) == (answer.outcomes, answer.is_lost)
    assert np.array_equal(values([*yours, *mine], 96 * KIB + 5), target)
    assert StoreHealth.CONNECTED is store.health()


def each_key_has_its_own_answer(world: StoreWorld) -> None:
    """The second of three keys does not exist: it alone is MISSING, in get and in exists, and its target stays as it was."""
    owner, store = world.owner(), connected(world)
    keys = names("some", 3)
    owner.put([keys[0], keys[2]], 4 * KIB)
    target = memory_for(store, 3, 4 * KIB)
    expected = values(keys, 4 * KIB)
    expected[1] = 0
    assert store.exists(keys).outcomes == (_DONE, _MISSING, _DONE)
    assert store.get(keys, store_batch_of(target, 2)).outcomes == (_DONE, _MISSING, _DONE)
    assert np.array_equal(expected, target)


def values_of_another_length_are_never_done(world: StoreWorld) -> None:
    """Buffers shorter and longer than the value: not DONE, not MISSING; the right length works before and after."""
    owner, store = world.owner(), connected(world)
    keys = names("sized", 2)
    owner.put(keys, 8 * KIB)
    for value_bytes in (8 * KIB - 1, 8 * KIB + 1):
        target = memory_for(store, 2, value_bytes)
        outcomes = store.get(keys, store_batch_of(target)).outcomes
        assert set(outcomes) <= {KeyOutcome.FAILED, KeyOutcome.UNKNOWN}
    assert store.fence()
    target = memory_for(store, 2, 8 * KIB)
    assert all_of(_DONE, keys) == store.get(keys, store_batch_of(target)).outcomes
    assert np.array_equal(values(keys, 8 * KIB), target)


def what_is_there_stays(world: StoreWorld) -> None:
    """A key put again, with other bytes and with another length: ACCEPTED both times, and the first value remains."""
    owner, store = world.owner(), connected(world, segment_bytes=16 * MIB)
    keys = names("twice", 2)
    owner.put(keys, 8 * KIB)
    for value_bytes in (8 * KIB, 4 * KIB):
        source = memory_for(store, 2, value_bytes)
        assert all_of(_ACCEPTED, keys) == store.put(keys, store_batch_of(source)).outcomes
    assert all_of(_DONE, keys) == owner.get(keys, 8 * KIB)


def many_small_values_arrive(world: StoreWorld) -> None:
    """As many buffers as one call may have if each key has a seal too, and ten thousand keys looked up at once."""
    owner, store = world.owner(), connected(world)
    keys = names("small", limits.MAX_CALL_DESCRIPTORS // 3)
    owner.put(keys, 512)
    target = memory_for(store, len(keys), 512)
    assert all_of(_DONE, keys) == store.get(keys, store_batch_of(target, 2)).outcomes
    assert np.array_equal(values(keys, 512), target)
    found = store.exists([*keys, *names("none", 10_000)]).outcomes
    assert (len(keys), 10_000) == (found.count(_DONE), found.count(_MISSING))


def clients_at_once_all_get_their_bytes(world: StoreWorld) -> None:
    """Two threads of ours and another process get, one thread puts, all at the same time."""
    owner, store = world.owner(), connected(world, segment_bytes=16 * MIB)
    keys, more = names("shared", 8), names("more", 8)
    owner.put(keys, 256 * KIB)
    targets = [memory_for(store, 8, 256 * KIB) for _ in range(2)]
    source = memory_for(store, 8, 256 * KIB)
    source[:] = values(more, 256 * KIB)
    outcomes: list[tuple[KeyOutcome, ...]] = []
    threads = [
        threading.Thread(target=lambda t=target: outcomes.append(store.get(keys, store_batch_of(t, 4)).outcomes), daemon=True)
        for target in targets
    ]
    threads.append(
        threading.Thread(target=lambda: outcomes.append(store.put(more, store_batch_of(source)).outcomes), daemon=True)
    )
    for thread in threads:
        thread.start()
    assert all_of(_DONE, keys) == owner.get(keys, 256 * KIB)
    for thread in threads:
        thread.join(world.call_bound_s)
    assert sorted(map(str, [all_of(_DONE, keys)] * 2 + [all_of(_ACCEPTED, more)])) == sorted(map(str, outcomes))
    assert all(np.array_equal(values(keys, 256 * KIB), target) for target in targets)
    assert all_of(_DONE, more) == owner.get(more, 256 * KIB)


def removed_keys_are_gone_and_no_others(world: StoreWorld) -> None:
    """Two of five keys: MISSING after it, as one that nobody put; the others are as they were, and a removed key can be put
    anew."""
    owner, store = world.owner(), connected(world)
    keys = names("some", 5)
    owner.put(keys, 4 * KIB)
    never = names("never", 1)
    assert store.remove(keys[:2], prefix="some/").outcomes == (_DONE, _DONE)
    assert store.remove(keys[:2], prefix="some/").outcomes == (_MISSING, _MISSING)
    assert store.remove(never, prefix="never/").outcomes == (_MISSING,)
    assert store.exists(keys).outcomes == (_MISSING, _MISSING, _DONE, _DONE, _DONE)
    assert all_of(_DONE, keys[2:]) == owner.get(keys[2:], 4 * KIB)
    assert all_of(_ACCEPTED, keys[:2]) == owner.put(keys[:2], 4 * KIB)
    assert all_of(_DONE, keys[:2]) == owner.get(keys[:2], 4 * KIB)


def keys_in_use_are_not_removed(world: StoreWorld) -> None:
    """Looked up by one client, got by another, and untouched: only the last one goes, and the readers' bytes stay."""
    owner, store = world.owner(), connected(world)
    keys = names("used", 3)
    owner.put(keys, 4 * KIB)
    assert owner.get(keys[1:2], 4 * KIB) == (_DONE,)
    assert store.exists(keys[:1]).outcomes == (_DONE,)
    answer = store.remove(keys, prefix="used/")
    assert answer.outcomes == (KeyOutcome.IN_USE, KeyOutcome.IN_USE, _DONE)
    assert ("object lease" in answer.results[0].reason, answer.is_lost) == (True, False)
    assert all_of(_DONE, keys[:2]) == owner.get(keys[:2], 4 * KIB)


def keys_are_removed_once_their_object_leases_are_over(world: StoreWorld) -> None:
    """Looked up, then removed a moment later where object leases are short."""
    world.shorten_object_leases()
    owner, store = world.owner(), connected(world)
    keys = names("lapsed", 2)
    owner.put(keys, 4 * KIB)
    assert all_of(_DONE, keys) == store.exists(keys).outcomes
    world.pass_time(0.1)
    assert all_of(_DONE, keys) == store.remove(keys, prefix="lapsed/").outcomes


# --- refusals -----------------------------------------------------------------------


def calls_that_would_go_wrong_are_refused(world: StoreWorld) -> None:
    """A key twice, memory not registered, a null pointer, too much for a call, what is no key, the keys of others: REFUSED
    whole, no byte moved, no key removed."""
    owner, store = world.owner(), connected(world)
    keys = names("good", 2)
    owner.put(keys, 4 * KIB)
    target = memory_for(store, 2, 4 * KIB)
    stranger = np.zeros((2, 4 * KIB), dtype=np.uint8)
    good = store_batch_of(target)
    null = StoreBatch(addresses=np.array([[address_of(target)], [0]]), lengths_bytes=good.lengths_bytes)
    large = memory_for(store, 2, limits.MAX_CALL_BYTES // 2 + 1)
    bad = [
        ([keys[0], keys[0]], good),
        (keys, store_batch_of(stranger)),
        (keys, null),
        (keys[:1], good),
        (keys, store_batch_of(target, limits.MAX_CALL_DESCRIPTORS // 2 + 1)),
        (keys, store_batch_of(large)),
        (["", keys[0]], good),
        (["k\0", keys[0]], good),
        (["é", keys[0]], good),
        (["k" * (limits.MAX_ID_CHARS + 1), keys[0]], good),
    ]
    for some_keys, batch in bad:
        assert all_of(KeyOutcome.REFUSED, some_keys) == store.get(some_keys, batch).outcomes
        assert all_of(KeyOutcome.REFUSED, some_keys) == store.put(some_keys, batch).outcomes
    many = names("many", limits.MAX_LOOKUP_KEYS + 1)
    assert all_of(KeyOutcome.REFUSED, many) == store.exists(many).outcomes
    assert all_of(KeyOutcome.REFUSED, many) == store.remove(many, prefix="many/").outcomes
    for prefix in ("", "goo/", keys[0]):
        assert all_of(KeyOutcome.REFUSED, keys) == store.remove(keys, prefix=prefix).outcomes
    assert np.count_nonzero(target) == 0
    assert store.fence()
    assert all_of(_DONE, keys) == owner.get(keys, 4 * KIB)


def nothing_asked_nothing_answered(world: StoreWorld) -> None:
    """No keys: no results, and nobody is asked."""
    store = world.store()
    empty = StoreBatch(addresses=np.zeros((0, 1), dtype=np.int64), lengths_bytes=np.ones(1, dtype=np.int64))
    assert (store.get([], empty).outcomes, store.put([], empty).outcomes, store.exists([]).outcomes) == ((), (), ())
    assert store.remove([], prefix="any/").outcomes == ()


# --- a full pool, short leases, owners that leave -----------------------------------


def a_full_pool_says_so_key_by_key(world: StoreWorld) -> None:
    """Nearly twice what fits is put: some keys are ACCEPTED, some FULL; what can be got is right, the rest is MISSING."""
    owner, store = world.owner(segment_bytes=16 * MIB), connected(world)
    keys = names("full", 30)
    source = memory_for(store, 30, MIB)
    source[:] = values(keys, MIB)
    puts = store.put(keys, store_batch_of(source, 4)).outcomes
    assert {_ACCEPTED, KeyOutcome.FULL} == set(puts)
    assert set(owner.get(keys, MIB)) == {_DONE, _MISSING}


def evicted_keys_are_missing_and_the_rest_is_right(world: StoreWorld) -> None:
    """Looked up first, then pushed out by later puts: MISSING, never other bytes."""
    world.shorten_object_leases()
    owner, store = world.owner(segment_bytes=16 * MIB), connected(world)
    keys = names("old", 12)
    owner.put(keys, MIB)
    assert all_of(_DONE, keys) == store.exists(keys).outcomes
    world.pass_time(0.1)
    for index in range(12):
        world.pass_time(0.05)
        owner.put(names(f"new{index}", 2), MIB)
    found = store.exists(keys).outcomes
    assert _MISSING in found
    target = memory_for(store, 12, MIB)
    outcomes = store.get(keys, store_batch_of(target)).outcomes
    assert set(outcomes) <= {_MISSING, _DONE, KeyOutcome.FAILED}
    done = [index for index, outcome in enumerate(outcomes) if outcome is _DONE]
    assert np.array_equal(values(keys, MIB)[done], target[done])


def a_lapsed_object_lease_is_never_done(world: StoreWorld) -> None:
    """The object lease ends while the bytes are under way: FAILED, though nothing of it lands any more."""
    world.shorten_object_leases()
    owner, store = world.owner(), connected(world)
    keys = names("lapsed", 32)
    owner.put(keys, MIB)
    target = memory_for(store, 32, MIB)
    answer = store.get(keys, store_batch_of(target, 4))
    assert (all_of(KeyOutcome.FAILED, keys), False) == (answer.outcomes, answer.is_lost)
    target[:] = 0
    world.pass_time(0.5)
    assert np.count_nonzero(target) == 0


def keys_of_an_owner_that_left_are_missing(world: StoreWorld) -> None:
    """It closes between lookup and get: MISSING, and no byte moved."""
    owner, store = world.owner(), connected(world)
    keys = names("left", 3)
    owner.put(keys, 4 * KIB)
    assert all_of(_DONE, keys) == store.exists(keys).outcomes
    owner.close()
    target = memory_for(store, 3, 4 * KIB)
    assert all_of(_MISSING, keys) == store.get(keys, store_batch_of(target)).outcomes
    assert np.count_nonzero(target) == 0


CHECKS: tuple[StoreCheck, ...] = (
    values_go_in_and_come_out,
    each_key_has_its_own_answer,
    values_of_another_length_are_never_done,
    what_is_there_stays,
    many_small_values_arrive,
    removed_keys_are_gone_and_no_others,
    keys_in_use_are_not_removed,
    keys_are_removed_once_their_object_leases_are_over,
    clients_at_once_all_get_their_bytes,
    calls_that_would_go_wrong_are_refused,
    nothing_asked_nothing_answered,
    a_full_pool_says_so_key_by_key,
    evicted_keys_are_missing_and_the_rest_is_right,
    a_lapsed_object_lease_is_never_done,
    keys_of_an_owner_that_left_are_missing,
)
