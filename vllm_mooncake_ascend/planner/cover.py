"""Proof, once per peer, that a plan writes every byte of its target exactly once and touches nothing else.

Shares no calculation with `planner.template`: what must be covered is derived from the local planes anew. It is enough to
look at the first piece of block 0, because all blocks and slots of a plane are that piece moved by the plane's own strides,
and `layout.validity` has shown that these never fall on each other. That no run leaves its region is shown for the lowest
and the highest block and slot that ids can name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vllm_mooncake_ascend.layout.plane import Plane
from vllm_mooncake_ascend.layout.regions import RegionMap
from vllm_mooncake_ascend.planner.batch import Addresses
from vllm_mooncake_ascend.planner.pieces import GroupGeometry
from vllm_mooncake_ascend.planner.template import Runs


def cover_faults(planes: Sequence[Plane], runs: Sequence[Runs], geometry: GroupGeometry) -> Iterator[str]:
    """What is wrong with `runs` (of all sources) as a cover of the local `planes` of one group; nothing when all is well."""
    written_from = np.concatenate([one.local_addresses for one in runs])
    written_to = written_from + np.concatenate([one.lengths_bytes for one in runs])
    written = _joined(written_from, written_to)
    if written is None:
        yield "two runs write the same bytes"
        return
    wanted = [_piece_intervals(plane, geometry) for plane in planes]
    expected = _joined(np.concatenate([one[0] for one in wanted]), np.concatenate([one[1] for one in wanted]))
    if expected is None:
        yield "two local planes hold the same bytes"
        return
    if not all(np.array_equal(one, other) for one, other in zip(written, expected, strict=True)):
        missing_bytes = int((expected[1] - expected[0]).sum() - (written[1] - written[0]).sum())
        yield f"the runs do not cover the planes ({missing_bytes} bytes too few in a piece, or others)"


def region_faults(runs: Sequence[Runs], geometry: GroupGeometry, local: RegionMap, remote: RegionMap) -> Iterator[str]:
    """Runs of one source that can leave the registered memory of a side."""
    for one in runs:
        strides = one.strides
        local_reach_bytes = _reach_bytes(
            geometry.num_local_blocks * geometry.local.kernel_blocks_per_block,
            strides.local_block_bytes,
            geometry.local_slots_per_block,
            strides.local_slot_bytes,
        )
        remote_reach_bytes = _reach_bytes(
            geometry.num_remote_blocks * geometry.remote.kernel_blocks_per_block,
            strides.remote_block_bytes,
            geometry.remote_slots_per_block,
            strides.remote_slot_bytes,
        )
        if not _are_inside(local, one.local_addresses, one.lengths_bytes + local_reach_bytes):
            yield "a run leaves the local regions"
        if not _are_inside(remote, one.remote_addresses, one.lengths_bytes + remote_reach_bytes):
            yield "a run leaves the remote regions"


def _reach_bytes(num_blocks: int, block_bytes: int, num_slots: int, slot_bytes: int) -> int:
    """How far the last piece of the last block is from the first of block 0."""
    return (num_blocks - 1) * block_bytes + (num_slots - 1) * slot_bytes


def _are_inside(regions: RegionMap, addresses: Addresses, lengths_bytes: Addresses) -> bool:
    """Whether each run of bytes lies in one region whole."""
    starts, ends = np.array(regions.starts), np.array(regions.ends)
    index = np.searchsorted(starts, addresses, side="right") - 1
    return bool((index >= 0).all() and (addresses + lengths_bytes <= ends[index]).all())


def _piece_intervals(plane: Plane, geometry: GroupGeometry) -> tuple[Addresses, Addresses]:
    """Start and end of every (row, head) of a plane in the first piece of block 0."""
    num_rows = plane.tokens_per_block // geometry.local_slots_per_block
    row, head = np.divmod(np.arange(num_rows * plane.num_heads, dtype=np.int64), plane.num_heads)
    starts = plane.base_address + head * plane.head_stride_bytes + row * plane.token_stride_bytes
    return starts, starts + plane.bytes_per_token_head


def _joined(starts: Addresses, ends: Addresses) -> tuple[Addresses, Addresses] | None:
    """The same bytes as disjoint intervals with gaps between them; None where two intervals overlap."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    if (starts[1:] < ends[:-1]).any():
        return None
    is_apart = starts[1:] > ends[:-1]
    return starts[np.concatenate(([True], is_apart))], ends[np.concatenate((is_apart, [True]))]
