"""Which KV heads and layers a rank holds, and who holds copies.

Heads follow from the tensor-parallel rank by the rule every vLLM model shares: with at least as many heads as ranks each
rank holds an equal run of them, with fewer each head is held by an equal run of ranks. Layers are not calculated at all:
a rank holds the layers whose planes it announces, whatever cut the pipeline stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.layout.plane import Plane, RankLayout


class HeadShare(msgspec.Struct, frozen=True, kw_only=True):
    """The KV heads [first_head, first_head + num_heads) of `total_heads` that one rank holds of a layer."""

    first_head: int
    num_heads: int
    total_heads: int


REPLICATED = HeadShare(first_head=0, num_heads=1, total_heads=1)
"""One head that every rank holds: MLA latents, indexers, anything that tensor parallelism does not cut."""


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's plane, with the rank's place in the list it came from."""

    rank_index: int
    plane: Plane


def rank_index(rank: RankLayout) -> int:
    """A rank's place in the list of all ranks of its engine, pipeline stages outermost."""
    return rank.pp_rank * rank.tp_size + rank.tp_rank


def head_share(total_heads: int, *, tp_rank: int, tp_size: int) -> HeadShare:
    """Heads of one tensor-parallel rank.

    Raises:
        ConfigError: neither of heads and ranks divides the other, so vLLM itself could not have cut the model.
    Source: vLLM 0.32 `QKVParallelLinear` (num_kv_heads, num_kv_head_replicas).
    """
    assert 0 <= tp_rank < tp_size
    if total_heads % tp_size == 0:
        num_heads = total_heads // tp_size
        return HeadShare(first_head=tp_rank * num_heads, num_heads=num_heads, total_heads=total_heads)
    if tp_size % total_heads == 0:
        num_copies = tp_size // total_heads
        return HeadShare(first_head=tp_rank // num_copies, num_heads=1, total_heads=total_heads)
    raise ConfigError(
        f"{total_heads} KV heads cannot be shared by {tp_size} tensor-parallel ranks: one number must divide the other"
    )


def narrowed(plane: Plane, first_head: int, num_heads: int) -> Plane:
    """The same memory seen with fewer heads: global heads [first_head, first_head + num_heads) of `plane`."""
    skipped_heads = first_head - plane.first_head
    assert skipped_heads >= 0
    assert num_heads > 0
    assert skipped_heads + num_heads <= plane.num_heads
    return msgspec.structs.replace(
        plane,
        base_address=plane.base_address + skipped_heads * plane.head_stride_bytes,
        first_head=first_head,
        num_heads=num_heads,
    )


def holdings(ranks: Sequence[RankLayout]) -> dict[str, list[Holding]]:
    """For each plane name who holds (some heads of) it, in the order of `ranks`."""
    found: dict[str, list[Holding]] = defaultdict(list)
    for rank_index, rank in enumerate(ranks):
        for plane in rank.planes:
            found[plane.name].append(Holding(rank_index=rank_index, plane=plane))
    return dict(found)


def holders(held: Iterable[Holding], head: int) -> list[Holding]:
    """Those of `held` that have the global head `head`; more than one hold copies of it."""
    return [one for one in held if one.plane.first_head <= head < one.plane.first_head + one.plane.num_heads]


def missing_heads(plane: Plane, held: Iterable[Holding]) -> list[int]:
    """Global heads of `plane` that nobody in `held` has, ascending; cost is by planes, not by heads a peer claims."""
    missing: list[int] = []
    spans = [(one.plane.first_head, one.plane.first_head + one.plane.num_heads) for one in held]
    for head in range(plane.first_head, plane.first_head + plane.num_heads):
        if not any(first <= head < end for first, end in spans):
            missing.append(head)
    return missing
