"""What two engines must agree on before one reads the other's KV cache; every difference by name.

A fingerprint is a table of short texts: what the connectors know of the model (config, weights, dtypes, the kernel that
decides the order of bytes in a block) and what follows from the layouts. Two engines fit when their tables are equal and
the planes of one can be found on the other. Strides, addresses and numbers of blocks may differ: the planner handles
them. The remote table and layouts are a peer's word: anything in them yields a difference in words, never an exception.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.blocks import tokens_per_row
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout
from vllm_mooncake_ascend.layout.ranks import Holding, holdings, missing_heads
from vllm_mooncake_ascend.layout.validity import flaws, shown

_NOT_YET = "not supported yet"
_UNTOLD = "not told"

_UNEQUAL_NOT_YET = ("tensor parallel size", "pipeline parallel size", "block size")
"""Names (or starts of names) of facts that the planner could bridge and the product does not yet."""


def fingerprint(identity: Mapping[str, str], ranks: Sequence[RankLayout], *, protocol_version: int) -> dict[str, str]:
    """The table a handshake carries.

    Args:
        identity: what makes KV bytes interchangeable beside their layout, named in an operator's words.
        ranks: all ranks of this engine.
        protocol_version: of the side channel; it is one key of the table.
    """
    return {"protocol version": str(protocol_version), **identity, **_layout_facts(ranks)}


def differences(
    local_fingerprint: Mapping[str, str],
    local_ranks: Sequence[RankLayout],
    remote_fingerprint: Mapping[str, str],
    remote_ranks: Sequence[RankLayout],
) -> tuple[str, ...]:
    """Every reason why this engine cannot read KV from that one, in words; empty when it can.

    At most `limits.MAX_DIFFERENCES` of them; the last one then says that there are more.
    """
    found = list(islice(_differences(local_fingerprint, local_ranks, remote_fingerprint, remote_ranks), limits.MAX_DIFFERENCES))
    if len(found) == limits.MAX_DIFFERENCES:
        found[-1] = "and more, not listed"
    return tuple(found)


def meaning(plane: Plane, group: GroupLayout) -> tuple[tuple[str, int], ...]:
    """Named numbers that must be equal on both sides for rows of a plane to be the same thing; strides need not be."""
    named = (
        ("KV cache group", plane.group_index),
        ("KV heads", plane.total_heads),
        ("bytes per token and head", plane.bytes_per_token_head),
    )
    # A state is one row a block however many tokens a block stands for.
    return named if group.has_recurrent_state else (*named, ("tokens per row", tokens_per_row(group, plane)))


def _differences(
    local_fingerprint: Mapping[str, str],
    local_ranks: Sequence[RankLayout],
    remote_fingerprint: Mapping[str, str],
    remote_ranks: Sequence[RankLayout],
) -> Iterator[str]:
    remote_flaws = list(islice(flaws(remote_ranks), limits.MAX_DIFFERENCES))
    # A layout that cannot be trusted says nothing; its fingerprint may still tell why (another protocol version).
    remote_facts = {} if remote_flaws else _layout_facts(remote_ranks)
    local_facts = _layout_facts(local_ranks)
    yield from _table_differences({**local_fingerprint, **local_facts}, {**remote_fingerprint, **remote_facts})
    yield from (f"unusable layout there: {flaw}" for flaw in remote_flaws)
    yield from _not_supported(local_ranks[0].groups)
    if not remote_flaws:
        yield from _plane_differences(holdings(local_ranks), holdings(remote_ranks), local_ranks[0], remote_ranks[0])


def _layout_facts(ranks: Sequence[RankLayout]) -> dict[str, str]:
    """What an operator sets and a layout shows; the same words on both sides. `ranks` has at least one rank."""
    groups = ranks[0].groups
    facts = {
        "tensor parallel size": str(ranks[0].tp_size),
        "pipeline parallel size": str(ranks[0].pp_size),
        "KV cache groups": str(len(groups)),
    }
    for index, group in enumerate(groups):
        of_group = f" of KV cache group {index}" if len(groups) > 1 else ""
        facts[f"block size{of_group}"] = str(group.tokens_per_block)
        facts[f"sliding window{of_group}"] = str(group.window_tokens or "none")
        facts[f"recurrent state{of_group}"] = "yes" if group.has_recurrent_state else "no"
    return facts


def _table_differences(local_facts: Mapping[str, str], remote_facts: Mapping[str, str]) -> Iterator[str]:
    for name in {**local_facts, **remote_facts}:
        local_value = local_facts.get(name, _UNTOLD)
        remote_value = remote_facts.get(name, _UNTOLD)
        if local_value == remote_value:
            continue
        hint = f" (unequal values are {_NOT_YET})" if name.startswith(_UNEQUAL_NOT_YET) else ""
        yield f"{shown(name)}: {shown(local_value)} here, {shown(remote_value)} there{hint}"


def _not_supported(groups: Sequence[GroupLayout]) -> Iterator[str]:
    """What equal engines have alike and the product still cannot transfer."""
    if len(groups) > 1:
        yield f"several KV cache groups ({len(groups)}): {_NOT_YET}"
    for index, group in enumerate(groups):
        if group.has_recurrent_state:
            yield f"recurrent state (KV cache group {index}): {_NOT_YET}"


def _plane_differences(
    local_held: Mapping[str, Sequence[Holding]],
    remote_held: Mapping[str, Sequence[Holding]],
    local_rank: RankLayout,
    remote_rank: RankLayout,
) -> Iterator[str]:
    """Planes by name over all ranks; alike ones in one line, because a model has hundreds."""
    yield from _listed("KV cache planes only here", [name for name in local_held if name not in remote_held])
    yield from _listed("KV cache planes only there", [name for name in remote_held if name not in local_held])
    unlike: dict[str, list[str]] = defaultdict(list)
    for name in local_held:
        for difference in _difference_of_one(local_held[name], remote_held.get(name, ()), local_rank, remote_rank):
            unlike[difference].append(name)
    for difference, names in unlike.items():
        yield from _listed(difference, names)


def _listed(difference: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{difference}: {shown(names[0])}{more}"


def _difference_of_one(
    local_held: Sequence[Holding], remote_held: Sequence[Holding], local_rank: RankLayout, remote_rank: RankLayout
) -> Iterator[str]:
    local_meanings = {meaning(one.plane, local_rank.groups[one.plane.group_index]) for one in local_held}
    remote_meanings = {meaning(one.plane, remote_rank.groups[one.plane.group_index]) for one in remote_held}
    assert len(local_meanings) == 1, "our own ranks cut one plane in two ways"
    if not remote_held:
        return
    if len(remote_meanings) > 1:
        yield "KV cache planes that the ranks there describe differently"
        return
    for (what, local_number), (_, remote_number) in zip(local_meanings.pop(), remote_meanings.pop(), strict=False):
        if local_number != remote_number:
            yield f"{what} {local_number} here, {remote_number} there"
    if any(missing_heads(one.plane, remote_held) for one in local_held):
        yield "KV cache planes with KV heads that no rank there holds"
