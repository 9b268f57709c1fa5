"""Every transfer engine keeps the same contract: the one in memory, and real Mooncake between processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.testing.contract_faults import late_bytes_never_land_behind_the_fence
from vllm_mooncake_ascend.testing.contract_world import MIB, Check, registered, whole_batch
from vllm_mooncake_ascend.testing.contracts import TRANSFER_ENGINE_CHECKS
from vllm_mooncake_ascend.testing.memory_world import MemoryWorld
from vllm_mooncake_ascend.testing.mooncake_world import MooncakeWorld
from vllm_mooncake_ascend.types import Outcome

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
