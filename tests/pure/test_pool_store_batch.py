"""Buffers of store calls: every byte of a block once, neighbours merged, calls within their bounds."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from tests.pure.test_pool_keys import block_rows, plane, rank
from vllm_mooncake_ascend.errors import ConfigError, LocalProtocolError
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.planner.bounds import CopyBounds
from vllm_mooncake_ascend.planner.store_batch import ObjectTemplate, object_template, split_keys, store_batch
from vllm_mooncake_ascend.testing.strategies import Transfer, transfers


def template(layout: RankLayout) -> ObjectTemplate:
    """The template of group 0, which the rank holds."""
    found = object_template(layout, 0)
    assert found is not None
    return found


@settings(max_examples=60)
@given(transfers())
def test_an_object_is_every_byte_of_its_block_once(drawn: Transfer) -> None:
    """Goal: nothing is left out, doubled or taken from elsewhere. Method: byte sets of buffers against those of planes."""
    for layout in drawn.local_ranks:
        for group_index in range(len(layout.groups)):
            found = object_template(layout, group_index)
            if found is None:
                continue
            block_id = found.num_blocks - 1
            batch = store_batch(found, [block_id])
            runs = zip(batch.pointers()[0], batch.sizes()[0], strict=True)
            places = [address + index for address, length in runs for index in range(length)]
            expected = sorted(at for row in block_rows(layout, group_index, block_id).values() for at in row)
            assert expected == sorted(places)
            assert batch.value_bytes == len(places)


def test_layers_of_one_run_each_are_one_buffer_each() -> None:
    """Goal: vLLM's usual layout costs a buffer a layer. Method: two layers of K and V apart, blocks without padding."""
    batch = store_batch(template(rank()), [3, 1])

    assert [[192, 1192, 2192, 3192], [64, 1064, 2064, 3064]] == batch.pointers()
    assert [[64, 64, 64, 64]] * 2 == batch.sizes()
    assert (2, 256) == (len(batch), batch.value_bytes)


def test_layers_that_lie_side_by_side_in_a_block_are_one_buffer() -> None:
    """Goal: layouts with all layers in one block cost a buffer a block. Method: two layers share each block."""
    planes = (plane("layer0/k", 0, block_stride_bytes=128), plane("layer1/k", 64, block_stride_bytes=128))
    batch = store_batch(template(rank(planes=planes)), [2])

    assert ([[256]], [[128]]) == (batch.pointers(), batch.sizes())


def test_kernel_blocks_of_a_block_are_one_buffer() -> None:
    """Goal: a manager block of two kernel blocks is as cheap as one. Method: one plane, kernel blocks behind each other."""
    layout = rank(planes=(plane("layer0/k"),), tokens_per_block=8, kernel_blocks_per_block=2)
    batch = store_batch(template(layout), [1])

    assert ([[128]], [[128]]) == (batch.pointers(), batch.sizes())


def test_a_rank_without_a_layer_of_the_group_has_no_template() -> None:
    """Goal: pipeline stages put what they hold and nothing else. Method: a rank without planes."""
    assert None is object_template(rank(planes=()), 0)


@pytest.mark.parametrize("block_ids", [[0], [5], [1, 2, 1], [-1]])
def test_bad_block_ids_are_refused(block_ids: list[int]) -> None:
    """Goal: no call with the null block, foreign memory or one target twice. Method: one bad list each."""
    with pytest.raises(LocalProtocolError):
        store_batch(template(rank()), block_ids)


def test_an_object_too_long_for_the_store_is_refused_at_start() -> None:
    """Goal: no size that comes back negative. Method: rows of a gigabyte."""
    large = msgspec.structs.replace(rank().planes[0], bytes_per_token_head=1 << 30, head_stride_bytes=1 << 30)
    with pytest.raises(ConfigError, match="smaller block size"):
        object_template(rank(planes=(large,)), 0)


@pytest.mark.parametrize(
    ("max_bytes", "max_buffers", "expected"),
    [(527, 100, [1, 1, 1, 1, 1]), (528, 100, [2, 2, 1]), (10_000, 15, [3, 2]), (10_000, 14, [2, 2, 1]), (10, 1, [1] * 5)],
)
def test_calls_keep_their_bounds_but_take_one_key_at_least(max_bytes: int, max_buffers: int, expected: list[int]) -> None:
    """Goal: calls are short, and always progress. Method: five keys of four buffers and 256 bytes, and a seal each, under five
    bounds."""
    bounds = CopyBounds(max_call_bytes=max_bytes, max_call_descriptors=max_buffers)
    calls = list(split_keys(template(rank()), 5, bounds))
    assert expected == [len(call) for call in calls]
    assert list(range(5)) == [index for call in calls for index in call]


def test_no_block_makes_no_buffers() -> None:
    """Goal: an empty call needs no special care. Method: no ids."""
    batch = store_batch(template(rank()), [])
    assert ([], [], 0) == (batch.pointers(), batch.sizes(), len(batch))
    assert np.int64 == batch.addresses.dtype
