"""Hypothesis strategies: two engines with one model in their own cuts and layouts, and a read between them;
peers that announce nonsense.

Inner steps are functions of `draw` and the strategies they draw from are made once: half of a test's time would otherwise
go into building strategies.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec
from hypothesis import strategies as st

from vllm_mooncake_ascend.layout.blocks import NULL_BLOCK, num_blocks_for
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.testing.layouts import EngineShape, Kind, LayerShape, Order, Packing, Storage, lay_out

_MAX_TOKENS = 14
_TP_SIZES = {1: (1, 2, 4), 2: (1, 2, 4), 3: (1, 3), 4: (1, 2, 4), 6: (1, 2, 3)}
"""Ways to share so many KV heads, small enough for an oracle that moves single bytes."""

_ORDERS: tuple[Order, ...] = ("tokens_major", "heads_major", "heads_outermost")
_PACKINGS: tuple[Packing, ...] = ("apart", "keys_with_values", "values_after_keys")
_MIXED_KINDS: tuple[Kind, ...] = ("attention", "latent")

_bool = st.booleans()
_one_in_four = st.sampled_from((False, False, False, True))
_heads_and_tp = st.sampled_from(
    [(heads, local, remote) for heads, sizes in _TP_SIZES.items() for local in sizes for remote in sizes]
)
_end_tokens = st.integers(1, _MAX_TOKENS)
_token_fractions = st.integers(0, 12)
_windows = st.integers(1, 9)
_kinds = st.sampled_from(_MIXED_KINDS)
_content_bytes = st.sampled_from([(key, value) for key in (1, 2, 3) for value in (1, 2, 3)])
_kernel_tokens = st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (2, 3), (2, 4), (4, 2), (6, 4), (3, 6), (1, 4)])
_kernel_blocks = st.sampled_from((1, 1, 2))
_storage_kinds = st.sampled_from([(order, packing) for order in _ORDERS for packing in _PACKINGS])
_paddings = st.sampled_from([(0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 2, 0), (0, 0, 3), (1, 2, 1)])
_spare_blocks = st.integers(0, 2)
_stage_cuts = st.integers(0, 5)
_id_orders = st.sampled_from(("rising", "falling", "shuffled"))
_shuffles = st.randoms(use_true_random=False)
_odd_numbers = st.one_of(
    st.integers(-3, 40), st.sampled_from([1 << 31, 1 << 40, (1 << 62) - 1, 1 << 62, (1 << 63) - 1, -(1 << 63), 1 << 64])
)


_Layout = TypeVar("_Layout", bound=msgspec.Struct)


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """One read: every local rank reads tokens [first_token, end_token) from the remote engine."""

    local_ranks: tuple[RankLayout, ...]
    remote_ranks: tuple[RankLayout, ...]
    first_token: int
    end_token: int
    local_block_ids: tuple[tuple[int, ...], ...]
    remote_block_ids: tuple[tuple[int, ...], ...]


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    """What both engines have in common of a KV cache group, and their kernel block sizes (decode, prefill)."""

    is_state: bool
    is_opaque: bool
    window_tokens: int
    kernel_tokens: tuple[int, int]


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    """Any read between two engines that the planner must be able to carry out."""
    groups = _groups(draw)
    total_heads, *tp_sizes = draw(_heads_and_tp)
    model = _model(draw, groups, total_heads)
    end_token = draw(_end_tokens)
    first_token = end_token * draw(_token_fractions) // 12
    first_token -= first_token % math.lcm(*(group.kernel_tokens[0] for group in groups if group.is_opaque))
    local, remote = (
        EngineShape(
            name=name,
            tp_size=tp_sizes[side],
            layers_per_stage=_stages(draw, len(model)),
            storages=tuple(_storage(draw, group, group.kernel_tokens[side], end_token) for group in groups),
            base_address=(1 << 12) * (1 + 5 * side),
            has_common_region=draw(_bool),
        )
        for side, name in enumerate(("decode", "prefill"))
    )
    return Transfer(
        local_ranks=lay_out(model, local),
        remote_ranks=lay_out(model, remote),
        first_token=first_token,
        end_token=end_token,
        local_block_ids=tuple(
            _block_table(draw, storage, _num_dispensable(storage, first_token, end_token), end_token)
            for storage in local.storages
        ),
        remote_block_ids=tuple(
            _block_table(draw, storage, _num_dispensable_remote(storage, local_storage, first_token, end_token), end_token)
            for storage, local_storage in zip(remote.storages, local.storages, strict=True)
        ),
    )


@st.composite
def spoiled_ranks(draw: st.DrawFn, ranks: tuple[RankLayout, ...]) -> tuple[RankLayout, ...]:
    """What a hostile or broken peer may announce: an engine's ranks with one to three odd numbers somewhere."""
    spoiled = list(ranks)
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(spoiled) - 1))
        rank = spoiled[index]
        part = draw(st.sampled_from(("rank", "groups", "planes", "regions")))
        if part == "rank":
            spoiled[index] = _spoiled(draw, rank)
            continue
        members = list(getattr(rank, part))
        member_index = draw(st.integers(0, len(members) - 1))
        members[member_index] = _spoiled(draw, members[member_index])
        spoiled[index] = msgspec.structs.replace(rank, **{part: tuple(members)})
    return tuple(spoiled)


def _spoiled(draw: st.DrawFn, value: _Layout) -> _Layout:
    """The same value with one number replaced by an odd one."""
    numbers = [name for name in value.__struct_fields__ if type(getattr(value, name)) is int]
    return msgspec.structs.replace(value, **{draw(st.sampled_from(numbers)): draw(_odd_numbers)})


def _groups(draw: st.DrawFn) -> list[_Group]:
    """Full attention, perhaps opaque; perhaps a sliding window and a state beside it."""
    groups = [_group(draw, window_tokens=0)]
    if draw(_one_in_four):
        groups.append(_group(draw, window_tokens=draw(_windows)))
    if draw(_one_in_four):
        groups.append(_Group(is_state=True, is_opaque=False, window_tokens=0, kernel_tokens=draw(_kernel_tokens)))
    return groups


def _group(draw: st.DrawFn, window_tokens: int) -> _Group:
    is_opaque = draw(_one_in_four)
    local_tokens, remote_tokens = draw(_kernel_tokens)
    return _Group(
        is_state=False,
        is_opaque=is_opaque,
        window_tokens=window_tokens,
        kernel_tokens=(local_tokens, local_tokens if is_opaque else remote_tokens),
    )


def _model(draw: st.DrawFn, groups: list[_Group], total_heads: int) -> list[LayerShape]:
    """One to two layers a group, those of different groups in turns."""
    layers = []
    for number in range(2):
        for group_index, group in enumerate(groups):
            if number and draw(_bool):
                continue
            kind: Kind = "state" if group.is_state else "opaque" if group.is_opaque else draw(_kinds)
            key_bytes, value_bytes = draw(_content_bytes)
            layers.append(
                LayerShape(
                    name=f"group{group_index}.layer{number}",
                    group_index=group_index,
                    kind=kind,
                    total_heads=total_heads,
                    key_bytes=key_bytes,
                    value_bytes=value_bytes,
                )
            )
    return layers


def _stages(draw: st.DrawFn, num_layers: int) -> tuple[int, ...]:
    """One pipeline stage, or two with at least one layer each."""
    cut = draw(_stage_cuts)
    return (cut, num_layers - cut) if 0 < cut < num_layers else (num_layers,)


def _storage(draw: st.DrawFn, group: _Group, kernel_tokens: int, end_token: int) -> Storage:
    kernel_blocks_per_block = 1 if group.is_state else draw(_kernel_blocks)
    order, packing = draw(_storage_kinds)
    return Storage(
        kernel_tokens=kernel_tokens,
        kernel_blocks_per_block=kernel_blocks_per_block,
        num_blocks=1 + num_blocks_for(end_token, kernel_tokens * kernel_blocks_per_block) + draw(_spare_blocks),
        window_tokens=group.window_tokens,
        has_recurrent_state=group.is_state,
        order=order,
        packing=packing,
        is_interleaved=order != "heads_outermost" and draw(_bool),
        padding_bytes=draw(_paddings),
    )


def _block_table(draw: st.DrawFn, storage: Storage, num_dispensable: int, end_token: int) -> tuple[int, ...]:
    """Ids in any order, sometimes more than needed; positions that nobody needs are null, sometimes."""
    ids = list(range(1, storage.num_blocks))
    order = draw(_id_orders)
    if order == "shuffled":
        draw(_shuffles).shuffle(ids)
    elif order == "falling":
        ids.reverse()
    ids = ids[: num_blocks_for(end_token, storage.layout.tokens_per_block) + draw(_bool)]
    num_nulls = num_dispensable if draw(_bool) else 0
    return (NULL_BLOCK,) * num_nulls + tuple(ids[num_nulls:])


def _num_dispensable(storage: Storage, first_token: int, end_token: int) -> int:
    """Leading positions that a read of the range does not need."""
    tokens_per_block = storage.layout.tokens_per_block
    if storage.has_recurrent_state:
        return (end_token - 1) // tokens_per_block
    num_before = first_token // tokens_per_block
    if not storage.window_tokens:
        return num_before
    return max(num_before, max(0, end_token - storage.window_tokens + 1) // tokens_per_block)


def _num_dispensable_remote(storage: Storage, local_storage: Storage, first_token: int, end_token: int) -> int:
    """As above, but blocks that a wholly filled local block needs are there."""
    if storage.has_recurrent_state:
        return _num_dispensable(storage, first_token, end_token)
    num_local = _num_dispensable(local_storage, first_token, end_token)
    return max(num_local * local_storage.layout.tokens_per_block, first_token) // storage.layout.tokens_per_block
