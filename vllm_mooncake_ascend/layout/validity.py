"""What is wrong with a layout in itself, in words: numbers out of range, planes outside their regions, missing ranks.

A remote layout comes from a peer, which may send anything that decodes. What passes here can be calculated with: every
address is inside an announced region and below 2**62, no plane shares bytes with another of its group, the ranks make up
a whole engine. Whether the layout fits another one is the business of `layout.compatibility`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout import overlap
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout
from vllm_mooncake_ascend.layout.regions import RegionMap

_MAX_COUNT = (1 << 31) - 1
_MAX_ADDRESS = (1 << 62) - 1
_SHOWN_CHARS = 80

_RANK_BOUNDS = {"tp_size": (1, limits.MAX_RANKS), "pp_size": (1, limits.MAX_RANKS)}
_GROUP_BOUNDS = {
    "tokens_per_block": (1, _MAX_COUNT),
    "kernel_blocks_per_block": (1, _MAX_COUNT),
    "window_tokens": (0, _MAX_COUNT),
}
_REGION_BOUNDS = {"base_address": (0, _MAX_ADDRESS), "length_bytes": (1, _MAX_ADDRESS)}
_PLANE_BOUNDS = {
    "group_index": (0, limits.MAX_GROUPS - 1),
    "base_address": (0, _MAX_ADDRESS),
    "num_blocks": (1, _MAX_COUNT),
    "tokens_per_block": (1, _MAX_COUNT),
    "first_head": (0, _MAX_COUNT),
    "num_heads": (1, _MAX_COUNT),
    "total_heads": (1, _MAX_COUNT),
    "bytes_per_token_head": (1, _MAX_COUNT),
    "block_stride_bytes": (0, _MAX_ADDRESS),
    "token_stride_bytes": (0, _MAX_ADDRESS),
    "head_stride_bytes": (0, _MAX_ADDRESS),
}


def shown(value: object) -> str:
    """`value` for a message: text bare where it is harmless, everything else escaped, never long."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def flaws(ranks: Sequence[RankLayout]) -> Iterator[str]:
    """Everything wrong with the layout of one engine, all its ranks together; lazily, so that a caller may stop early."""
    if not 1 <= len(ranks) <= limits.MAX_RANKS:
        yield f"{len(ranks)} ranks, must be 1 to {limits.MAX_RANKS}"
        return
    sizes = {(rank.tp_size, rank.pp_size) for rank in ranks}
    if len(sizes) != 1:
        yield "the ranks name different tensor or pipeline parallel sizes"
    if any(rank.groups != ranks[0].groups for rank in ranks):
        yield "the ranks name different KV cache groups"
    places = [(rank.tp_rank, rank.pp_rank) for rank in ranks]
    if len(set(places)) != len(places):
        yield "two ranks have the same place (tensor and pipeline parallel rank)"
    if len(sizes) == 1 and len(ranks) != ranks[0].tp_size * ranks[0].pp_size:
        yield (
            f"{len(ranks)} ranks announced, {shown(ranks[0].tp_size)} x {shown(ranks[0].pp_size)} needed"
            " (tensor x pipeline parallel size)"
        )
    for rank in ranks:
        yield from rank_flaws(rank)


def rank_flaws(rank: RankLayout) -> Iterator[str]:
    """Everything wrong with one rank's layout."""
    what = f"rank (tp {shown(rank.tp_rank)}, pp {shown(rank.pp_rank)})"
    before_numbers = list(_number_flaws(what, rank, _RANK_BOUNDS))
    before_numbers += _list_flaws(what, rank)
    yield from before_numbers
    if before_numbers:
        return
    if not (0 <= rank.tp_rank < rank.tp_size and 0 <= rank.pp_rank < rank.pp_size):
        yield f"{what}: outside the sizes it names ({rank.tp_size} and {rank.pp_size})"
    is_calculable = True
    for flaw in _part_flaws(what, rank):
        is_calculable = False
        yield flaw
    if is_calculable:
        yield from _memory_flaws(what, rank)


def _number_flaws(what: str, value: object, bounds: dict[str, tuple[int, int]]) -> Iterator[str]:
    for name, (lowest, highest) in bounds.items():
        number = getattr(value, name)
        if not lowest <= number <= highest:
            yield f"{what}: {name} is {shown(number)}, must be {lowest} to {highest}"


def _list_flaws(what: str, rank: RankLayout) -> Iterator[str]:
    if not 0 < len(rank.session) <= limits.MAX_ID_CHARS:
        yield f"{what}: session must have 1 to {limits.MAX_ID_CHARS} characters, has {len(rank.session)}"
    counts = (
        ("KV cache groups", len(rank.groups), limits.MAX_GROUPS),
        ("planes", len(rank.planes), limits.MAX_PLANES),
        ("regions", len(rank.regions), limits.MAX_REGIONS),
    )
    for name, count, most in counts:
        if not 1 <= count <= most:
            yield f"{what}: {count} {name}, must be 1 to {most}"
    names = {plane.name for plane in rank.planes}
    if len(names) != len(rank.planes):
        yield f"{what}: two planes have the same name"
    if any(not 0 < len(name) <= limits.MAX_ID_CHARS for name in names):
        yield f"{what}: a plane's name must have 1 to {limits.MAX_ID_CHARS} characters"


def _part_flaws(what: str, rank: RankLayout) -> Iterator[str]:
    for index, group in enumerate(rank.groups):
        yield from _group_flaws(f"{what}, KV cache group {index}", group)
    for index, region in enumerate(rank.regions):
        yield from _number_flaws(f"{what}, region {index}", region, _REGION_BOUNDS)
    for plane in rank.planes:
        plane_what = f"{what}, plane {shown(plane.name)}"
        out_of_range = list(_number_flaws(plane_what, plane, _PLANE_BOUNDS))
        yield from out_of_range or _plane_flaws(plane_what, plane, rank)


def _group_flaws(what: str, group: GroupLayout) -> Iterator[str]:
    out_of_range = list(_number_flaws(what, group, _GROUP_BOUNDS))
    yield from out_of_range
    if not out_of_range and group.tokens_per_block % group.kernel_blocks_per_block:
        yield f"{what}: {group.kernel_blocks_per_block} kernel blocks do not divide {group.tokens_per_block} tokens"
    if group.has_recurrent_state and group.kernel_blocks_per_block != 1:
        yield f"{what}: a recurrent state cannot be cut into {shown(group.kernel_blocks_per_block)} kernel blocks"


def _plane_flaws(what: str, plane: Plane, rank: RankLayout) -> Iterator[str]:
    if plane.group_index >= len(rank.groups):
        yield f"{what}: KV cache group {plane.group_index} of {len(rank.groups)}"
        return
    if plane.first_head + plane.num_heads > plane.total_heads:
        yield f"{what}: heads from {plane.first_head}, {plane.num_heads} of them, of {plane.total_heads}"
    group = rank.groups[plane.group_index]
    if group.has_recurrent_state and plane.tokens_per_block != 1:
        yield f"{what}: a recurrent state has one row a block, this has {plane.tokens_per_block}"
    if group.tokens_per_block % max(1, group.kernel_blocks_per_block * plane.tokens_per_block):
        yield f"{what}: {plane.tokens_per_block} rows do not divide a kernel block of its group"
    if overlap.extent(plane)[1] > _MAX_ADDRESS:
        yield f"{what}: ends at address {overlap.extent(plane)[1]:#x}"


def _memory_flaws(what: str, rank: RankLayout) -> Iterator[str]:
    """Needs numbers in range, so that the calculation means something."""
    regions = RegionMap.of(rank)
    for end_address, next_address in zip(regions.ends, regions.starts[1:], strict=False):
        if next_address < end_address:
            yield f"{what}: the region at {next_address:#x} starts before the one below it ends"
            return
    for plane in rank.planes:
        first_address, end_address = overlap.extent(plane)
        if regions.find(first_address, end_address) is None:
            yield f"{what}, plane {shown(plane.name)}: [{first_address:#x}, {end_address:#x}) is in no region of the rank"
    for group_index in range(len(rank.groups)):
        colliding = overlap.collision(plane for plane in rank.planes if plane.group_index == group_index)
        if colliding is not None:
            yield f"{what}: the planes {shown(colliding[0])} and {shown(colliding[1])} share bytes"
