"""layout.overlap and layout.validity: what is wrong with a layout in itself is told in words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.overlap import collision
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region
from vllm_mooncake_ascend.layout.validity import flaws, shown
from vllm_mooncake_ascend.testing.strategies import Transfer, transfers

_small = st.integers(0, 12)
_counts = st.integers(1, 3)


def _plane(**changes: Any) -> Plane:
    plane = Plane(
        name="layer/k",
        group_index=0,
        base_address=100,
        num_blocks=2,
        tokens_per_block=4,
        first_head=0,
        num_heads=1,
        total_heads=1,
        bytes_per_token_head=2,
        block_stride_bytes=8,
        token_stride_bytes=2,
        head_stride_bytes=2,
    )
    return msgspec.structs.replace(plane, **changes)


def _rank(*planes: Plane, **changes: Any) -> RankLayout:
    group = GroupLayout(tokens_per_block=4, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
    rank = RankLayout(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        session="host:1",
        groups=(group,),
        planes=planes or (_plane(),),
        regions=(Region(base_address=100, length_bytes=16),),
    )
    return msgspec.structs.replace(rank, **changes)


def _bytes_of(plane: Plane) -> list[int]:
    return [
        plane.base_address
        + block * plane.block_stride_bytes
        + token * plane.token_stride_bytes
        + head * plane.head_stride_bytes
        + index
        for block in range(plane.num_blocks)
        for token in range(plane.tokens_per_block)
        for head in range(plane.num_heads)
        for index in range(plane.bytes_per_token_head)
    ]


_any_planes = st.builds(
    _plane,
    base_address=_small,
    num_blocks=_counts,
    tokens_per_block=_counts,
    num_heads=_counts,
    bytes_per_token_head=_counts,
    block_stride_bytes=_small,
    token_stride_bytes=_small,
    head_stride_bytes=_small,
)


@settings(max_examples=300)
@given(st.lists(_any_planes, min_size=1, max_size=3))
def test_planes_found_apart_share_no_byte(planes: list[Plane]) -> None:
    """Goal: never call planes apart that are not. Method: any small strides at all, against the set of all bytes."""
    taken = [address for plane in planes for address in _bytes_of(plane)]
    if len(set(taken)) != len(taken):
        assert collision(planes) is not None


@given(transfers())
def test_layouts_of_real_caches_have_no_flaw(transfer: Transfer) -> None:
    """Goal: no false alarm for any cut, order, packing or padding. Method: all layouts the strategies can make."""
    assert [] == list(flaws(transfer.local_ranks))
    assert [] == list(flaws(transfer.remote_ranks))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_address": -1}, "base_address is -1"),
        ({"num_blocks": 1 << 40}, "num_blocks is 1099511627776"),
        ({"token_stride_bytes": -2}, "token_stride_bytes is -2"),
        ({"block_stride_bytes": 1 << 61}, "is in no region"),
        ({"block_stride_bytes": (1 << 62) - 1, "num_blocks": 1 << 30}, "ends at address"),
        ({"base_address": 101}, "is in no region"),
        ({"base_address": 99}, "is in no region"),
        ({"num_blocks": 3}, "is in no region"),
        ({"first_head": 1}, "heads from 1, 1 of them, of 1"),
        ({"group_index": 1}, "KV cache group 1 of 1"),
        ({"tokens_per_block": 3}, "3 rows do not divide"),
        ({"block_stride_bytes": 6}, "share bytes"),
    ],
)
def test_a_plane_that_cannot_be_is_named(changes: dict[str, int], words: str) -> None:
    """Goal: hostile or broken planes end as words. Method: one wrong number at a time in a good layout."""
    assert words in "; ".join(flaws([_rank(_plane(**changes))]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tp_rank": 1}, "outside the sizes it names"),
        ({"tp_size": 0}, "tp_size is 0"),
        ({"tp_size": 2}, "1 ranks announced, 2 x 1 needed"),
        ({"session": ""}, "session must have"),
        ({"planes": ()}, "0 planes"),
        ({"planes": (_plane(), _plane(base_address=108, num_blocks=1))}, "the same name"),
        ({"regions": ()}, "0 regions"),
        ({"regions": (Region(base_address=100, length_bytes=16), Region(base_address=110, length_bytes=1))}, "starts before"),
        ({"regions": (Region(base_address=1 << 62, length_bytes=16),)}, "base_address is 4611686018427387904"),
    ],
)
def test_a_rank_that_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    """Goal: hostile or broken ranks end as words. Method: one wrong thing at a time in a good layout."""
    assert words in "; ".join(flaws([_rank(**changes)]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens_per_block": 0}, "tokens_per_block is 0"),
        ({"kernel_blocks_per_block": 3}, "3 kernel blocks do not divide 4 tokens"),
        ({"has_recurrent_state": True}, "a recurrent state has one row a block, this has 4"),
    ],
)
def test_a_group_that_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    """Goal: hostile or broken groups end as words. Method: one wrong thing at a time in a good layout."""
    rank = _rank()
    group = msgspec.structs.replace(rank.groups[0], **changes)
    assert words in "; ".join(flaws([msgspec.structs.replace(rank, groups=(group,))]))


def test_ranks_that_do_not_make_up_an_engine_are_named() -> None:
    """Goal: no plan against half an engine. Method: two ranks in one place, with other groups and sizes."""
    one = _rank(tp_size=2)
    other = _rank(tp_size=3, groups=(msgspec.structs.replace(one.groups[0], window_tokens=7),))
    found = "; ".join(flaws([one, other]))
    assert "the same place" in found
    assert "different KV cache groups" in found
    assert "different tensor or pipeline parallel sizes" in found


def test_no_ranks_and_too_many_are_named() -> None:
    """Goal: the number of ranks is bounded. Method: none, and one more than the limit."""
    assert ["0 ranks, must be 1 to 1024"] == list(flaws([]))
    assert ["1025 ranks, must be 1 to 1024"] == list(flaws([_rank()] * (limits.MAX_RANKS + 1)))


def test_what_a_peer_sent_is_shown_short_and_harmless() -> None:
    """Goal: no control characters and no megabytes in a log. Method: a long name with a newline."""
    assert "'a\\nb'" == shown("a\nb")
    assert 80 == len(shown("x" * 5000))
