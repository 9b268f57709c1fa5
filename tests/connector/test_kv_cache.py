"""KV caches of every kind vLLM can build, against hand-computed planes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_mooncake_ascend.connectors import kv_cache  # noqa: E402
from vllm_mooncake_ascend.errors import ConfigError  # noqa: E402
from vllm_mooncake_ascend.layout.plane import RankLayout  # noqa: E402

NUM_BLOCKS, TOKENS, HEADS, DIM = 5, 32, 2, 64
RANK = kv_cache.RankNumbers(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)


def full_attention() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)


def config(*specs: object) -> KVCacheConfig:
    groups = [KVCacheGroupSpec(layer_names=[f"layer{index}"], kv_cache_spec=spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def read(caches: dict[str, object], cache_config: KVCacheConfig, *, device: str, rank: object = RANK) -> RankLayout:
    return kv_cache.read_rank_layout(caches, cache_config, rank=rank, total_heads=HEADS, device_type=device, session="here:1")


def test_cpu_attention_is_one_opaque_row_per_block_and_head() -> None:
    """Goal: CPU attention moves whole (block, head) rows. Method: vLLM's own tensor shape, strides by hand."""
    cache = torch.zeros(NUM_BLOCKS, HEADS, TOKENS, 2 * DIM)

    layout = read({"layer0": cache}, config(full_attention()), device="cpu")

    (plane,) = layout.planes
    row_bytes = TOKENS * 2 * DIM * 4
    assert (cache.data_ptr(), 1, HEADS, row_bytes) == (
        plane.base_address,
        plane.tokens_per_block,
        plane.num_heads,
        plane.bytes_per_token_head,
    )
    assert (HEADS * row_bytes, row_bytes) == (plane.block_stride_bytes, plane.head_stride_bytes)
    assert [(cache.untyped_storage().data_ptr(), cache.untyped_storage().nbytes())] == [
        (region.base_address, region.length_bytes) for region in layout.regions
    ]


def test_accelerator_attention_keeps_single_tokens_apart() -> None:
    """Goal: where a token's bytes stand alone the plane says so. Method: heads-major and tokens-major memory of one shape."""
    heads_major = torch.zeros(NUM_BLOCKS, HEADS, TOKENS, 2 * DIM)
    tokens_major = torch.zeros(NUM_BLOCKS, TOKENS, HEADS, 2 * DIM).permute(0, 2, 1, 3)

    first = read({"layer0": heads_major}, config(full_attention()), device="cuda").planes[0]
    second = read({"layer0": tokens_major}, config(full_attention()), device="cuda").planes[0]

    content_bytes = 2 * DIM * 4
    assert (TOKENS, content_bytes, content_bytes, TOKENS * content_bytes) == (
        first.tokens_per_block,
        first.bytes_per_token_head,
        first.token_stride_bytes,
        first.head_stride_bytes,
    )
    assert (HEADS * content_bytes, content_bytes) == (second.token_stride_bytes, second.head_stride_bytes)


def test_ascend_tuples_are_two_planes() -> None:
    """Goal: vllm-ascend's (k, v) become planes k and v with their own strides. Method: padded blocks, strides by hand."""
    padded_block = TOKENS * HEADS * DIM + 64
    raw = [torch.zeros(NUM_BLOCKS * padded_block, dtype=torch.float16) for _ in range(2)]
    key, value = (part.as_strided((NUM_BLOCKS, TOKENS, HEADS, DIM), (padded_block, HEADS * DIM, DIM, 1)) for part in raw)

    layout = read({"layer0": (key, value)}, config(full_attention()), device="npu")

    assert ["layer0/k", "layer0/v"] == [plane.name for plane in layout.planes]
    assert [key.data_ptr(), value.data_ptr()] == [plane.base_address for plane in layout.planes]
    assert {(padded_block * 2, HEADS * DIM * 2, DIM * 2)} == {
        (plane.block_stride_bytes, plane.token_stride_bytes, plane.head_stride_bytes) for plane in layout.planes
    }
    assert 2 == len(layout.regions)


def test_tensors_with_keys_and_values_outermost_are_two_planes() -> None:
    """Goal: vLLM before 0.29 on accelerators. Method: one [2, blocks, tokens, heads, dim] tensor."""
    cache = torch.zeros(2, NUM_BLOCKS, TOKENS, HEADS, DIM)

    layout = read({"layer0": cache}, config(full_attention()), device="cuda")

    assert [cache[0].data_ptr(), cache[1].data_ptr()] == [plane.base_address for plane in layout.planes]
    assert 1 == len(layout.regions)


@pytest.mark.parametrize("shape", [(NUM_BLOCKS, TOKENS, 576), (NUM_BLOCKS, 1, TOKENS, 576)])
def test_a_latent_is_held_alike_by_every_rank(shape: tuple[int, ...]) -> None:
    """Goal: MLA is one replicated head whatever the rank. Method: both shapes vLLM uses, rank 1 of 2."""
    spec = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    rank = kv_cache.RankNumbers(tp_rank=1, tp_size=2, pp_rank=0, pp_size=1)

    layout = read({"layer0": torch.zeros(shape, dtype=torch.bfloat16)}, config(spec), device="cpu", rank=rank)

    (plane,) = layout.planes
    assert (0, 1, 1, 576 * 2) == (plane.first_head, plane.num_heads, plane.total_heads, plane.bytes_per_token_head)
    assert TOKENS == plane.tokens_per_block


def test_a_rank_says_which_heads_it_holds() -> None:
    """Goal: heads are global numbers. Method: rank 1 of 2 with one head each."""
    rank = kv_cache.RankNumbers(tp_rank=1, tp_size=2, pp_rank=0, pp_size=1)

    layout = read({"layer0": torch.zeros(NUM_BLOCKS, 1, TOKENS, 2 * DIM)}, config(full_attention()), device="cpu", rank=rank)

    assert (1, 1, HEADS) == (layout.planes[0].first_head, layout.planes[0].num_heads, layout.planes[0].total_heads)


def test_smaller_kernel_blocks_are_counted_per_block() -> None:
    """Goal: vLLM may split a block for its kernels. Method: four kernel blocks a block."""
    cache = torch.zeros(4 * NUM_BLOCKS, HEADS, TOKENS // 4, 2 * DIM)

    layout = read({"layer0": cache}, config(full_attention()), device="cuda")

    assert (TOKENS, 4) == (layout.groups[0].tokens_per_block, layout.groups[0].kernel_blocks_per_block)


def test_a_layer_that_shares_anothers_kv_is_moved_once() -> None:
    """Goal: vLLM lists layers that share KV in their group and gives both the one tensor. Method: two names, one cache."""
    cache = torch.zeros(NUM_BLOCKS, HEADS, TOKENS, 2 * DIM)
    group = KVCacheGroupSpec(layer_names=["layer0", "layer1"], kv_cache_spec=full_attention())
    cache_config = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])

    layout = read({"layer0": cache, "layer1": cache}, cache_config, device="cpu")

    assert ["layer0/kv"] == [plane.name for plane in layout.planes]


def test_groups_that_share_memory_share_one_region() -> None:
    """Goal: hybrid groups lie over the same bytes. Method: two groups, one storage."""
    cache = torch.zeros(NUM_BLOCKS, HEADS, TOKENS, 2 * DIM)
    window = SlidingWindowSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32, sliding_window=64)

    layout = read({"layer0": cache, "layer1": cache}, config(full_attention(), window), device="cpu")

    assert [0, 1] == [plane.group_index for plane in layout.planes]
    assert [0, 64] == [group.window_tokens for group in layout.groups]
    assert 1 == len(layout.regions)


def test_recurrent_states_are_one_row_a_block() -> None:
    """Goal: conv and SSM states are planes of one row. Method: a Mamba layer's two tensors."""
    spec = MambaSpec(block_size=TOKENS, shapes=((4, 3), (8, 16)), dtypes=(torch.float32, torch.float32))
    states = [torch.zeros(NUM_BLOCKS, 4, 3), torch.zeros(NUM_BLOCKS, 8, 16)]

    layout = read({"layer0": states}, config(spec), device="cpu")

    assert [4 * 3 * 4, 8 * 16 * 4] == [plane.bytes_per_token_head for plane in layout.planes]
    assert layout.groups[0].has_recurrent_state


def test_a_backend_with_other_heads_is_refused_by_name() -> None:
    """Goal: a cache that packs heads its own way is never guessed at. Method: three heads where two are due."""
    with pytest.raises(ConfigError, match=r"layer0.*3 heads"):
        read({"layer0": torch.zeros(NUM_BLOCKS, 3, TOKENS, 2 * DIM)}, config(full_attention()), device="cpu")


def test_an_unknown_shape_is_refused_by_name() -> None:
    """Goal: no shape is guessed at. Method: a two-dimensional cache."""
    with pytest.raises(ConfigError, match=r"layer0.*not supported"):
        read({"layer0": torch.zeros(4, 4)}, config(full_attention()), device="cpu")
