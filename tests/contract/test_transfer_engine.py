"""Every transfer engine keeps the same contract: the one in memory, and real Mooncake between processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import numpy as np
import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.testing import contract_faults
from vllm_mooncake_ascend.testing.contract_faults import late_bytes_never_land_behind_the_fence
from vllm_mooncake_ascend.testing.contract_world import MIB, Check, content, registered, whole_batch
from vllm_mooncake_ascend.testing.contracts import TRANSFER_ENGINE_CHECKS
from vllm_mooncake_ascend.testing.memory_world import MemoryWorld
from vllm_mooncake_ascend.testing.mooncake_world import MooncakeWorld
from vllm_mooncake_ascend.types import Outcome

FAULT_CHECKS = [one for one in TRANSFER_ENGINE_CHECKS if one.__module__ == contract_faults.__name__]
LATE_WATCH_S = 10.0
"""Without a fence, late bytes land within a second of the peer's going on."""
LONG_WATCH_S = 35.0
"""Mooncake's TCP transport gives up a transfer without progress after 30 s; by then nothing can land in any case."""


@pytest.fixture
def mooncake_world(mooncake_environment: None) -> Iterator[MooncakeWorld]:
    """Real Mooncake over TCP."""
    world = MooncakeWorld("tcp", late_watch_s=LATE_WATCH_S)
    yield world
    world.close()


def _name(check: Check) -> str:
    return check.__name__


@pytest.mark.parametrize("check", TRANSFER_ENGINE_CHECKS, ids=_name)
def test_memory_engine_keeps_the_contract(check: Check) -> None:
    """Each check of the contract, against engines in memory."""
    check(MemoryWorld())


@pytest.mark.engine
@pytest.mark.parametrize("check", TRANSFER_ENGINE_CHECKS, ids=_name)
def test_mooncake_over_tcp_keeps_the_contract(check: Check, mooncake_world: MooncakeWorld) -> None:
    """Each check of the contract, against the installed Mooncake over TCP between processes."""
    check(mooncake_world)


@pytest.mark.engine
@pytest.mark.parametrize("check", FAULT_CHECKS, ids=_name)
def test_reads_that_are_slept_for_fail_as_the_contract_has_it(
    check: Check, mooncake_world: MooncakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: large reads meet faults as small ones do. Method: the checks with faults, every read of three runs slept for."""
    monkeypatch.setattr(limits, "MIN_SLEPT_READ_BYTES", 0)
    check(mooncake_world)


@pytest.mark.engine
@pytest.mark.parametrize("bad_index", [0, 40, 79])
def test_one_bad_run_fails_a_read_that_is_slept_for(bad_index: int, mooncake_world: MooncakeWorld) -> None:
    """Goal: done means all of it, whichever run fails. Method: one run of eighty beyond the peer's memory."""
    engine, peer = mooncake_world.engine(), mooncake_world.peer(5 * MIB)
    local = registered(engine, 5 * MIB)
    batch = whole_batch(local, peer)
    assert (80, True) == (len(batch), batch.num_bytes >= limits.MIN_SLEPT_READ_BYTES)
    batch.remote_addresses[bad_index] += 1 << 40

    assert engine.read(peer.session, batch).outcome in (Outcome.FAILED, Outcome.UNKNOWN)
    assert engine.fence()
    batch.remote_addresses[bad_index] -= 1 << 40
    assert Outcome.DONE is engine.read(peer.session, batch).outcome
    assert np.array_equal(content(peer), local)


@pytest.mark.engine
def test_a_peer_that_has_none_of_it_fails_a_read_at_once(mooncake_world: MooncakeWorld) -> None:
    """Goal: a wrong layout does not hold up the worker for the time of a call. Method: a thousand runs, all beyond its memory;
    each would fail a second after the other."""
    engine, peer = mooncake_world.engine(), mooncake_world.peer(64 * MIB)
    local = registered(engine, 64 * MIB)
    batch = whole_batch(local, peer)
    batch.remote_addresses[:] += 1 << 40
    started_s = time.monotonic()

    assert engine.read(peer.session, batch).outcome in (Outcome.FAILED, Outcome.UNKNOWN)
    assert time.monotonic() - started_s < mooncake_world.call_bound_s / 2
    assert engine.fence()


@pytest.mark.engine
def test_a_call_that_raises_is_fenced_like_one_of_unknown_outcome(
    mooncake_world: MooncakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Goal: after a bug nothing is taken for quiet. Method: a length that Mooncake does not take, between two reads."""
    engine, peer = mooncake_world.engine(), mooncake_world.peer(MIB)
    local = registered(engine, MIB)
    batch = whole_batch(local, peer)
    assert Outcome.DONE is engine.read(peer.session, batch).outcome
    first = batch.part(0, 1)
    broken = CopyBatch(first.local_addresses, first.remote_addresses, first.lengths_bytes + 0.5)

    with pytest.raises(TypeError):
        engine.read(peer.session, broken)
    with caplog.at_level(logging.INFO):
        assert engine.fence()

    assert "reading engine destroyed" in caplog.text
    assert Outcome.DONE is engine.read(peer.session, batch).outcome


@pytest.mark.soak
@pytest.mark.parametrize("round_index", range(20))
def test_the_fence_of_mooncake_over_tcp_holds_every_time(round_index: int, mooncake_world: MooncakeWorld) -> None:
    """Twenty more interrupted reads, each stopped at another point by chance, and watched for longer."""
    mooncake_world.late_watch_s = LONG_WATCH_S
    late_bytes_never_land_behind_the_fence(mooncake_world)
