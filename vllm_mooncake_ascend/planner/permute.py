"""The fall-back for layouts that would need millions of tiny descriptors: copy whole parts, then permute on the device.

Tokens-major caches cut differently over ranks (Ascend with unequal TP) share only a few hundred bytes at a stretch. Then
each remote block is copied whole, in one run for each part of it, into staging memory, and the device moves rows and heads
from there to their places. Staging memory is small and used again, so such a read is a sequence of rounds; a round's calls
must be done before its permutations, and those before the next round's calls.

Seen as a plane, staging memory has the remote strides inside a block and its own from block to block, so a permutation is
a copy between two planes. `permute` does it in numpy, as the reference for what a device has to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.layout.overlap import block_length_bytes
from vllm_mooncake_ascend.layout.plane import Plane, Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.planner.bounds import CopyBounds
from vllm_mooncake_ascend.planner.instantiate import instantiate, split_calls
from vllm_mooncake_ascend.planner.pairing import PlanePair
from vllm_mooncake_ascend.planner.pieces import GroupGeometry, Ids, Pieces, Places
from vllm_mooncake_ascend.planner.template import Runs, Strides, rows_of_piece
from vllm_mooncake_ascend.types import Session


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Permutation:
    """Copy on the device, for each i: `num_rows` rows of all heads from row `source_rows[i]` of block `source_blocks[i]` of
    `source` (staging) to row `target_rows[i]` of block `target_blocks[i]` of `target` (the cache). All arrays: `[n] int64`.
    """

    source: Plane
    target: Plane
    num_rows: int
    source_blocks: Ids
    source_rows: Ids
    target_blocks: Ids
    target_rows: Ids


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Engine calls, and what the device does when all of them are done (nothing, in a direct plan)."""

    calls: tuple[tuple[Session, CopyBatch], ...]
    permutations: tuple[Permutation, ...]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One run of bytes of each remote block, with the planes it holds."""

    address: int
    """In remote block 0."""
    length_bytes: int
    block_stride_bytes: int
    pairs: tuple[PlanePair, ...]

    @property
    def end_address(self) -> int:
        """Behind the part's last byte in block 0."""
        return self.address + self.length_bytes


def find_parts(pairs: Iterable[PlanePair]) -> tuple[Part, ...] | None:
    """The runs that hold everything the pairs of one peer rank read of a block; None where blocks lie in each other, so that
    no run of a block could be copied without its neighbours'."""
    parts: list[Part] = []
    for pair in sorted(pairs, key=lambda pair: (pair.source.block_stride_bytes, pair.source.base_address)):
        part = Part(
            address=pair.source.base_address,
            length_bytes=block_length_bytes(pair.source),
            block_stride_bytes=pair.source.block_stride_bytes,
            pairs=(pair,),
        )
        if part.length_bytes > part.block_stride_bytes:
            return None
        union = _union(parts[-1], part) if parts else None
        parts[-1:] = [union] if union is not None else [*parts[-1:], part]
    return tuple(parts)


def staged_rounds(
    session: Session,
    parts: Sequence[Part],
    geometry: GroupGeometry,
    pieces: Sequence[Pieces],
    staging: Region,
    bounds: CopyBounds,
) -> Iterator[Round]:
    """Rounds that bring the pieces of one group from one peer rank by way of `staging`, registered local memory.

    Raises:
        ConfigError: not even one block fits into `staging`.
    """
    slot_bytes = sum(part.length_bytes for part in parts)
    num_slots = staging.length_bytes // slot_bytes
    if num_slots == 0:
        raise ConfigError(f"a block of the peer has {slot_bytes} bytes, the staging memory {staging.length_bytes}: enlarge it")
    remote_blocks = np.unique(np.concatenate([one.remote.blocks for one in pieces]))
    for start in range(0, len(remote_blocks), num_slots):
        blocks = remote_blocks[start : start + num_slots]
        whole = Pieces(0, _first_slots(np.arange(len(blocks))), _first_slots(blocks))
        area_address = staging.base_address
        runs: list[Runs] = []
        permutations: list[Permutation] = []
        for part in parts:
            runs.append(_whole_run(part, area_address))
            permutations.extend(_permutations(part, area_address, geometry, pieces, blocks))
            area_address += num_slots * part.length_bytes
        calls = split_calls(instantiate(runs, whole, bounds), bounds)
        yield Round(tuple((session, call) for call in calls), tuple(permutations))


def permute(permutation: Permutation, staging: npt.NDArray[np.uint8], cache: npt.NDArray[np.uint8]) -> None:
    """Carry out a permutation on two memories, each `[bytes] uint8` with address 0 at index 0. The reference, not fast."""
    source, target = permutation.source, permutation.target
    source_bytes = _byte_addresses(source, permutation.source_blocks, permutation.source_rows, permutation.num_rows)
    target_bytes = _byte_addresses(target, permutation.target_blocks, permutation.target_rows, permutation.num_rows)
    cache[target_bytes] = staging[source_bytes]


def _union(before: Part, after: Part) -> Part | None:
    """Both in one run, if they touch and the run stays inside one block (planes of a single block may touch and not be it)."""
    length_bytes = max(before.end_address, after.end_address) - before.address
    is_touching = before.block_stride_bytes == after.block_stride_bytes and after.address <= before.end_address
    if not is_touching or length_bytes > before.block_stride_bytes:
        return None
    return msgspec.structs.replace(before, length_bytes=length_bytes, pairs=before.pairs + after.pairs)


def _first_slots(blocks: Ids) -> Places:
    return Places(blocks, np.zeros_like(blocks))


def _whole_run(part: Part, area_address: int) -> Runs:
    """Remote block -> slot of the part's area of staging memory."""
    strides = Strides(
        local_block_bytes=part.length_bytes,
        local_slot_bytes=0,
        remote_block_bytes=part.block_stride_bytes,
        remote_slot_bytes=0,
    )
    return Runs(strides, np.array([area_address]), np.array([part.address]), np.array([part.length_bytes]))


def _permutations(
    part: Part, area_address: int, geometry: GroupGeometry, pieces: Sequence[Pieces], blocks: Ids
) -> Iterator[Permutation]:
    """What the staged `blocks` (ascending) have to give, pair by pair."""
    for some in pieces:
        here = some.taken(np.flatnonzero(np.isin(some.remote.blocks, blocks)))
        for pair in part.pairs if len(here) else ():
            first_row, end_row = rows_of_piece(pair, geometry, some.first_token)
            yield Permutation(
                source=msgspec.structs.replace(
                    pair.source,
                    base_address=area_address + pair.source.base_address - part.address,
                    block_stride_bytes=part.length_bytes,
                    num_blocks=len(blocks),
                ),
                target=pair.target,
                num_rows=end_row - first_row,
                source_blocks=np.searchsorted(blocks, here.remote.blocks),
                source_rows=here.remote.slots * end_row + first_row,
                target_blocks=here.local.blocks,
                target_rows=here.local.slots * end_row + first_row,
            )


def _byte_addresses(plane: Plane, blocks: Ids, rows: Ids, num_rows: int) -> Ids:
    """`[n, num_rows, heads, bytes] int64`."""
    block_addresses = plane.base_address + blocks * plane.block_stride_bytes + rows * plane.token_stride_bytes
    addresses: Ids = (
        block_addresses[:, None, None, None]
        + (np.arange(num_rows) * plane.token_stride_bytes)[None, :, None, None]
        + (np.arange(plane.num_heads) * plane.head_stride_bytes)[None, None, :, None]
        + np.arange(plane.bytes_per_token_head)[None, None, None, :]
    )
    return addresses
