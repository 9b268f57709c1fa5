"""The order of bytes inside one stored object: all layers of one block of one KV cache group, as one rank holds them.

An object is a flat string of bytes, so whoever puts and whoever gets it must agree on the order. The order follows memory
as closely as it can, because neighbours then merge into few buffers: layers as announced, in a layer kernel block by kernel
block, in these by address where the parts of the layer lie inside one another, else part by part. Absolute addresses,
padding and numbers of blocks have no influence; where rows or heads are nested otherwise the order differs, and
`order_digest` with it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout
from vllm_mooncake_ascend.planner.batch import Addresses

_ROW_COLUMNS = 4


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ObjectRows:
    """`n` rows of one object in their order: one row of one head of one plane each."""

    identities: npt.NDArray[np.int64]
    """`[n, 4] int64`: plane (index into `planes`), kernel block of the block, global head, row."""
    block_0_addresses: Addresses
    """`[n] int64`: where the row lies in block 0."""
    block_strides_bytes: Addresses
    """`[n] int64`: how far it moves from manager block to manager block."""
    lengths_bytes: Addresses
    """`[n] int64`."""


def planes_of(rank: RankLayout, group_index: int) -> tuple[Plane, ...]:
    """Planes of one group as announced; empty where the rank holds no layer of it."""
    return tuple(plane for plane in rank.planes if plane.group_index == group_index)


def object_rows(rank: RankLayout, group_index: int) -> ObjectRows:
    """All rows of one object of this rank, which holds some layer of the group."""
    group = rank.groups[group_index]
    clusters = [_cluster_rows(first, planes, group) for first, planes in _clusters(planes_of(rank, group_index))]
    assert clusters, "a rank that holds no layer of a group has no objects of it"
    return ObjectRows(
        np.concatenate([rows.identities for rows in clusters]),
        np.concatenate([rows.block_0_addresses for rows in clusters]),
        np.concatenate([rows.block_strides_bytes for rows in clusters]),
        np.concatenate([rows.lengths_bytes for rows in clusters]),
    )


def order_digest(rank: RankLayout, group_index: int) -> bytes:
    """SHA-256 of all that says which bytes an object of this rank has, and in which order."""
    group = rank.groups[group_index]
    digest = hashlib.sha256()
    numbers = [group.tokens_per_block, group.window_tokens, int(group.has_recurrent_state)]
    for plane in planes_of(rank, group_index):
        name = plane.name.encode()
        digest.update(len(name).to_bytes(4, "little") + name)
        numbers += [plane.total_heads, plane.bytes_per_token_head, plane.tokens_per_block, group.kernel_blocks_per_block]
    digest.update(np.array(numbers, dtype="<i8").tobytes())
    digest.update(object_rows(rank, group_index).identities.astype("<i8").tobytes())
    return digest.digest()


def _clusters(planes: Sequence[Plane]) -> Iterator[tuple[int, tuple[Plane, ...]]]:
    """Index of the first plane and the planes of each part of memory that is ordered by address."""
    first = 0
    while first < len(planes):
        end = first + 1
        while end < len(planes) and _layer(planes[end]) == _layer(planes[first]):
            end += 1
        layer = tuple(planes[first:end])
        if _lie_in_one_block(layer):
            yield first, layer
        else:
            yield from ((first + index, (plane,)) for index, plane in enumerate(layer))
        first = end


def _layer(plane: Plane) -> str:
    return plane.name.rpartition("/")[0]


def _lie_in_one_block(planes: Sequence[Plane]) -> bool:
    """Whether the parts of a layer share each of its blocks, so that order by address does not depend on allocation."""
    if len({plane.block_stride_bytes for plane in planes}) > 1:
        return False
    first_address = min(plane.base_address for plane in planes)
    end_address = max(plane.base_address + _block_extent_bytes(plane) for plane in planes)
    return end_address - first_address <= planes[0].block_stride_bytes


def _block_extent_bytes(plane: Plane) -> int:
    """Bytes from the first to the last of one kernel block."""
    last_row_bytes = (plane.tokens_per_block - 1) * plane.token_stride_bytes
    return last_row_bytes + (plane.num_heads - 1) * plane.head_stride_bytes + plane.bytes_per_token_head


def _cluster_rows(first_index: int, planes: Sequence[Plane], group: GroupLayout) -> ObjectRows:
    """Rows of planes that are ordered by address together, kernel block by kernel block."""
    identities, offsets, lengths = [], [], []
    cluster_address = min(plane.base_address for plane in planes)
    for index, plane in enumerate(planes, first_index):
        rows = np.repeat(np.arange(plane.tokens_per_block, dtype=np.int64), plane.num_heads)
        heads = np.tile(np.arange(plane.num_heads, dtype=np.int64), plane.tokens_per_block)
        columns = (np.full_like(rows, index), np.zeros_like(rows), plane.first_head + heads, rows)
        identities.append(np.stack(columns, axis=1))
        in_block = rows * plane.token_stride_bytes + heads * plane.head_stride_bytes
        offsets.append(plane.base_address - cluster_address + in_block)
        lengths.append(np.full_like(rows, plane.bytes_per_token_head))
    order = np.argsort(np.concatenate(offsets), kind="stable")
    block_stride_bytes = planes[0].block_stride_bytes
    kernel_blocks = np.repeat(np.arange(group.kernel_blocks_per_block, dtype=np.int64), len(order))
    one_block = np.concatenate(identities)[order]
    all_identities = np.tile(one_block, (group.kernel_blocks_per_block, 1))
    assert all_identities.shape[1] == _ROW_COLUMNS
    all_identities[:, 1] = kernel_blocks
    addresses = cluster_address + np.tile(np.concatenate(offsets)[order], group.kernel_blocks_per_block)
    return ObjectRows(
        all_identities,
        addresses + kernel_blocks * block_stride_bytes,
        np.full_like(addresses, block_stride_bytes * group.kernel_blocks_per_block),
        np.tile(np.concatenate(lengths)[order], group.kernel_blocks_per_block),
    )
