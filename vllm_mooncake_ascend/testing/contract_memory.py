"""Contract of a transfer engine that meets no trouble: what is copied, what is refused, what may be registered."""

from __future__ import annotations

import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import ReadResult
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.testing.contract_world import (
    KIB,
    MIB,
    Check,
    World,
    content,
    refuses,
    registered,
    runs_batch,
    whole_batch,
)
from vllm_mooncake_ascend.testing.memory import address_of, batch_of, pattern, region_of
from vllm_mooncake_ascend.types import Outcome, Session

# --- reading ------------------------------------------------------------------------


def read_copies_each_run_and_nothing_else(world: World) -> None:
    """Scattered runs of odd lengths arrive at their places; the bytes between them stay as they were."""
    peer, engine = world.peer(64 * KIB), world.engine()
    local = registered(engine, 64 * KIB)
    runs = [(50_000, 7, 13), (0, 4_096, 4_096), (10_001, 60_000, 5_000), (30_000, 1, 1)]
    result = engine.read(peer.session, runs_batch(local, peer, runs))
    expected = np.zeros_like(local)
    for local_offset, remote_offset, length in runs:
        expected[local_offset : local_offset + length] = content(peer)[remote_offset : remote_offset + length]
    assert ReadResult(outcome=Outcome.DONE, reason="") == result
    assert np.array_equal(expected, local)


def read_of_nothing_is_done(world: World) -> None:
    """An empty batch is DONE, whoever the peer is."""
    engine = world.engine()
    assert Outcome.DONE is engine.read(Session("127.0.0.1:9"), batch_of([])).outcome


def ten_thousand_descriptors_arrive(world: World) -> None:
    """10,000 runs of 512 bytes in reverse order, split by the limit of a call, are all right."""
    num_runs, run_bytes = 10_000, 512
    peer, engine = world.peer(num_runs * run_bytes), world.engine()
    local = registered(engine, num_runs * run_bytes)
    runs = [((num_runs - 1 - i) * run_bytes, i * run_bytes, run_bytes) for i in range(num_runs)]
    batch = runs_batch(local, peer, runs)
    outcomes = set()
    for first in range(0, num_runs, limits.MAX_CALL_DESCRIPTORS):
        outcomes.add(engine.read(peer.session, batch.part(first, first + limits.MAX_CALL_DESCRIPTORS)).outcome)
    assert {Outcome.DONE} == outcomes
    assert np.array_equal(content(peer).reshape(num_runs, run_bytes)[::-1].reshape(-1), local)


def largest_call_arrives(world: World) -> None:
    """MAX_CALL_BYTES in MAX_CALL_DESCRIPTORS runs, the most that one call may ask for, arrive whole."""
    peer, engine = world.peer(limits.MAX_CALL_BYTES), world.engine()
    local = registered(engine, limits.MAX_CALL_BYTES)
    assert Outcome.DONE is engine.read(peer.session, whole_batch(local, peer)).outcome
    assert np.array_equal(content(peer), local)


def readers_at_once_all_get_their_bytes(world: World) -> None:
    """Two other processes and we read the same peer at the same time; nobody fails, and all bytes are right."""
    peer, engine = world.peer(8 * MIB), world.engine()
    local = registered(engine, 8 * MIB)
    source = Region(base_address=peer.base_address, length_bytes=peer.num_bytes)
    others = [world.peer(MIB, seed=seed).start_reading(source, peer.session, peer.seed) for seed in (2, 3)]
    ours = [engine.read(peer.session, whole_batch(local, peer)).outcome for _ in range(5)]
    assert [wait() for wait in others] == [[], []]
    assert ours == [Outcome.DONE] * 5
    assert np.array_equal(content(peer), local)


def engine_serves_while_it_reads(world: World) -> None:
    """A peer reads our memory while we read its; both directions are right."""
    peer, engine = world.peer(4 * MIB), world.engine()
    served = pattern(9, 4 * MIB)
    engine.register([region_of(served)])
    local = registered(engine, 4 * MIB)
    wait = peer.start_reading(region_of(served), engine.session, 9)
    ours = [engine.read(peer.session, whole_batch(local, peer)).outcome for _ in range(5)]
    assert wait() == []
    assert ours == [Outcome.DONE] * 5


# --- refusals: our own check says no, and nothing happens ---------------------------


def unregistered_target_is_refused(world: World) -> None:
    """A target that was never registered is refused by us, whether or not the engine would write to it."""
    peer, engine = world.peer(64 * KIB), world.engine()
    keeps_its_address = registered(engine, 64 * KIB)
    stranger = np.zeros(64 * KIB, dtype=np.uint8)
    assert Outcome.REFUSED is engine.read(peer.session, whole_batch(stranger, peer)).outcome
    assert np.count_nonzero(stranger) == np.count_nonzero(keeps_its_address) == 0


def target_across_the_end_of_a_region_is_refused(world: World) -> None:
    """One good run and one that leaves its region by a byte: the whole batch is refused, the good one too."""
    peer, engine = world.peer(64 * KIB), world.engine()
    local = np.zeros(64 * KIB, dtype=np.uint8)
    engine.register([Region(base_address=address_of(local), length_bytes=32 * KIB)])
    batch = runs_batch(local, peer, [(0, 0, 4_096), (28 * KIB, 8_192, 4_097)])
    assert Outcome.REFUSED is engine.read(peer.session, batch).outcome
    assert np.count_nonzero(local) == 0


def calls_above_the_limits_are_refused(world: World) -> None:
    """One descriptor too many, one byte too many: refused, with the limit in the reason."""
    engine = world.engine()
    local = registered(engine, limits.MAX_CALL_BYTES + MIB)
    address = address_of(local)
    many = batch_of([(address + 8 * i, 4_096, 8) for i in range(limits.MAX_CALL_DESCRIPTORS + 1)])
    large = batch_of([(address, 4_096, limits.MAX_CALL_BYTES + 1)])
    results = [engine.read(Session("127.0.0.1:9"), batch) for batch in (many, large)]
    assert [result.outcome for result in results] == [Outcome.REFUSED] * 2
    assert str(limits.MAX_CALL_DESCRIPTORS) in results[0].reason
    assert str(limits.MAX_CALL_BYTES) in results[1].reason


def malformed_sessions_and_addresses_are_refused(world: World) -> None:
    """What a hostile peer may put into its layout raises nothing and asks nobody."""
    engine = world.engine()
    local = registered(engine, 4_096)
    batch = batch_of([(address_of(local), 4_096, 8)])
    sessions = ["", "host", "host:", "host:x", "h o:1", "host:123456", "h\0:1", "h\ud800:1", "é:1", "x" * 600 + ":1"]
    for session in sessions:
        assert Outcome.REFUSED is engine.read(Session(session), batch).outcome, ascii(session)
    negative = batch_of([(address_of(local), -4_096, 8)])
    assert Outcome.REFUSED is engine.read(Session("127.0.0.1:9"), negative).outcome


# --- registering --------------------------------------------------------------------


def register_takes_known_regions_again(world: World) -> None:
    """The same region, a part of it, and a list that names it twice: accepted, and still readable by peers."""
    engine = world.engine()
    served = pattern(3, MIB)
    whole = region_of(served)
    part = Region(base_address=whole.base_address + 4_096, length_bytes=4_096)
    engine.register([whole, part, whole])
    engine.register([whole])
    engine.register([part])
    wait = world.peer(MIB, seed=2).start_reading(whole, engine.session, 3)
    assert wait() == []


def register_refuses_overlap_in_part(world: World) -> None:
    """A region that half overlaps, or swallows, a registered one is refused, and the rest of that list with it."""
    peer, engine = world.peer(64 * KIB), world.engine()
    local = np.zeros(256 * KIB, dtype=np.uint8)
    base = address_of(local)
    engine.register([Region(base_address=base + 64 * KIB, length_bytes=64 * KIB)])
    bystander = Region(base_address=base + 192 * KIB, length_bytes=64 * KIB)
    for offset_kib, length_kib in ((32, 64), (96, 64), (0, 256)):
        clashing = Region(base_address=base + offset_kib * KIB, length_bytes=length_kib * KIB)
        assert refuses(lambda region=clashing: engine.register([bystander, region]))  # type: ignore[misc]
    to_bystander = runs_batch(local, peer, [(192 * KIB, 0, 4_096)])
    assert Outcome.REFUSED is engine.read(peer.session, to_bystander).outcome


def register_refuses_what_is_no_memory_and_too_many(world: World) -> None:
    """Empty regions and more than MAX_REGIONS of them are refused before the engine is asked."""
    engine = world.engine()
    local = np.zeros(4 * KIB * (limits.MAX_REGIONS + 1), dtype=np.uint8)
    base = address_of(local)
    many = [Region(base_address=base + 4 * KIB * i, length_bytes=2 * KIB) for i in range(limits.MAX_REGIONS + 1)]
    for regions in ([Region(base_address=base, length_bytes=0)], [Region(base_address=0, length_bytes=8)], many):
        assert refuses(lambda bad=regions: engine.register(bad))  # type: ignore[misc]
    engine.register(many[:-1])


def memory_registered_after_the_first_read_can_be_read_into(world: World) -> None:
    """Registering goes on after reading has begun."""
    peer, engine = world.peer(MIB), world.engine()
    early = registered(engine, MIB)
    assert Outcome.DONE is engine.read(peer.session, whole_batch(early, peer)).outcome
    late = registered(engine, MIB)
    assert Outcome.DONE is engine.read(peer.session, whole_batch(late, peer)).outcome
    assert np.array_equal(content(peer), late)


CHECKS: tuple[Check, ...] = (
    read_copies_each_run_and_nothing_else,
    read_of_nothing_is_done,
    ten_thousand_descriptors_arrive,
    largest_call_arrives,
    readers_at_once_all_get_their_bytes,
    engine_serves_while_it_reads,
    unregistered_target_is_refused,
    target_across_the_end_of_a_region_is_refused,
    calls_above_the_limits_are_refused,
    malformed_sessions_and_addresses_are_refused,
    register_takes_known_regions_again,
    register_refuses_overlap_in_part,
    register_refuses_what_is_no_memory_and_too_many,
    memory_registered_after_the_first_read_can_be_read_into,
)
