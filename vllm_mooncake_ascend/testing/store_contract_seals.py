"""Contract of sealed stores: what was written over in the memory of its owner is never DONE, however it came about."""

from __future__ import annotations

import numpy as np

from vllm_mooncake_ascend.engines.base import KeyOutcome
from vllm_mooncake_ascend.engines.store_codes import CHECKSUM_MISMATCH
from vllm_mooncake_ascend.testing.store_world import (
    KIB,
    MIB,
    StoreCheck,
    StoreWorld,
    all_of,
    connected,
    judged,
    memory_for,
    names,
    store_batch_of,
    values,
)

_DONE, _ACCEPTED, _FAILED = KeyOutcome.DONE, KeyOutcome.ACCEPTED, KeyOutcome.FAILED


def bytes_written_over_are_never_done(world: StoreWorld) -> None:
    """Of three objects one has 8 bytes, or 64 KiB, of another in their place: it alone is FAILED, and says why."""
    for num_bytes, value_bytes in ((8, 96 * KIB), (64 * KIB, 96 * KIB), (7, 96 * KIB + 5)):
        owner, store = world.owner(), connected(world)
        keys = names(f"torn{num_bytes}", 3)
        owner.put(keys, value_bytes)
        owner.overwrite(keys[1], keys[2], num_bytes=num_bytes)
        target = memory_for(store, 3, value_bytes)
        answer = store.get(keys, store_batch_of(target, 3))
        assert judged(answer, keys, target) == (_DONE, _FAILED, _DONE)
        assert tuple(result.code for result in answer.results) == (0, CHECKSUM_MISMATCH, 0)
        assert answer.results[1].reason


def whole_object_of_another_key_is_never_done(world: StoreWorld) -> None:
    """All of one object, seal and all, lies where another was: it does not pass for that one."""
    owner, store = world.owner(), connected(world)
    keys = names("swapped", 2)
    owner.put(keys, 96 * KIB)
    owner.overwrite(keys[0], keys[1])
    target = memory_for(store, 2, 96 * KIB)
    assert judged(store.get(keys, store_batch_of(target)), keys, target) == (_FAILED, _DONE)


def broken_object_can_be_removed_and_put_anew(world: StoreWorld) -> None:
    """It was just got, so nobody may remove it in good order; it is removed all the same, put again, and right."""
    owner, store = world.owner(), connected(world, segment_bytes=16 * MIB)
    keys = names("renewed", 2)
    owner.put(keys, 4 * KIB)
    owner.overwrite(keys[0], keys[1], num_bytes=4 * KIB)
    target = memory_for(store, 2, 4 * KIB)
    assert store.get(keys, store_batch_of(target)).outcomes == (_FAILED, _DONE)
    assert store.remove(keys[:1], prefix="renewed/").outcomes == (KeyOutcome.IN_USE,)
    assert store.remove(keys[:1], prefix="renewed/", even_in_use=True).outcomes == (_DONE,)
    target[:] = values(keys, 4 * KIB)
    assert all_of(_ACCEPTED, keys) == store.put(keys, store_batch_of(target)).outcomes
    target[:] = 0
    assert all_of(_DONE, keys) == store.get(keys, store_batch_of(target, 2)).outcomes
    assert np.array_equal(values(keys, 4 * KIB), target)


CHECKS: tuple[StoreCheck, ...] = (
    bytes_written_over_are_never_done,
    whole_object_of_another_key_is_never_done,
    broken_object_can_be_removed_and_put_anew,
)
