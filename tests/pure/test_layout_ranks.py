"""layout.ranks and layout.families: who holds which heads, and where a tensor's elements are as planes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.layout import families
from vllm_mooncake_ascend.layout.plane import Plane
from vllm_mooncake_ascend.layout.ranks import (
    HeadShare,
    Holding,
    head_share,
    holders,
    holdings,
    missing_heads,
    narrowed,
)
from vllm_mooncake_ascend.testing.strategies import Transfer, transfers


@given(st.integers(1, 64), st.integers(1, 64))
def test_ranks_hold_every_head_equally_often(total_heads: int, tp_size: int) -> None:
    """Goal: heads tile the model, with equal copies where ranks outnumber them. Method: count holders of each head; shapes
    that vLLM itself refuses must be refused."""
    if total_heads % tp_size and tp_size % total_heads:
        with pytest.raises(ConfigError, match="must divide"):
            head_share(total_heads, tp_rank=0, tp_size=tp_size)
        return
    copies: Counter[int] = Counter()
    for tp_rank in range(tp_size):
        share = head_share(total_heads, tp_rank=tp_rank, tp_size=tp_size)
        copies.update(range(share.first_head, share.first_head + share.num_heads))
    assert {head: max(1, tp_size // total_heads) for head in range(total_heads)} == dict(copies)


@given(transfers())
def test_holders_are_the_ranks_whose_planes_have_the_head(transfer: Transfer) -> None:
    """Goal: find copies. Method: search all planes of all ranks."""
    ranks = transfer.remote_ranks
    for name, held in holdings(ranks).items():
        for head in range(held[0].plane.total_heads):
            expected = [
                index
                for index, rank in enumerate(ranks)
                for plane in rank.planes
                if plane.name == name and head in range(plane.first_head, plane.first_head + plane.num_heads)
            ]
            assert expected == [one.rank_index for one in holders(held, head)]


def test_missing_heads_are_those_that_no_rank_holds() -> None:
    """Goal: an incomplete peer is noticed. Method: heads 2 to 5 wanted, 0 to 2 and 5 held."""
    share = HeadShare(first_head=2, num_heads=4, total_heads=8)
    wanted = families.part(_view(np.zeros((1, 1, 4, 1), np.uint8)), "k", share, bytes_per_token_head=1)
    held = [
        Holding(rank_index=index, plane=narrowed(_eight_heads(), first_head, num_heads))
        for index, (first_head, num_heads) in enumerate(((0, 3), (5, 1)))
    ]
    assert [3, 4] == missing_heads(wanted, held)


def test_a_narrowed_plane_sees_the_same_bytes() -> None:
    """Goal: heads keep their addresses. Method: heads 3 and 4 of eight."""
    plane = _eight_heads()
    part = narrowed(plane, 3, 2)
    assert [_address(plane, 1, 0, head) for head in (3, 4)] == [_address(part, 1, 0, head) for head in (0, 1)]


def _view(cache: npt.NDArray[np.uint8]) -> families.CacheView:
    """A view as a connector makes it of a tensor [blocks, tokens, heads, content] in any memory order."""
    return families.CacheView(
        layer_name="layer",
        group_index=0,
        base_address=cache.ctypes.data,
        num_blocks=cache.shape[0],
        tokens_per_block=cache.shape[1],
        block_stride_bytes=cache.strides[0],
        token_stride_bytes=cache.strides[1],
        head_stride_bytes=cache.strides[2],
    )


def _eight_heads() -> Plane:
    share = HeadShare(first_head=0, num_heads=8, total_heads=8)
    return families.part(_view(np.zeros((2, 3, 8, 5), np.uint8)), "k", share, bytes_per_token_head=5)


def _address(plane: Plane, block: int, token: int, head: int) -> int:
    strides = (plane.block_stride_bytes, plane.token_stride_bytes, plane.head_stride_bytes)
    return plane.base_address + block * strides[0] + token * strides[1] + head * strides[2]


def _addresses(tensor: npt.NDArray[np.uint8]) -> list[int]:
    """Address of the first byte of each [block, token, head]."""
    return [tensor[index].ctypes.data for index in np.ndindex(tensor.shape[:3])]


def _plane_addresses(plane: Plane) -> list[int]:
    shape = (plane.num_blocks, plane.tokens_per_block, plane.num_heads)
    return [_address(plane, *index) for index in np.ndindex(shape)]


_SHARE = HeadShare(first_head=4, num_heads=2, total_heads=8)


def test_values_after_keys_are_the_two_halves_of_each_block_and_head() -> None:
    """Goal: [blocks, heads, 2 x tokens, dim]. Method: compare with addresses of numpy's own views of such an array."""
    cache = np.zeros((3, 2, 2 * 4, 6), np.uint8)
    halves = [cache[:, :, :4].transpose(0, 2, 1, 3), cache[:, :, 4:].transpose(0, 2, 1, 3)]
    planes = families.values_after_keys(_view(halves[0]), _SHARE, key_bytes=6, value_bytes=6)
    assert [_addresses(half) for half in halves] == [_plane_addresses(plane) for plane in planes]


def test_keys_with_values_are_the_two_ends_of_each_token_and_head() -> None:
    """Goal: [blocks, tokens, heads, K then V]. Method: as above, with a key longer than the value."""
    cache = np.zeros((3, 4, 2, 5 + 3), np.uint8)
    planes = families.keys_with_values(_view(cache), _SHARE, key_bytes=5, value_bytes=3)
    assert [_addresses(cache[..., :5]), _addresses(cache[..., 5:])] == [_plane_addresses(plane) for plane in planes]


def test_keys_and_values_apart_keep_their_own_tensors() -> None:
    """Goal: Ascend's [2][blocks, tokens, heads, dim]. Method: as above."""
    cache = np.zeros((2, 3, 4, 2, 6), np.uint8)
    planes = families.apart(_view(cache[0]), _view(cache[1]), _SHARE, key_bytes=6, value_bytes=6)
    assert [_addresses(cache[0]), _addresses(cache[1])] == [_plane_addresses(plane) for plane in planes]


def test_an_opaque_block_is_one_row_a_head() -> None:
    """Goal: vLLM's CPU attention moves by (block, head). Method: [blocks, heads, bytes] beside its plane."""
    cache = np.zeros((3, 2, 4 * 12), np.uint8)
    view = _view(cache.reshape(3, 2, 4, 12).transpose(0, 2, 1, 3))
    (plane,) = families.opaque(view, _SHARE, bytes_per_block_head=48)
    assert [cache[index].ctypes.data for index in np.ndindex(3, 2)] == _plane_addresses(plane)
    assert 48 == plane.bytes_per_token_head


def test_a_state_is_one_row_a_block_with_the_page_as_stride() -> None:
    """Goal: conv and SSM states that share a page. Method: the second part of pages of 20 bytes, 2 heads of 4."""
    pages = np.zeros((3, 20), np.uint8)
    state = np.lib.stride_tricks.as_strided(pages[:, 6:], (3, 1, 2, 4), (20, 0, 4, 1))
    plane = families.state(_view(state), "ssm", _SHARE, bytes_per_head=4)
    assert [pages[block].ctypes.data + 6 + 4 * head for block in range(3) for head in range(2)] == _plane_addresses(plane)


def test_a_replicated_row_is_the_one_head_of_every_rank() -> None:
    """Goal: an MLA latent is copied, not cut. Method: look at the heads of its plane."""
    plane = families.replicated(_view(np.zeros((3, 4, 1, 9), np.uint8)), "latent", bytes_per_token=9)
    assert (0, 1, 1, 9) == (plane.first_head, plane.num_heads, plane.total_heads, plane.bytes_per_token_head)
