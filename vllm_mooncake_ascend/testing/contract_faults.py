"""Contract of a transfer engine in trouble: peers that die, stop, restart; the fence; closing."""

from __future__ import annotations

import threading

import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import ReadResult
from vllm_mooncake_ascend.testing.contract_world import (
    KIB,
    MIB,
    Check,
    World,
    content,
    refuses,
    registered,
    runs_batch,
    timed,
    whole_batch,
)
from vllm_mooncake_ascend.testing.memory import address_of, batch_of, pattern, region_of
from vllm_mooncake_ascend.types import Outcome, Session

# --- peers that fail ----------------------------------------------------------------


def nobody_at_the_session_is_a_clean_failure(world: World) -> None:
    """A session where nothing listens: FAILED, not UNKNOWN, within the bound, and again."""
    engine = world.engine()
    local = registered(engine, 4_096)
    batch = batch_of([(address_of(local), 4_096, 8)])
    outcomes = [timed(world, lambda: engine.read(Session("127.0.0.1:9"), batch)).outcome for _ in range(2)]
    assert outcomes == [Outcome.FAILED] * 2
    assert engine.fence()


def remote_memory_outside_the_registered_is_never_done(world: World) -> None:
    """One byte past the peer's region, and memory it never had: not DONE; afterwards good reads work."""
    peer, engine = world.peer(64 * KIB), world.engine()
    local = registered(engine, 64 * KIB)
    past_the_end = runs_batch(local, peer, [(0, 60 * KIB, 4 * KIB + 1)])
    elsewhere = runs_batch(local, peer, [(0, -(1 << 30), 4 * KIB)])
    for batch in (past_the_end, elsewhere):
        assert Outcome.DONE is not timed(world, lambda b=batch: engine.read(peer.session, b)).outcome  # type: ignore[misc]
        assert engine.fence()
    assert Outcome.DONE is engine.read(peer.session, whole_batch(local, peer)).outcome
    assert np.array_equal(content(peer), local)


def one_bad_run_spoils_the_batch(world: World) -> None:
    """One of ten runs is outside the peer's memory: not DONE, whatever of the other nine has landed."""
    peer, engine = world.peer(64 * KIB), world.engine()
    local = registered(engine, 64 * KIB)
    runs = [(4_096 * i, 4_096 * i, 4_096) for i in range(10)]
    runs[4] = (4 * 4_096, 64 * KIB, 4_096)
    assert Outcome.DONE is not timed(world, lambda: engine.read(peer.session, runs_batch(local, peer, runs))).outcome
    assert engine.fence()
    assert np.count_nonzero(local[4 * 4_096 : 5 * 4_096]) == 0
    assert Outcome.DONE is engine.read(peer.session, whole_batch(local, peer)).outcome


def killed_peer_is_never_done(world: World) -> None:
    """A peer we have read from is killed: UNKNOWN within the bound; after the fence a clean and quick FAILED."""
    peer, engine = world.peer(MIB), world.engine()
    local = registered(engine, MIB)
    assert Outcome.DONE is engine.read(peer.session, whole_batch(local, peer)).outcome
    peer.kill()
    assert Outcome.UNKNOWN is timed(world, lambda: engine.read(peer.session, whole_batch(local, peer))).outcome
    assert engine.fence()
    assert Outcome.FAILED is timed(world, lambda: engine.read(peer.session, whole_batch(local, peer))).outcome


def closed_peer_is_never_done(world: World) -> None:
    """A peer closes its engine and lives on: its memory cannot be read any more."""
    peer, engine = world.peer(MIB), world.engine()
    local = registered(engine, MIB)
    assert Outcome.DONE is engine.read(peer.session, whole_batch(local, peer)).outcome
    peer.close_engine()
    assert Outcome.DONE is not timed(world, lambda: engine.read(peer.session, whole_batch(local, peer))).outcome


def restarted_peer_is_read_afresh_after_the_fence(world: World) -> None:
    """A peer comes back with other memory: what we knew of it is of no use, no old byte comes, and it can be read anew."""
    peer, engine = world.peer(MIB), world.engine()
    local = registered(engine, MIB)
    assert Outcome.DONE is engine.read(peer.session, whole_batch(local, peer)).outcome
    old_session, old_batch = peer.session, whole_batch(local, peer)
    peer.kill()
    peer.restart(seed=5)
    assert Outcome.DONE is not timed(world, lambda: engine.read(old_session, old_batch)).outcome
    assert engine.fence()
    assert Outcome.DONE is engine.read(peer.session, whole_batch(local, peer)).outcome
    assert np.array_equal(pattern(5, MIB), local)


def peer_stopped_before_first_contact_is_a_clean_failure(world: World) -> None:
    """A frozen peer that was never read from: FAILED within the bound; another peer can be read at once."""
    frozen, peer, engine = world.peer(MIB), world.peer(MIB), world.engine()
    local = registered(engine, MIB)
    frozen.stop()
    assert Outcome.FAILED is timed(world, lambda: engine.read(frozen.session, whole_batch(local, frozen))).outcome
    assert Outcome.DONE is engine.read(peer.session, whole_batch(local, peer)).outcome
    frozen.resume()


# --- the fence ----------------------------------------------------------------------


def late_bytes_never_land_behind_the_fence(world: World) -> None:
    """The peer is stopped in the midst of a large read and goes on after our fence: not one byte of it lands any more.

    The target is wiped after the fence and watched until Mooncake's own timeouts have passed as well.
    """
    peer, engine = world.peer(limits.MAX_CALL_BYTES), world.engine()
    local = registered(engine, limits.MAX_CALL_BYTES)
    batch = whole_batch(local, peer)
    first = batch_of([(address_of(local), peer.base_address, 8)])
    assert Outcome.DONE is engine.read(peer.session, first).outcome
    local[:] = 0
    result = timed(world, lambda: world.read_while_stopping(engine, peer, batch, local[:: 64 * KIB]))
    assert Outcome.UNKNOWN is result.outcome
    assert engine.fence()
    local[:] = 0
    peer.resume()
    world.pass_time(world.late_watch_s)
    assert np.count_nonzero(local) == 0
    assert Outcome.DONE is engine.read(peer.session, batch).outcome
    assert np.array_equal(content(peer), local)


def fence_leaves_serving_alone(world: World) -> None:
    """Peers go on reading our memory while we fence a failed read of ours."""
    peer, reader, engine = world.peer(MIB), world.peer(MIB, seed=2), world.engine()
    served = pattern(9, 4 * MIB)
    engine.register([region_of(served)])
    local = registered(engine, MIB)
    wait = reader.start_reading(region_of(served), engine.session, 9)
    outside = runs_batch(local, peer, [(0, MIB, 4_096)])
    assert Outcome.DONE is not engine.read(peer.session, outside).outcome
    assert engine.fence()
    assert wait() == []


def fence_without_need_changes_nothing(world: World) -> None:
    """When every read was DONE there is nothing to fence: True, and the next read works."""
    peer, engine = world.peer(MIB), world.engine()
    local = registered(engine, MIB)
    fences = [engine.fence()]
    outcomes = [engine.read(peer.session, whole_batch(local, peer)).outcome]
    fences.append(engine.fence())
    outcomes.append(engine.read(peer.session, whole_batch(local, peer)).outcome)
    assert fences == [True, True]
    assert outcomes == [Outcome.DONE, Outcome.DONE]


# --- closing ------------------------------------------------------------------------


def closed_engine_refuses(world: World) -> None:
    """After close, reads and registrations are refused, and close and fence may come again."""
    peer, engine = world.peer(MIB), world.engine()
    local = registered(engine, MIB)
    engine.close()
    engine.close()
    assert Outcome.REFUSED is engine.read(peer.session, whole_batch(local, peer)).outcome
    assert refuses(lambda: engine.register([region_of(local)]))
    assert engine.fence()


def close_waits_for_a_read_under_way(world: World) -> None:
    """Close comes from another thread while a read hangs on a stopped peer: both end within the bound, late bytes do not."""
    peer, engine = world.peer(MIB), world.engine()
    local = registered(engine, MIB)
    assert Outcome.DONE is engine.read(peer.session, whole_batch(local, peer)).outcome
    peer.stop()
    local[:] = 0
    results: list[ReadResult] = []
    reader = threading.Thread(target=lambda: results.append(engine.read(peer.session, whole_batch(local, peer))), daemon=True)
    reader.start()
    timed(world, engine.close)
    reader.join(world.call_bound_s)
    assert [result.outcome in (Outcome.UNKNOWN, Outcome.REFUSED) for result in results] == [True]
    local[:] = 0
    peer.resume()
    world.pass_time(1.0)
    assert np.count_nonzero(local) == 0


CHECKS: tuple[Check, ...] = (
    nobody_at_the_session_is_a_clean_failure,
    remote_memory_outside_the_registered_is_never_done,
    one_bad_run_spoils_the_batch,
    killed_peer_is_never_done,
    closed_peer_is_never_done,
    restarted_peer_is_read_afresh_after_the_fence,
    peer_stopped_before_first_contact_is_a_clean_failure,
    late_bytes_never_land_behind_the_fence,
    fence_leaves_serving_alone,
    fence_without_need_changes_nothing,
    closed_engine_refuses,
    close_waits_for_a_read_under_way,
)
