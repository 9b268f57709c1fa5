"""The world a check of the store's contract runs in, as Protocols, and the vocabulary of the checks."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore, StoreAnswer, StoreKey
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.testing.memory import Bytes, address_of, pattern, region_of

KIB = 1 << 10
MIB = 1 << 20
_T = TypeVar("_T")
_QUESTION_S = 0.1
_MAX_QUESTIONS = 150


class Owner(Protocol):
    """Another client, in a process of its own, that lends memory to the pool."""

    def put(self, keys: Sequence[StoreKey], value_bytes: int) -> tuple[KeyOutcome, ...]:
        """Put `value(key)` under each key, into its own memory if there is room."""

    def get(self, keys: Sequence[StoreKey], value_bytes: int) -> tuple[KeyOutcome, ...]:
        """Get each key and compare with `value(key)`: FAILED for a DONE one with wrong bytes."""

    def overwrite(self, key: StoreKey, by: StoreKey, *, num_bytes: int | None = None) -> None:
        """As a late write of somebody else does: the first bytes of the object `key`, where they lie in its memory, or all of
        them, become those of another object of it."""

    def stop(self) -> None:
        """Freeze its process."""

    def resume(self) -> None:
        """Let it go on."""

    def kill(self) -> None:
        """End its process at once."""

    def close(self) -> None:
        """It leaves the pool in good order."""


class StoreWorld(Protocol):
    """Where the clients of one pool live during one check. A master with long object leases runs from the start."""

    @property
    def call_bound_s(self) -> float:
        """No call may take longer, but gets from an owner that is stopped."""

    @property
    def late_watch_s(self) -> float:
        """How long to look for late bytes."""

    def store(self, *, segment_bytes: int = 0) -> KVStore:
        """A new store under test, in this process, not connected."""

    def owner(self, *, segment_bytes: int = 64 * MIB) -> Owner:
        """A new client that lends memory."""

    def shorten_object_leases(self) -> None:
        """To nothing worth mentioning. Before there are clients."""

    def kill_master(self) -> None: ...
    def stop_master(self) -> None: ...
    def resume_master(self) -> None: ...
    def start_master(self) -> None:
        """After `kill_master`, at the same address."""

    def get_while_stopping(
        self, store: KVStore, owner: Owner, keys: Sequence[StoreKey], batch: StoreBatch, seen: Bytes
    ) -> StoreAnswer:
        """Get, and stop the owner when bytes are under way. `seen`: a view into the targets to see it by."""

    def pass_time(self, seconds: float) -> None: ...


StoreCheck = Callable[[StoreWorld], None]


def value(key: StoreKey, num_bytes: int) -> Bytes:
    """What every client of a check stores under `key`."""
    return pattern(zlib.crc32(key.encode()) & 0xFFFFF, num_bytes)


def values(keys: Sequence[StoreKey], num_bytes: int) -> Bytes:
    """`[len(keys), num_bytes] uint8`."""
    return np.stack([value(key, num_bytes) for key in keys])


def names(label: str, count: int) -> list[StoreKey]:
    return [f"{label}/{index}" for index in range(count)]


_REGISTERED: WeakKeyDictionary[KVStore, list[Bytes]] = WeakKeyDictionary()
"""Registered memory must live as long as its store."""


def memory_for(store: KVStore, num_keys: int, value_bytes: int) -> Bytes:
    """`[num_keys, value_bytes] uint8` of zeros, registered."""
    local = np.zeros((num_keys, value_bytes), dtype=np.uint8)
    store.register([region_of(local)])
    _REGISTERED.setdefault(store, []).append(local)
    return local


def store_batch_of(local: Bytes, num_buffers: int = 1) -> StoreBatch:
    """Each row of `local` as one value in so many neighbouring buffers, the first ones of equal length."""
    value_bytes = local.shape[1]
    edges = np.array([value_bytes // num_buffers * index for index in range(num_buffers)] + [value_bytes], dtype=np.int64)
    rows = address_of(local) + np.arange(len(local), dtype=np.int64) * value_bytes
    return StoreBatch(addresses=rows[:, None] + edges[None, :-1], lengths_bytes=np.diff(edges))


def judged(answer: StoreAnswer, keys: Sequence[StoreKey], target: Bytes) -> tuple[KeyOutcome, ...]:
    """The outcomes of a get, FAILED for a DONE key with wrong bytes."""
    right = (values(keys, target.shape[1]) == target).all(axis=1)
    return tuple(
        KeyOutcome.FAILED if outcome is KeyOutcome.DONE and not is_right else outcome
        for outcome, is_right in zip(answer.outcomes, right, strict=True)
    )


def connected(world: StoreWorld, *, segment_bytes: int = 0) -> KVStore:
    store = world.store(segment_bytes=segment_bytes)
    store.connect()
    return store


def all_of(outcome: KeyOutcome, keys: Sequence[StoreKey]) -> tuple[KeyOutcome, ...]:
    return (outcome,) * len(keys)


def timed(world: StoreWorld, call: Callable[[], _T]) -> _T:
    started_s = time.monotonic()
    result = call()
    assert time.monotonic() - started_s < world.call_bound_s
    return result


def comes_true(world: StoreWorld, question: Callable[[], bool]) -> bool:
    """Ask again and again; what the clients' pings must find out first takes seconds."""
    for _ in range(_MAX_QUESTIONS):
        if question():
            return True
        world.pass_time(_QUESTION_S)
    return False
