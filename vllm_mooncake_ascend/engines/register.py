"""Our own register of the memory an engine knows: what may be registered, and what a read may write to.

Mooncake's TCP transport reads into memory that was never registered without a word; RDMA and Ascend fail or crash on it.
So the adapter keeps this register and refuses such a read itself, on every transport. No engine, no I/O here.

Rules:
- a region inside a registered one is known already (registering it again does nothing);
- a region that overlaps a registered one only in part, or swallows one, is refused: the engine would refuse it too, and
  guessing which of the two was meant is not ours;
- all regions of one `missing` call are accepted, or none;
- a run must lie inside *one* region: two neighbours are two mappings to the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import EngineError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import Addresses
from vllm_mooncake_ascend.types import Outcome

_MAX_ADDRESS = 1 << 63
"""Addresses travel as int64."""


class MemoryRegister:
    """Registered regions of one engine, disjoint and sorted by address."""

    def __init__(self, *, alignment_bytes: int, max_regions: int = limits.MAX_REGIONS) -> None:
        """`alignment_bytes`: what each region's base address must be a multiple of; 1: anything."""
        assert alignment_bytes >= 1
        self._alignment_bytes = alignment_bytes
        self._max_regions = max_regions
        self._regions: list[Region] = []
        self._set_edges()

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(self._regions)

    def missing(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Those of `regions` that have to be registered with the engine, disjoint and sorted by address.

        Raises:
            EngineError(REFUSED): one of them is malformed or overlaps in part, or there would be too many.
        """
        known = list(self._regions)
        missing: list[Region] = []
        for region in sorted(regions, key=lambda region: (region.base_address, -region.length_bytes)):
            self._check(region)
            clash = next((other for other in known if _overlap(region, other)), None)
            if clash is None:
                known.append(region)
                missing.append(region)
            elif not _inside(region, clash):
                raise _refused(
                    f"{_shown(region)} overlaps the registered {_shown(clash)} in part; register whole storages, merged where "
                    "they overlap"
                )
        if len(known) > self._max_regions:
            raise _refused(
                f"{len(known)} regions would be registered, the limit is {self._max_regions}; register whole storages, "
                "not single layers or blocks"
            )
        return tuple(missing)

    def add(self, regions: Sequence[Region]) -> None:
        """Record regions that `missing` named and that the engine has accepted."""
        merged = sorted([*self._regions, *regions], key=lambda region: region.base_address)
        for left, right in itertools.pairwise(merged):
            assert not _overlap(left, right), "only what `missing` returned may be added, once"
        self._regions = merged
        self._set_edges()

    def first_outside(self, addresses: Addresses, lengths_bytes: Addresses) -> int | None:
        """Index of the first run that does not lie inside one registered region, None if all do.

        Args:
            addresses, lengths_bytes: `[n] int64`; a length below 1 counts as outside.
        """
        if len(addresses) == 0:
            return None
        if not self._regions:
            return 0
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        room_bytes = np.where(index >= 0, self._ends[np.maximum(index, 0)] - addresses, 0)
        outside = (lengths_bytes < 1) | (lengths_bytes > room_bytes)
        return int(np.argmax(outside)) if outside.any() else None

    def _check(self, region: Region) -> None:
        if region.length_bytes < 1 or region.base_address < 1 or region.base_address + region.length_bytes > _MAX_ADDRESS:
            raise _refused(f"{_shown(region)} is not a piece of memory")
        if region.base_address % self._alignment_bytes:
            raise _refused(
                f"{_shown(region)} does not start at a multiple of {self._alignment_bytes} bytes, which this device needs; "
                "allocate the KV cache aligned"
            )

    def _set_edges(self) -> None:
        self._starts = np.array([region.base_address for region in self._regions], dtype=np.int64)
        self._ends = np.array([region.base_address + region.length_bytes for region in self._regions], dtype=np.int64)


def _overlap(left: Region, right: Region) -> bool:
    return (
        left.base_address < right.base_address + right.length_bytes
        and right.base_address < left.base_address + left.length_bytes
    )


def _inside(inner: Region, outer: Region) -> bool:
    return (
        outer.base_address <= inner.base_address
        and inner.base_address + inner.length_bytes <= outer.base_address + outer.length_bytes
    )


def _shown(region: Region) -> str:
    return f"region [{region.base_address:#x}, +{region.length_bytes} bytes]"


def _refused(reason: str) -> EngineError:
    return EngineError(f"registering memory with the transfer engine: {reason}", outcome=Outcome.REFUSED)
