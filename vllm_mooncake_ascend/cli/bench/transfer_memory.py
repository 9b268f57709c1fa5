"""The KV memory of both sides of `bench transfer`: bytes that tell where they belong, laid out as blocks of layers."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt

from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 64 << 10
"""Of one layer's block: 16 tokens of 8 heads with 128 numbers of two bytes, K and V; what can be moved when nothing merges."""
NUM_LAYERS = 16
BLOCK_TOKENS = 16
STEP_BYTES = NUM_LAYERS * BLOCK_BYTES
"""Sizes are multiples of this: one block of all layers."""


def make_memory(num_bytes: int, *, seed: int) -> Bytes:
    """`[num_bytes] uint8`, the same in every process for the same seed. Every page is touched."""
    return np.random.default_rng(seed).integers(0, 256, size=num_bytes, dtype=np.uint8)


def region_of(memory: Bytes) -> Region:
    return Region(base_address=int(memory.ctypes.data), length_bytes=memory.nbytes)


def layout_of(region: Region, session: str) -> RankLayout:
    """`NUM_LAYERS` planes side by side, the first block of each the null block."""
    plane_bytes = region.length_bytes // NUM_LAYERS
    planes = tuple(
        Plane(
            name=f"layers.{layer}/kv",
            group_index=0,
            base_address=region.base_address + layer * plane_bytes,
            num_blocks=plane_bytes // BLOCK_BYTES,
            tokens_per_block=1,
            first_head=0,
            num_heads=1,
            total_heads=1,
            bytes_per_token_head=BLOCK_BYTES,
            block_stride_bytes=BLOCK_BYTES,
            token_stride_bytes=BLOCK_BYTES,
            head_stride_bytes=BLOCK_BYTES,
        )
        for layer in range(NUM_LAYERS)
    )
    group = GroupLayout(tokens_per_block=BLOCK_TOKENS, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
    return RankLayout(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, session=session, groups=(group,), planes=planes, regions=(region,)
    )


def block_ids(num_bytes: int, region: Region, *, is_fragmented: bool, seed: int) -> tuple[int, ...]:
    """Blocks for so many bytes: neighbours, or drawn from all of the memory."""
    num_blocks, num_there = num_bytes // STEP_BYTES, region.length_bytes // STEP_BYTES - 1
    if is_fragmented:
        return tuple(random.Random(seed).sample(range(1, num_there + 1), num_blocks))
    return tuple(range(1, num_blocks + 1))
