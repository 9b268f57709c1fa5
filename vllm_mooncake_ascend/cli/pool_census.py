"""Whose objects a pool holds: keys counted by namespace. Pure.

All objects of one shard have one size, because each is one block of it, so asking for one of them is enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from vllm_mooncake_ascend.cli.master_http import Segment
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.planner.pool_keys import parse_key


class ShardName(NamedTuple):
    """What all keys of one shard have in common."""

    namespace: str
    group_index: int
    shard: str


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The objects of one shard."""

    num_objects: int
    sample: str
    """Key of one of them."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool holds of one namespace."""

    namespace: str
    num_objects: int
    num_shards: int
    num_bytes: int | None
    """None where the master could not tell the size of some shard."""


class Census(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a pool."""

    num_objects: int
    used_bytes: int
    capacity_bytes: int
    evicted_objects: int
    """Since the master started, as the next one."""
    evicted_bytes: int
    namespaces: tuple[Holding, ...]
    """The largest first."""
    num_others: int
    """Objects whose keys are not ours."""
    segments: tuple[Segment, ...]

    def objects_of(self, namespace: str) -> int:
        """How many objects one namespace has."""
        return sum(holding.num_objects for holding in self.namespaces if holding.namespace == namespace)


def shards_of(keys: Iterable[str]) -> tuple[dict[ShardName, Shard], int]:
    """Our keys by shard, and the number of keys that are not ours."""
    shards: dict[ShardName, Shard] = {}
    num_others = 0
    for text in keys:
        try:
            key = parse_key(text)
        except LocalProtocolError:
            num_others += 1
            continue
        name = ShardName(key.namespace, key.group_index, key.shard)
        known = shards.get(name)
        shards[name] = Shard(num_objects=1 + (known.num_objects if known else 0), sample=known.sample if known else text)
    return shards, num_others


def census(
    shards: Mapping[ShardName, Shard],
    num_others: int,
    *,
    sizes: Mapping[str, int],
    totals: Mapping[str, float],
    segments: tuple[Segment, ...],
) -> Census:
    """Put together what the master told.

    Args:
        sizes: bytes of each shard's sample, as far as known.
        totals: the master's metrics.
    """
    holdings = [_holding(namespace, shards, sizes) for namespace in {name.namespace for name in shards}]
    return Census(
        num_objects=num_others + sum(holding.num_objects for holding in holdings),
        used_bytes=sum(segment.used_bytes for segment in segments),
        capacity_bytes=sum(segment.capacity_bytes for segment in segments),
        evicted_objects=int(totals.get("master_evicted_key_count", 0)),
        evicted_bytes=int(totals.get("master_evicted_size_bytes", 0)),
        namespaces=tuple(sorted(holdings, key=lambda holding: (-holding.num_objects, holding.namespace))),
        num_others=num_others,
        segments=segments,
    )


def _holding(namespace: str, shards: Mapping[ShardName, Shard], sizes: Mapping[str, int]) -> Holding:
    mine = [shard for name, shard in shards.items() if name.namespace == namespace]
    is_known = all(shard.sample in sizes for shard in mine)
    return Holding(
        namespace=namespace,
        num_objects=sum(shard.num_objects for shard in mine),
        num_shards=len(mine),
        num_bytes=sum(shard.num_objects * sizes[shard.sample] for shard in mine) if is_known else None,
    )
