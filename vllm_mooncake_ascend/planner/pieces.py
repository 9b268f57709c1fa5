"""Where tokens of a request lie on both sides, as arrays of pieces.

The piece of a KV cache group is the largest run of tokens that is never cut by a block's end on either side: the greatest
common divisor of both kernel block sizes, the whole block where they are equal. Piece i of a read lies in the kernel block
`blocks[i]` of a side, `slots[i]` pieces from its start. Alignment is by token position in the tables, so a prefix that is
already here, or block tables of different sizes, need no special care.

A recurrent state has one piece: its newest block on either side.

Bad ids end here: after `find_pieces` every block id is inside the planes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mooncake_ascend.errors import LocalProtocolError, RemoteProtocolError
from vllm_mooncake_ascend.layout.blocks import (
    NULL_BLOCK,
    may_be_null,
    num_blocks_for,
    tokens_per_kernel_block,
    window_start,
)
from vllm_mooncake_ascend.layout.plane import GroupLayout

Ids = npt.NDArray[np.int64]


class ReadRange(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [first_token, end_token) of one request, with the block tables of both sides (per KV cache group, from
    token 0 on). Not trusted: the remote table comes from a peer."""

    first_token: int
    end_token: int
    local_block_ids: Sequence[Sequence[int]]
    remote_block_ids: Sequence[Sequence[int]]


class GroupGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group on both sides."""

    group_index: int
    local: GroupLayout
    remote: GroupLayout
    num_local_blocks: int
    """Manager blocks that every local plane of the group has; ids are below this."""
    num_remote_blocks: int

    @property
    def piece_tokens(self) -> int:
        """Tokens of one piece; for a recurrent state the one row of a block counts as one token."""
        if self.local.has_recurrent_state:
            return 1
        return math.gcd(tokens_per_kernel_block(self.local), tokens_per_kernel_block(self.remote))

    @property
    def local_slots_per_block(self) -> int:
        """Pieces of one local kernel block."""
        return 1 if self.local.has_recurrent_state else tokens_per_kernel_block(self.local) // self.piece_tokens

    @property
    def remote_slots_per_block(self) -> int:
        """Pieces of one remote kernel block."""
        return 1 if self.remote.has_recurrent_state else tokens_per_kernel_block(self.remote) // self.piece_tokens


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where `n` pieces lie on one side. Both arrays: `[n] int64`."""

    blocks: Ids
    """Kernel block ids."""
    slots: Ids
    """Pieces from the start of the block."""

    def offsets_bytes(self, block_stride_bytes: int, slot_stride_bytes: int) -> Ids:
        """Byte offset of each piece from the first piece of block 0."""
        return self.blocks * block_stride_bytes + self.slots * slot_stride_bytes

    def taken(self, index: Ids | slice) -> Places:
        """The places of the given indices, in their order."""
        return Places(self.blocks[index], self.slots[index])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces to copy, ascending by local place: piece i goes from remote place i to local place i."""

    first_token: int
    """Leading tokens of each piece that are not copied; 0 but for a range that starts inside a piece."""
    local: Places
    remote: Places

    def __len__(self) -> int:
        return len(self.local.blocks)

    def taken(self, index: Ids | slice) -> Pieces:
        """The pieces of the given indices, in their order."""
        return Pieces(self.first_token, self.local.taken(index), self.remote.taken(index))


class _Side(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a read, and who is at fault when its block table is wrong."""

    name: str
    group: GroupLayout
    block_ids: Sequence[int]
    num_blocks: int
    fault: type[LocalProtocolError] | type[RemoteProtocolError]


def find_pieces(geometry: GroupGeometry, wanted: ReadRange) -> list[Pieces]:
    """Pieces of one group that hold the wanted tokens: one value, two where the range starts inside a piece, or none.

    The last piece is always whole: what follows the range in it lies in a block that only this request owns.

    Raises:
        LocalProtocolError: the range or our own block table is wrong.
        RemoteProtocolError: the peer's block table is wrong.
        Wrong is: too short, an id out of range or twice, null where KV must be.
    """
    if not 0 <= wanted.first_token <= wanted.end_token:
        raise LocalProtocolError(f"cannot read tokens [{wanted.first_token}, {wanted.end_token}): that is no range")
    if wanted.first_token == wanted.end_token:
        return []
    local, remote = _sides(geometry, wanted)
    if geometry.local.has_recurrent_state:
        return [Pieces(0, _newest(local, wanted.end_token), _newest(remote, wanted.end_token))]
    first_token = _first_token(local, remote, wanted)
    if first_token >= wanted.end_token:
        return []
    piece_tokens = geometry.piece_tokens
    tokens = np.arange(first_token // piece_tokens * piece_tokens, wanted.end_token, piece_tokens, dtype=np.int64)
    pieces = Pieces(0, _places(local, tokens, piece_tokens), _places(remote, tokens, piece_tokens))
    num_skipped_tokens = first_token % piece_tokens
    num_cut = 1 if num_skipped_tokens else 0
    found = [dataclasses.replace(pieces.taken(slice(0, num_cut)), first_token=num_skipped_tokens)] if num_cut else []
    if len(pieces) > num_cut:
        found.append(_in_local_order(pieces.taken(slice(num_cut, None))))
    return found


def _sides(geometry: GroupGeometry, wanted: ReadRange) -> tuple[_Side, _Side]:
    index = geometry.group_index
    for tables, fault in ((wanted.local_block_ids, LocalProtocolError), (wanted.remote_block_ids, RemoteProtocolError)):
        if len(tables) <= index:
            raise fault(f"block tables of {len(tables)} KV cache groups came, there are at least {index + 1}")
    local = _Side(
        name=f"our block table of KV cache group {index}",
        group=geometry.local,
        block_ids=wanted.local_block_ids[index],
        num_blocks=geometry.num_local_blocks,
        fault=LocalProtocolError,
    )
    remote = _Side(
        name=f"the peer's block table of KV cache group {index}",
        group=geometry.remote,
        block_ids=wanted.remote_block_ids[index],
        num_blocks=geometry.num_remote_blocks,
        fault=RemoteProtocolError,
    )
    return local, remote


def _first_token(local: _Side, remote: _Side, wanted: ReadRange) -> int:
    """Where to start once the window is taken into account: see `window_start`; the block it starts in may be null."""
    first_token = window_start(local.group, wanted.first_token, wanted.end_token)
    position = first_token // local.group.tokens_per_block
    if not may_be_null(local.group, position, wanted.end_token):
        return first_token
    next_token = (position + 1) * local.group.tokens_per_block
    remote_positions = slice(
        first_token // remote.group.tokens_per_block, num_blocks_for(next_token, remote.group.tokens_per_block)
    )
    is_null = NULL_BLOCK in local.block_ids[position : position + 1] or NULL_BLOCK in remote.block_ids[remote_positions]
    return next_token if is_null else first_token


def _newest(side: _Side, end_token: int) -> Places:
    """Place of the state after token `end_token - 1`."""
    position = (end_token - 1) // side.group.tokens_per_block
    blocks = _checked_ids(side, position, position + 1)
    return Places(blocks, np.zeros_like(blocks))


def _places(side: _Side, tokens: Ids, piece_tokens: int) -> Places:
    """Place of the piece that starts with each of `tokens` (ascending, multiples of `piece_tokens`)."""
    tokens_per_block = side.group.tokens_per_block
    kernel_tokens = tokens_per_kernel_block(side.group)
    positions = tokens // tokens_per_block
    first_position = int(positions[0])
    block_ids = _checked_ids(side, first_position, int(positions[-1]) + 1)
    blocks = block_ids[positions - first_position] * side.group.kernel_blocks_per_block
    blocks += tokens % tokens_per_block // kernel_tokens
    return Places(blocks, tokens % kernel_tokens // piece_tokens)


def _checked_ids(side: _Side, first_position: int, end_position: int) -> Ids:
    """Block ids at positions [first_position, end_position), each inside the planes, none null, none twice."""
    if len(side.block_ids) < end_position:
        raise side.fault(f"{side.name} has {len(side.block_ids)} blocks, the tokens to read need {end_position}")
    try:
        block_ids = np.array(side.block_ids[first_position:end_position], dtype=np.int64)
    except OverflowError as error:
        raise side.fault(f"{side.name} has an id beyond 64 bits, there are {side.num_blocks} blocks") from error
    lowest, highest = int(block_ids.min()), int(block_ids.max())
    if lowest < 0 or highest >= side.num_blocks:
        raise side.fault(f"{side.name} has ids from {lowest} to {highest}, there are {side.num_blocks} blocks")
    if lowest == NULL_BLOCK:
        position = first_position + int(np.argmin(block_ids))
        raise side.fault(f"{side.name} has the null block at position {position}, where KV is to be read")
    if len(np.unique(block_ids)) != len(block_ids):
        raise side.fault(f"{side.name} names a block twice among positions {first_position} to {end_position - 1}")
    return block_ids


def _in_local_order(pieces: Pieces) -> Pieces:
    """Neighbours in memory become neighbours in the arrays: vLLM hands out freed blocks in falling order. Slots of one block
    are in order already and stay so."""
    return pieces.taken(np.argsort(pieces.local.blocks, kind="stable"))
