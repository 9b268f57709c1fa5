"""From blocks to the buffers of store calls: what one put gathers, what one get scatters, and how long each value must be.

The template of a group is found once: its rows in the object's order, neighbours in memory merged. A call only adds block
ids in (numpy, no Python per block); all its objects have as many buffers of the same lengths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from vllm_mooncake_ascend.errors import ConfigError, LocalProtocolError
from vllm_mooncake_ascend.layout.blocks import NULL_BLOCK
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.planner.batch import Addresses
from vllm_mooncake_ascend.planner.bounds import CopyBounds
from vllm_mooncake_ascend.planner.objects import object_rows, planes_of

MAX_VALUE_BYTES = (1 << 31) - 1
"""Mooncake tells the size of a value it got as a 32-bit number (0.3.13)."""
SEAL_BYTES = 8
"""Behind the blocks' bytes where objects are sealed (`engines.sealed_store`): one buffer more of each key."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ObjectTemplate:
    """Buffers of an object in block 0 of one rank and group, in the object's order. All arrays: `[n] int64`."""

    group_index: int
    num_blocks: int
    """Manager blocks; ids are below this."""
    addresses: Addresses
    block_strides_bytes: Addresses
    lengths_bytes: Addresses

    @property
    def value_bytes(self) -> int:
        """Bytes of one object: what every put must hand over and every get must bring."""
        return int(self.lengths_bytes.sum())


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StoreBatch:
    """Buffers of the objects of one call."""

    addresses: Addresses
    """`[num_keys, buffers_per_key] int64`."""
    lengths_bytes: Addresses
    """`[buffers_per_key] int64`, the same for each key."""

    def __len__(self) -> int:
        """Number of keys."""
        return len(self.addresses)

    @property
    def value_bytes(self) -> int:
        return int(self.lengths_bytes.sum())

    def pointers(self) -> list[list[int]]:
        """One list a key, as the multi-buffer calls take it."""
        pointers: list[list[int]] = self.addresses.tolist()
        return pointers

    def sizes(self) -> list[list[int]]:
        """One list a key, parallel to `pointers`."""
        return [self.lengths_bytes.tolist()] * len(self)

    def with_seals(self, addresses: Addresses) -> StoreBatch:
        """The same objects with a seal behind each. `addresses`: `[num_keys] int64`, where the seals are."""
        return StoreBatch(
            addresses=np.concatenate([self.addresses, addresses[:, None]], axis=1),
            lengths_bytes=np.append(self.lengths_bytes, SEAL_BYTES),
        )


def object_template(rank: RankLayout, group_index: int) -> ObjectTemplate | None:
    """Template of a rank's objects of one group, None where it holds no layer of it.

    Raises:
        ConfigError: an object would be too long for the store.
    """
    planes = planes_of(rank, group_index)
    if not planes:
        return None
    rows = object_rows(rank, group_index)
    meets = rows.block_0_addresses[:-1] + rows.lengths_bytes[:-1] == rows.block_0_addresses[1:]
    meets &= rows.block_strides_bytes[:-1] == rows.block_strides_bytes[1:]
    starts = np.flatnonzero(np.concatenate(([True], ~meets)))
    template = ObjectTemplate(
        group_index=group_index,
        num_blocks=min(plane.num_blocks for plane in planes) // rank.groups[group_index].kernel_blocks_per_block,
        addresses=rows.block_0_addresses[starts],
        block_strides_bytes=rows.block_strides_bytes[starts],
        lengths_bytes=np.add.reduceat(rows.lengths_bytes, starts),
    )
    if template.value_bytes + SEAL_BYTES > MAX_VALUE_BYTES:
        raise ConfigError(
            f"one block of KV cache group {group_index} has {template.value_bytes} bytes, an object of the pool can have"
            f" {MAX_VALUE_BYTES - SEAL_BYTES}: use a smaller block size, or more tensor parallel ranks"
        )
    return template


def store_batch(template: ObjectTemplate, block_ids: Sequence[int]) -> StoreBatch:
    """Buffers of one object for each block.

    Raises:
        LocalProtocolError: an id is null, out of range, or there twice (of two equal targets a get fills one).
    """
    ids = np.array(block_ids, dtype=np.int64)
    if len(ids):
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest <= NULL_BLOCK or highest >= template.num_blocks:
            raise LocalProtocolError(
                f"block ids from {lowest} to {highest} in a pool call, there are 1 to {template.num_blocks - 1}"
            )
        if len(np.unique(ids)) != len(ids):
            raise LocalProtocolError("a block is named twice in one pool call")
    addresses = template.addresses[None, :] + ids[:, None] * template.block_strides_bytes[None, :]
    return StoreBatch(addresses=addresses, lengths_bytes=template.lengths_bytes)


def split_keys(template: ObjectTemplate, num_keys: int, bounds: CopyBounds) -> Iterator[range]:
    """Cut so many keys, with their seals, into calls within the bounds on bytes and descriptors; a call takes at least one
    key."""
    by_bytes = bounds.max_call_bytes // (template.value_bytes + SEAL_BYTES)
    by_buffers = bounds.max_call_descriptors // (len(template.addresses) + 1)
    keys_per_call = max(1, min(by_bytes, by_buffers))
    for first in range(0, num_keys, keys_per_call):
        yield range(first, min(first + keys_per_call, num_keys))
