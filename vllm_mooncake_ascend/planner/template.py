"""Byte runs of one piece, found once per peer: what a request later only multiplies its block ids into.

For each plane pair, row and head one run of bytes goes from the remote to the local plane. Runs of planes with the same
strides share one `Runs` value and are merged wherever both ends meet: heads of a token, tokens of a head, values behind
their keys, whole blocks where both layouts are equal. Addresses are those of the first piece of block 0; since all runs of
a value move in step, runs that meet there meet in every block. Merged runs stay inside one region: planes that meet in
every block interleave, so one region holds both (`cover.region_faults` proves it).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import numpy as np

from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.layout.plane import Plane
from vllm_mooncake_ascend.planner.batch import Addresses
from vllm_mooncake_ascend.planner.pairing import PlanePair
from vllm_mooncake_ascend.planner.pieces import GroupGeometry


class Strides(msgspec.Struct, frozen=True, kw_only=True):
    """How far a run moves, per side, from block to block and from slot to slot of a block."""

    local_block_bytes: int
    local_slot_bytes: int
    remote_block_bytes: int
    remote_slot_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """`n` runs of one piece, ascending by local address. All arrays: `[n] int64`."""

    strides: Strides
    local_addresses: Addresses
    remote_addresses: Addresses
    lengths_bytes: Addresses


def find_runs(pairs: Iterable[PlanePair], geometry: GroupGeometry, *, first_token: int) -> tuple[Runs, ...]:
    """Runs of the tokens [first_token, piece_tokens) of a piece, for all `pairs` of one group and one peer rank.

    Raises:
        LocalProtocolError: `first_token` lies inside a row that can only be copied whole.
    """
    by_strides: dict[Strides, list[PlanePair]] = defaultdict(list)
    for pair in pairs:
        by_strides[_strides(pair, geometry)].append(pair)
    return tuple(_runs(strides, alike, geometry, first_token) for strides, alike in by_strides.items())


def rows_of_piece(pair: PlanePair, geometry: GroupGeometry, first_token: int) -> tuple[int, int]:
    """Rows [first, end) of a piece that tokens [first_token, piece_tokens) are in.

    Raises:
        LocalProtocolError: the range starts inside a row.
    """
    if geometry.local.has_recurrent_state:
        return 0, 1
    if first_token % pair.tokens_per_row:
        raise LocalProtocolError(
            f"cannot read from the middle of a block: plane {pair.target.name} moves {pair.tokens_per_row} tokens at once,"
            f" the range starts {first_token % pair.tokens_per_row} tokens into them"
        )
    return first_token // pair.tokens_per_row, geometry.piece_tokens // pair.tokens_per_row


def _strides(pair: PlanePair, geometry: GroupGeometry) -> Strides:
    """A slot stride is 0 where blocks have one slot: planes then share their runs whatever their token strides."""
    rows = rows_of_piece(pair, geometry, 0)[1]
    return Strides(
        local_block_bytes=pair.target.block_stride_bytes,
        local_slot_bytes=rows * pair.target.token_stride_bytes if geometry.local_slots_per_block > 1 else 0,
        remote_block_bytes=pair.source.block_stride_bytes,
        remote_slot_bytes=rows * pair.source.token_stride_bytes if geometry.remote_slots_per_block > 1 else 0,
    )


def _runs(strides: Strides, pairs: list[PlanePair], geometry: GroupGeometry, first_token: int) -> Runs:
    local, remote, lengths = [], [], []
    for pair in pairs:
        first_row, end_row = rows_of_piece(pair, geometry, first_token)
        local.append(_row_addresses(pair.target, first_row, end_row))
        remote.append(_row_addresses(pair.source, first_row, end_row))
        lengths.append(np.full(len(local[-1]), pair.target.bytes_per_token_head, dtype=np.int64))
    return _merged(strides, np.concatenate(local), np.concatenate(remote), np.concatenate(lengths))


def _row_addresses(plane: Plane, first_row: int, end_row: int) -> Addresses:
    """`[rows * heads] int64`: address of each row and head of the first piece of block 0."""
    rows = np.arange(first_row, end_row, dtype=np.int64) * plane.token_stride_bytes
    heads = np.arange(plane.num_heads, dtype=np.int64) * plane.head_stride_bytes
    addresses: Addresses = (plane.base_address + rows[:, None] + heads[None, :]).ravel()
    return addresses


def _merged(strides: Strides, local: Addresses, remote: Addresses, lengths: Addresses) -> Runs:
    """Join runs that follow each other on both sides."""
    order = np.argsort(local, kind="stable")
    local, remote, lengths = local[order], remote[order], lengths[order]
    meets = (local[:-1] + lengths[:-1] == local[1:]) & (remote[:-1] + lengths[:-1] == remote[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~meets)))
    return Runs(strides, local[starts], remote[starts], np.add.reduceat(lengths, starts))
