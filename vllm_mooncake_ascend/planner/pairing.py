"""Which remote rank serves which part of a local rank, by plane name and KV head.

A head is served by one rank. Among several with copies the choice turns with the local tensor-parallel rank, so that readers
spread over the copies, and a rank reads from its namesake when both engines are cut alike. Both sides come to the same
pairing from the same layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.layout.blocks import tokens_per_row
from vllm_mooncake_ascend.layout.compatibility import meaning
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout
from vllm_mooncake_ascend.layout.ranks import Holding, holders, holdings, narrowed
from vllm_mooncake_ascend.layout.validity import shown


class PlanePair(msgspec.Struct, frozen=True, kw_only=True):
    """The same heads of the same plane on both sides: row by row and head by head, bytes of `source` go to `target`."""

    source_index: int
    """Place of the serving rank in the list given to `pair`."""
    target: Plane
    """The local plane, narrowed to the heads of this pair."""
    source: Plane
    """The remote plane, narrowed to the same heads."""
    tokens_per_row: int


def pair(local: RankLayout, remotes: Sequence[RankLayout]) -> tuple[PlanePair, ...]:
    """Cover every head of every local plane with one remote rank's memory.

    Raises:
        ConfigError: a plane or head is nowhere to be found, or means something else over there.
    """
    held = holdings(remotes)
    pairs: list[PlanePair] = []
    for plane in local.planes:
        pairs.extend(_pairs_of_plane(plane, local, held.get(plane.name, []), remotes))
    return tuple(pairs)


def expected_readers(producers: Sequence[RankLayout], readers: Sequence[RankLayout]) -> tuple[int, ...]:
    """For each producer rank the number of reader ranks that read from it; 0 where others serve its copies."""
    counts = [0] * len(producers)
    for reader in readers:
        for source_index in {found.source_index for found in pair(reader, producers)}:
            counts[source_index] += 1
    return tuple(counts)


def _pairs_of_plane(plane: Plane, local: RankLayout, held: list[Holding], remotes: Sequence[RankLayout]) -> list[PlanePair]:
    pairs: list[PlanePair] = []
    head = plane.first_head
    end_head = plane.first_head + plane.num_heads
    while head < end_head:
        candidates = holders(held, head)
        if not candidates:
            raise ConfigError(
                f"cannot plan reads of plane {shown(plane.name)}: no rank of the peer holds its KV head {head};"
                " both engines must serve the same model, and the peer must announce all its ranks"
            )
        chosen = candidates[local.tp_rank % len(candidates)]
        pair_end_head = min(end_head, chosen.plane.first_head + chosen.plane.num_heads)
        assert pair_end_head > head, "each pair takes at least one head"
        group, remote = local.groups[plane.group_index], remotes[chosen.rank_index]
        _check_same_meaning(plane, group, chosen.plane, remote.groups[chosen.plane.group_index])
        pairs.append(
            PlanePair(
                source_index=chosen.rank_index,
                target=narrowed(plane, head, pair_end_head - head),
                source=narrowed(chosen.plane, head, pair_end_head - head),
                tokens_per_row=tokens_per_row(group, plane),
            )
        )
        head = pair_end_head
    return pairs


def _check_same_meaning(plane: Plane, group: GroupLayout, remote_plane: Plane, remote_group: GroupLayout) -> None:
    """Bytes may move between the two only if a row of a head is the same thing on both sides."""
    here = dict(meaning(plane, group))
    there = dict(meaning(remote_plane, remote_group))
    unlike = [what for what in {**here, **there} if here.get(what) != there.get(what)]
    if unlike:
        reasons = ", ".join(f"{what} {here.get(what, 'none')} here, {there.get(what, 'none')} there" for what in unlike)
        raise ConfigError(
            f"cannot plan reads of plane {shown(plane.name)}: {reasons};"
            " start both engines with the same model and cache settings"
        )
