"""Bytes of a put that has failed, on real Mooncake: they land when the owner of the memory goes on, in objects of others."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Iterator

import pytest

from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore
from vllm_mooncake_ascend.testing.memory import Bytes
from vllm_mooncake_ascend.testing.mooncake_store_world import MooncakeStoreWorld
from vllm_mooncake_ascend.testing.store_world import MIB, Owner, connected, judged, memory_for, names, store_batch_of, values

NUM_KEYS = 63
"""Of one call: with their seals as much as one may move."""
NUM_CALLS = 3
"""Puts under way at once when the owner is stopped."""
SEGMENT_BYTES = 256 * MIB
FULL = {KeyOutcome.FULL}


@pytest.fixture
def world(mooncake_environment: None) -> Iterator[MooncakeStoreWorld]:
    """Sealed stores."""
    world = MooncakeStoreWorld(late_watch_s=0.0, is_sealed=True)
    yield world
    world.close()


def put_while_stopping(world: MooncakeStoreWorld, store: KVStore, owner: Owner, sources: list[Bytes]) -> set[KeyOutcome]:
    """Puts at once, of which the owner sees the beginning. Takes Mooncake's 60 s."""
    for attempt in range(20):
        outcomes: set[KeyOutcome] = set()

        def put(index: int, attempt: int = attempt, outcomes: set[KeyOutcome] = outcomes) -> None:
            batch = store_batch_of(sources[index])
            outcomes.update(store.put(names(f"late/{attempt}/{index}", NUM_KEYS), batch).outcomes)

        threads = [threading.Thread(target=put, args=(index,)) for index in range(len(sources))]
        for thread in threads:
            thread.start()
        world.pass_time(0.05)
        owner.stop()
        for thread in threads:
            thread.join()
        if KeyOutcome.UNKNOWN in outcomes:
            return outcomes
        owner.resume()
    raise AssertionError("no put could be interrupted in 20 attempts")


@pytest.mark.engine
@pytest.mark.soak
def test_what_a_failed_put_writes_later_is_never_taken_for_another_object(world: MooncakeStoreWorld) -> None:
    """Goal: no wrong bytes are handed out as right. Method: the owner is stopped in the midst of puts; when they have failed,
    their source is filled with something else, as vLLM reuses blocks; the owner goes on, and at once another client puts into
    the same memory, while Mooncake still sends what it had queued. (Without seals up to 100 of 256 were wrong and DONE.)"""
    owner = world.owner(segment_bytes=SEGMENT_BYTES)
    writer, other, reader = (connected(world) for _ in range(3))
    sources = [memory_for(writer, NUM_KEYS, MIB) for _ in range(NUM_CALLS)]
    labels = [f"innocent/{index}" for index in range(SEGMENT_BYTES // (NUM_KEYS * MIB))]
    innocents = [memory_for(other, NUM_KEYS, MIB) for _ in labels]
    for label, memory in zip(labels, innocents, strict=True):
        memory[:] = values(names(label, NUM_KEYS), MIB)
    target = memory_for(reader, NUM_KEYS, MIB)
    warm = memory_for(other, 1, MIB)
    assert (KeyOutcome.ACCEPTED,) == other.put(["warm"], store_batch_of(warm)).outcomes
    assert (KeyOutcome.DONE,) == reader.get(["warm"], store_batch_of(target[:1])).outcomes
    put_while_stopping(world, writer, owner, sources)
    for source in sources:
        source[:] = 0xEE
    owner.resume()
    for label, memory in zip(labels, innocents, strict=True):
        for _ in range(100):
            if FULL != set(other.put(names(label, NUM_KEYS), store_batch_of(memory)).outcomes):
                break
            world.pass_time(0.05)
    world.pass_time(3.0)
    seen: list[KeyOutcome] = []
    for label in labels:
        keys = names(label, NUM_KEYS)
        answer = reader.get(keys, store_batch_of(target, 4))
        assert answer.outcomes == judged(answer, keys, target)
        seen += answer.outcomes
    logging.info("outcomes of gets: %s", collections.Counter(outcome.value for outcome in seen))
    assert KeyOutcome.DONE in seen
