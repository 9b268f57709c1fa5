"""engines.master_address: when a master's name has come to stand for other machines, and its clients must go after it."""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines import master_address
from vllm_mooncake_ascend.engines.base import StoreHealth
from vllm_mooncake_ascend.engines.master_address import MasterWatch

OLD, NEW, NOT_KNOWN = frozenset({"10.0.0.1"}), frozenset({"10.0.0.2"}), frozenset[str]()
GONE, WELL = StoreHealth.UNREACHABLE, StoreHealth.CONNECTED


class Names:
    """A resolver that says what it is told to, and counts."""

    def __init__(self, answer: frozenset[str]) -> None:
        self.answer = answer
        self.num_asked = 0

    def __call__(self, address: str) -> frozenset[str]:
        assert address == "pool-master:50051"
        self.num_asked += 1
        return self.answer


def watching(names: Names) -> MasterWatch:
    watch = MasterWatch("pool-master:50051", names)
    watch.note_connecting()
    return watch


def looks(watch: MasterWatch, *healths: StoreHealth) -> list[bool]:
    return [watch.is_left_behind(health) for health in healths]


def test_clients_are_left_behind_after_some_looks() -> None:
    """Goal: Mooncake may follow by itself first. Method: the name moves, the master stays away; the clients connect anew."""
    names = Names(OLD)
    watch = watching(names)
    names.answer = NEW
    assert [False] * (limits.PROBES_TO_MOVE - 1) + [True, True] == looks(watch, *[GONE] * (limits.PROBES_TO_MOVE + 1))
    watch.note_connecting()
    assert [False] * limits.PROBES_TO_MOVE == looks(watch, *[GONE] * limits.PROBES_TO_MOVE)


@pytest.mark.parametrize(("first", "later"), [(OLD, OLD), (OLD, NOT_KNOWN), (NOT_KNOWN, NEW)])
def test_nobody_is_left_behind_by_a_name_that_did_not_move(first: frozenset[str], later: frozenset[str]) -> None:
    """Goal: a master that is only away, or a resolver that fails, costs no client. Method: many looks."""
    names = Names(first)
    watch = watching(names)
    names.answer = later
    assert {False} == set(looks(watch, *[GONE] * 3 * limits.PROBES_TO_MOVE))
    assert not watch.has_moved()


def test_looks_count_in_a_row_only() -> None:
    """Goal: a name that went and came back is no move. Method: interrupt one look before the last."""
    names = Names(OLD)
    watch = watching(names)
    for _ in range(3):
        names.answer = NEW
        assert {False} == set(looks(watch, *[GONE] * (limits.PROBES_TO_MOVE - 1)))
        names.answer = OLD
        assert [False] == looks(watch, GONE)


def test_a_client_that_followed_by_itself_is_where_the_name_is_now() -> None:
    """Goal: the next outage is no move. Method: the name moves, the master comes back, goes away again."""
    names = Names(OLD)
    watch = watching(names)
    names.answer = NEW
    looks(watch, GONE, WELL)
    assert {False} == set(looks(watch, *[GONE] * 2 * limits.PROBES_TO_MOVE))


def test_a_healthy_master_is_not_looked_up() -> None:
    """Goal: no cost while all is well. Method: count."""
    names = Names(OLD)
    watch = watching(names)
    looks(watch, *[WELL] * 100, *[StoreHealth.CLOSED] * 100)
    assert 1 == names.num_asked


@pytest.mark.parametrize(
    ("address", "machines"),
    [
        ("127.0.0.1:50051", {"127.0.0.1"}),
        ("[::1]:50051", {"::1"}),
        ("no.such.host.invalid:1", set()),
        ("etcd://127.0.0.1:2379", set()),
        ("127.0.0.1", set()),
        (f"{'x' * 64}.invalid:1", set()),
    ],
)
def test_the_system_resolves_plain_addresses(address: str, machines: set[str]) -> None:
    """Goal: what cannot be resolved is not known, and no error. Method: one of each kind."""
    assert machines == master_address.resolve(address)
