"""Every store keeps the same contract: the one in memory, and real Mooncake between processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_mooncake_ascend.testing import store_contract_seals
from vllm_mooncake_ascend.testing.memory_store_world import MemoryStoreWorld
from vllm_mooncake_ascend.testing.mooncake_store_world import MooncakeStoreWorld
from vllm_mooncake_ascend.testing.store_contract_data import values_go_in_and_come_out
from vllm_mooncake_ascend.testing.store_contract_faults import late_bytes_never_land_behind_the_fence
from vllm_mooncake_ascend.testing.store_contracts import KV_STORE_CHECKS, SEALED_STORE_CHECKS
from vllm_mooncake_ascend.testing.store_world import StoreCheck

LATE_WATCH_S = 2.0
"""Without a fence, late bytes land within a third of a second of the owner's going on."""


@pytest.fixture
def mooncake_world(mooncake_environment: None) -> Iterator[MooncakeStoreWorld]:
    """Real Mooncake over TCP."""
    world = MooncakeStoreWorld(late_watch_s=LATE_WATCH_S)
    yield world
    world.close()


@pytest.fixture
def sealed_world(mooncake_environment: None) -> Iterator[MooncakeStoreWorld]:
    """The same with seals."""
    world = MooncakeStoreWorld(late_watch_s=LATE_WATCH_S, is_sealed=True)
    yield world
    world.close()


LONG_CHECKS = {late_bytes_never_land_behind_the_fence}
"""A get from a stopped owner ends after 60 s; no setting of Mooncake makes that shorter."""


def _name(check: StoreCheck) -> str:
    return check.__name__


@pytest.mark.parametrize("check", KV_STORE_CHECKS, ids=_name)
def test_memory_store_keeps_the_contract(check: StoreCheck) -> None:
    """Each check of the contract, against clients in memory."""
    check(MemoryStoreWorld())


@pytest.mark.parametrize("check", SEALED_STORE_CHECKS, ids=_name)
def test_sealed_memory_store_keeps_the_contract(check: StoreCheck) -> None:
    """Each check of the contract, and those of seals, against sealed clients in memory."""
    check(MemoryStoreWorld(is_sealed=True))


@pytest.mark.engine
@pytest.mark.parametrize("check", [values_go_in_and_come_out, *store_contract_seals.CHECKS], ids=_name)
def test_sealed_mooncake_store_keeps_the_contract(check: StoreCheck, sealed_world: MooncakeStoreWorld) -> None:
    """What seals are for, against the installed Mooncake, and one check of the rest, which seals do not touch."""
    check(sealed_world)


@pytest.mark.engine
@pytest.mark.parametrize(
    "check",
    [pytest.param(one, marks=[pytest.mark.soak] if one in LONG_CHECKS else []) for one in KV_STORE_CHECKS],
    ids=_name,
)
def test_mooncake_store_keeps_the_contract(check: StoreCheck, mooncake_world: MooncakeStoreWorld) -> None:
    """Each check of the contract, against the installed Mooncake: a master and clients on loopback, a process each."""
    check(mooncake_world)
