"""PoolOrders: from the orders of a step to the store calls of one worker, and the plans of those under way.

Every rank loads all blocks of which it holds anything. Of ranks that hold the same bytes each saves a share of the blocks:
those of which it is the writer (`planner.pool_keys.Shard`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from vllm_mooncake_ascend.engines.base import StoreKey
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.layout.ranks import rank_index
from vllm_mooncake_ascend.planner.bounds import CopyBounds
from vllm_mooncake_ascend.planner.pool_keys import Shard, key_prefix, keys_of, shard_name
from vllm_mooncake_ascend.planner.store_batch import ObjectTemplate, StoreBatch, object_template, split_keys, store_batch
from vllm_mooncake_ascend.wire.pool_steps import GroupBlocks, LoadOrder, SaveOrder


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PlannedCall:
    """One get or put: key and block of each object, and its buffers."""

    keys: Sequence[StoreKey]
    block_ids: tuple[int, ...]
    batch: StoreBatch


class PoolOrders:
    """Of the worker with this layout.

    Raises:
        ConfigError: an object would be too long for the store.
    """

    def __init__(self, layout: RankLayout, bounds: CopyBounds | None = None) -> None:
        self.rank = rank_index(layout)
        self._layout = layout
        self._bounds = bounds or CopyBounds()
        self._templates: dict[int, ObjectTemplate] = {}
        """By group; none of a group of which this rank holds no layer."""
        for group_index in range(len(layout.groups)):
            template = object_template(layout, group_index)
            if template is not None:
                self._templates[group_index] = template
        self._names = {group_index: shard_name(layout, group_index) for group_index in self._templates}
        self._shards: dict[int, Shard] = {}
        """This rank's own, by group; empty before `learn`."""

    def learn(self, shards: Sequence[Shard]) -> None:
        """All shards of the engine."""
        mine = {(group_index, name) for group_index, name in self._names.items()}
        self._shards = {
            shard.group_index: shard for shard in shards if (shard.group_index, shard.name) in mine and self.rank in shard.ranks
        }

    def load(self, order: LoadOrder) -> list[PlannedCall]:
        """The gets of an order. None: nothing of it is this rank's.

        Raises:
            LocalProtocolError: a block id or a group is not valid.
        """
        return [call for blocks in order.groups for call in self._calls(order.namespace, blocks)]

    def save(self, order: SaveOrder) -> list[PlannedCall]:
        """The puts of an order. None: nothing of it is this rank's to save.

        Raises:
            LocalProtocolError: a block id or a group is not valid, or the shards of the engine are not known.
        """
        return [call for blocks in order.groups for call in self._calls(order.namespace, self._own_part(blocks))]

    def _own_part(self, blocks: GroupBlocks) -> GroupBlocks:
        if blocks.group_index not in self._templates:
            return blocks
        shard = self._shards.get(blocks.group_index)
        if shard is None:
            name = self._names[blocks.group_index]
            raise LocalProtocolError(
                f"shard {name} of KV cache group {blocks.group_index} at rank {self.rank} is not among those the scheduler sent"
            )
        if len(shard.ranks) == 1:
            return blocks
        pairs = zip(blocks.block_ids, blocks.hashes, strict=True)
        own = [(block_id, block_hash) for block_id, block_hash in pairs if shard.writer(block_hash) == self.rank]
        return GroupBlocks(
            group_index=blocks.group_index,
            block_ids=tuple(block_id for block_id, _ in own),
            hashes=tuple(block_hash for _, block_hash in own),
        )

    def _calls(self, namespace: str, blocks: GroupBlocks) -> Iterator[PlannedCall]:
        if not 0 <= blocks.group_index < len(self._layout.groups):
            raise LocalProtocolError(f"KV cache group {blocks.group_index}, there are {len(self._layout.groups)}")
        if len(blocks.block_ids) != len(blocks.hashes):
            raise LocalProtocolError(f"{len(blocks.block_ids)} blocks with {len(blocks.hashes)} hashes")
        template = self._templates.get(blocks.group_index)
        if template is None or not blocks.block_ids:
            return
        keys = keys_of(key_prefix(namespace, blocks.group_index, self._names[blocks.group_index]), blocks.hashes)
        batch = store_batch(template, blocks.block_ids)
        for part in split_keys(template, len(keys), self._bounds):
            cut = slice(part.start, part.stop)
            yield PlannedCall(
                keys=keys[cut],
                block_ids=blocks.block_ids[cut],
                batch=StoreBatch(addresses=batch.addresses[cut], lengths_bytes=batch.lengths_bytes),
            )
