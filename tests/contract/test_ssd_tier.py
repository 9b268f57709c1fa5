"""The SSD tier of Mooncake, through our store: what was evicted from memory is read back right from disk, or said not to be.

A `mooncake_client` owns memory and disk. Objects go to disk when they are evicted, by the bucket of five; the checks look at
keys of which the master says that no memory holds them any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from vllm_mooncake_ascend.engines.base import KeyOutcome, StoreHealth
from vllm_mooncake_ascend.engines.sealed_store import SealedStore
from vllm_mooncake_ascend.engines.store import MooncakeStore
from vllm_mooncake_ascend.engines.store_codes import CHECKSUM_MISMATCH
from vllm_mooncake_ascend.testing.memory import Bytes
from vllm_mooncake_ascend.testing.standalone_pool import OBJECT_LEASE_S, StandalonePool
from vllm_mooncake_ascend.testing.store_world import MIB, all_of, judged, memory_for, names, store_batch_of, values

pytestmark = pytest.mark.engine
WAIT_S = 60.0
NUM_KEYS = 60
"""Twice what the memory holds, of 1 MiB each."""
NUM_READ = 10
KEYS = names("tier", NUM_KEYS)
DEAD_CALL_S = 8.0


class Tier:
    """A pool that was filled far beyond its memory, and a store to read it with."""

    def __init__(self, **environment: str) -> None:
        self.pool = StandalonePool(has_ssd=True, environment=environment)
        self.store = SealedStore(MooncakeStore(self.pool.settings))
        self.store.connect()
        self.local: Bytes = memory_for(self.store, NUM_READ, MIB)
        for first in range(0, NUM_KEYS, NUM_READ):
            self._put(KEYS[first : first + NUM_READ])
        until(lambda: len(self.pool.keys_on_disk_alone()) >= 2 * NUM_READ)

    def read(self, keys: Sequence[str]) -> tuple[tuple[KeyOutcome, ...], set[int], bool]:
        """Outcomes, FAILED for wrong bytes; codes; whether the master is taken for lost."""
        self.local[:] = 0
        started_s = time.monotonic()
        answer = self.store.get(keys, store_batch_of(self.local, 4))
        assert time.monotonic() - started_s < DEAD_CALL_S
        return judged(answer, keys, self.local), {result.code for result in answer.results}, answer.is_lost

    def end(self) -> None:
        self.store.close()
        self.pool.end()

    def _put(self, keys: Sequence[str]) -> None:
        """Eviction runs behind, so a put that finds no room comes again."""
        self.local[:] = values(keys, MIB)
        batch = store_batch_of(self.local, 4)
        until(lambda: self.store.put(keys, batch).outcomes == all_of(KeyOutcome.ACCEPTED, keys))


def until(question: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not question():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.fixture
def tier(mooncake_environment: None, request: pytest.FixtureRequest) -> Iterator[Tier]:
    made = Tier(**getattr(request, "param", {}))
    yield made
    made.end()


def test_what_only_the_disk_has_is_read_back_right(tier: Tier) -> None:
    """Goal: the tier serves. Method: real bytes of every key that is on disk alone, compared; twice, after its lease."""
    for _ in range(2):
        keys = tier.pool.keys_on_disk_alone()
        for first in range(0, len(keys) - NUM_READ + 1, NUM_READ):
            part = keys[first : first + NUM_READ]
            assert (all_of(KeyOutcome.DONE, part), {0}, False) == tier.read(part)
        assert set(tier.store.exists(keys).outcomes) == {KeyOutcome.DONE}
        time.sleep(OBJECT_LEASE_S)


def test_what_the_disk_has_outlives_the_master(tier: Tier) -> None:
    """Goal: a new master learns from the owner what its disk has; memory is forgotten. Method: kill the master, start one
    at its address, read what was on disk alone."""
    keys = tier.pool.keys_on_disk_alone()[:NUM_READ]
    tier.pool.restart(tier.pool.master)
    until(lambda: tier.store.fence() and set(tier.store.exists(keys).outcomes) == {KeyOutcome.DONE})
    assert (all_of(KeyOutcome.DONE, keys), {0}, False) == tier.read(keys)


def test_what_the_disk_has_outlives_its_owner(tier: Tier) -> None:
    """Goal: an owner that is started anew finds its files. Method: kill it, start it when the master has forgotten it (what
    comes sooner is not taken: docs/pool.md), read what was on disk alone."""
    keys = tier.pool.keys_on_disk_alone()[:NUM_READ]
    tier.pool.owner.child.reap()
    until(lambda: tier.store.exists(keys).outcomes == all_of(KeyOutcome.MISSING, keys))
    tier.pool.restart(tier.pool.owner)
    until(lambda: tier.store.exists(keys).outcomes == all_of(KeyOutcome.DONE, keys))
    assert (all_of(KeyOutcome.DONE, keys), {0}, False) == tier.read(keys)


def test_an_owner_that_does_not_answer_is_no_dead_master(tier: Tier) -> None:
    """Goal: the breaker stays closed for an owner's sake, although Mooncake gives the codes of a dead master. Method: stop
    the owner, let it go on, kill it."""
    keys = tier.pool.keys_on_disk_alone()[:NUM_READ]
    unknown = all_of(KeyOutcome.UNKNOWN, keys)
    tier.pool.stop_owner()
    assert (unknown, {-901}, False) == tier.read(keys)
    assert tier.store.fence()
    tier.pool.resume_owner()
    assert (all_of(KeyOutcome.DONE, keys), {0}, False) == tier.read(keys)
    tier.pool.owner.child.reap()
    for _ in range(2):
        assert (unknown, {-900}, False) == tier.read(keys)
    assert (True, StoreHealth.CONNECTED) == (tier.store.fence(), tier.store.health())
    until(lambda: tier.store.exists(keys).outcomes == all_of(KeyOutcome.MISSING, keys))


def test_a_disk_that_fails_is_a_failure_and_moves_no_bytes(tier: Tier) -> None:
    """Goal: no fence for it, and nothing wrong is DONE. Method: cut every file in two, then remove them all."""
    keys = tier.pool.keys_on_disk_alone()[:NUM_READ]
    files = list(tier.pool.ssd_folder.rglob("*.bucket"))
    for file in files:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size // 4)
    cut, codes, is_lost = tier.read(keys)
    assert (True, True, False) == (KeyOutcome.FAILED in cut, {0, -1102} >= codes, is_lost)
    assert KeyOutcome.UNKNOWN not in cut
    for file in files:
        file.unlink()
    removed, codes, is_lost = tier.read(keys)
    assert (True, False) == (set(removed) <= {KeyOutcome.FAILED, KeyOutcome.DONE}, is_lost)
    assert {0, -1101, -1102} >= codes


def test_a_disk_that_lies_is_a_failure(tier: Tier) -> None:
    """Goal: other bytes than were put are never DONE; Mooncake does not look. Method: one bit of the first object that each
    file holds, well behind its header."""
    keys = tier.pool.keys_on_disk_alone()[:NUM_READ]
    for file in tier.pool.ssd_folder.rglob("*.bucket"):
        with file.open("r+b") as opened:
            opened.seek(MIB // 2)
            (byte,) = opened.read(1)
            opened.seek(MIB // 2)
            opened.write(bytes([byte ^ 1]))
    outcomes, codes, is_lost = tier.read(keys)
    assert (True, set(), False) == (
        KeyOutcome.FAILED in outcomes,
        set(outcomes) - {KeyOutcome.DONE, KeyOutcome.FAILED},
        is_lost,
    )
    assert {0, CHECKSUM_MISMATCH} == codes


@pytest.mark.parametrize(
    ("tier", "code"),
    [
        ({"MOONCAKE_OFFLOAD_CLIENT_BUFFER_GC_TTL_MS": "1"}, -706),
        ({"MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(4 * MIB)}, -10),
    ],
    indirect=["tier"],
    ids=["kept too short", "too little memory"],
)
def test_an_owner_that_cannot_hold_what_it_reads_is_a_failure(tier: Tier, code: int) -> None:
    """Goal: bytes that may be another object's are not DONE, and cost no fence. Method: the owner's own bounds, far too
    small for ten objects of 1 MiB."""
    keys = tier.pool.keys_on_disk_alone()[:NUM_READ]
    assert (all_of(KeyOutcome.FAILED, keys), {code}, False) == tier.read(keys)
