"""The adapter's own register of memory, against an oracle that looks at every byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.engines.register import MemoryRegister
from vllm_mooncake_ascend.errors import EngineError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.types import Outcome

SMALL_REGION = st.builds(Region, base_address=st.integers(1, 60), length_bytes=st.integers(1, 12))


def bytes_of(region: Region) -> set[int]:
    return set(range(region.base_address, region.base_address + region.length_bytes))


def take(register: MemoryRegister, regions: list[Region]) -> bool:
    """Register as the engine does. False: refused."""
    try:
        register.add(register.missing(regions))
    except EngineError as error:
        return error.outcome is not Outcome.REFUSED
    return True


@given(calls=st.lists(st.lists(SMALL_REGION, max_size=4), max_size=6))
def test_a_call_is_taken_whole_or_not_at_all_by_its_overlaps(calls: list[list[Region]]) -> None:
    """Oracle: byte sets. A region is welcome when it is new, or inside one that is known or comes in the same call."""
    register = MemoryRegister(alignment_bytes=1)
    known: list[Region] = []
    for regions in calls:
        candidates = [*known]
        is_good = True
        for region in sorted(regions, key=lambda r: (r.base_address, -r.length_bytes)):
            touching = [other for other in candidates if bytes_of(region) & bytes_of(other)]
            if not touching:
                candidates.append(region)
            elif not any(bytes_of(region) <= bytes_of(other) for other in touching):
                is_good = False
        assert is_good == take(register, regions)
        known = candidates if is_good else known
        assert sorted(known, key=lambda r: r.base_address) == list(register.regions)


@given(
    regions=st.lists(SMALL_REGION, max_size=5), runs=st.lists(st.tuples(st.integers(0, 80), st.integers(-1, 15)), max_size=8)
)
def test_the_first_run_outside_is_found(regions: list[Region], runs: list[tuple[int, int]]) -> None:
    """Oracle: a run is inside when all its bytes are in one region; lengths below 1 never are."""
    register = MemoryRegister(alignment_bytes=1)
    for region in regions:
        take(register, [region])

    def is_inside(run: tuple[int, int]) -> bool:
        address, length = run
        return length > 0 and any(set(range(address, address + length)) <= bytes_of(region) for region in register.regions)

    expected = next((index for index, run in enumerate(runs) if not is_inside(run)), None)
    table = np.array(runs, dtype=np.int64).reshape(-1, 2)
    assert expected == register.first_outside(table[:, 0], table[:, 1])


def test_a_run_across_two_neighbours_is_outside() -> None:
    """Two regions that touch are two mappings to a device, even if the bytes are all registered."""
    register = MemoryRegister(alignment_bytes=1)
    assert take(register, [Region(base_address=100, length_bytes=10), Region(base_address=110, length_bytes=10)])
    assert register.first_outside(np.array([105]), np.array([10])) == 0


def test_a_base_that_is_not_aligned_is_refused() -> None:
    """HCCS maps 2 MiB pages."""
    register = MemoryRegister(alignment_bytes=2 << 20)
    assert take(register, [Region(base_address=4 << 20, length_bytes=5)])
    assert not take(register, [Region(base_address=(8 << 20) + 64, length_bytes=5)])


@pytest.mark.parametrize(("base_address", "length_bytes"), [(0, 8), (-8, 8), (8, 0), (8, -1), ((1 << 63) - 4, 8)])
def test_what_is_no_memory_is_refused(base_address: int, length_bytes: int) -> None:
    """Null, negative, empty, beyond what an int64 address holds."""
    assert not take(MemoryRegister(alignment_bytes=1), [Region(base_address=base_address, length_bytes=length_bytes)])


def test_one_region_too_many_is_refused() -> None:
    """The device has a fixed number of mappings; those already there count."""
    register = MemoryRegister(alignment_bytes=1, max_regions=2)
    assert take(register, [Region(base_address=10 * i, length_bytes=5) for i in (1, 2)])
    assert not take(register, [Region(base_address=50, length_bytes=5)])
    assert take(register, [Region(base_address=11, length_bytes=2)])
