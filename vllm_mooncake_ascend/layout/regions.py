"""RegionMap: in which registered region of a rank a run of bytes lies."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right

from vllm_mooncake_ascend.layout.plane import RankLayout


@dataclasses.dataclass(frozen=True, slots=True)
class RegionMap:
    """The regions of one rank, ascending; they must not overlap (`layout.validity` sees to it)."""

    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, rank: RankLayout) -> RegionMap:
        """The regions of `rank`, in whatever order it lists them."""
        ordered = sorted(rank.regions, key=lambda region: region.base_address)
        return cls(
            tuple(region.base_address for region in ordered),
            tuple(region.base_address + region.length_bytes for region in ordered),
        )

    def find(self, first_address: int, end_address: int) -> int | None:
        """Index of the one region that holds [first_address, end_address) whole."""
        index = bisect_right(self.starts, first_address) - 1
        return index if index >= 0 and end_address <= self.ends[index] else None
