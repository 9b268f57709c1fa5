"""Plane: one strided view of one layer's KV cache. The only notion of KV geometry downstream of the connectors.

Address of (block b, token t, head h):

    base_address + b * block_stride_bytes + t * token_stride_bytes + h * head_stride_bytes,   bytes_per_token_head long

with `b` a kernel block id, `t` in [0, tokens_per_block), `h` in [0, num_heads) the *local* head; its global number is
`first_head + h` of `total_heads`. K and V of one layer are two planes, wherever they lie; an MLA latent is a plane with one
head (`total_heads` 1, held by every rank).

Where single tokens cannot be told apart in a block, one "token" of the plane is a *row* of several: a block of
`GroupLayout.tokens_per_block // kernel_blocks_per_block` tokens with `tokens_per_block` rows has so many tokens a row.
A recurrent state has one row a block, and so has attention on vLLM's CPU backend, which keeps K transposed or tiled
inside each (block, head). Rows move whole.
"""

from __future__ import annotations

import msgspec


class Plane(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor view as strides. Sizes and strides are bytes, counts are counts; addresses are of the owning process."""

    name: str
    """`<layer name>/<part>`, the same on both sides: `model.layers.0.self_attn.attn/k`. Identity of the plane."""
    group_index: int
    """The KV cache group whose block ids index this plane."""
    base_address: int
    num_blocks: int
    tokens_per_block: int
    """Rows of one *kernel* block: its tokens, or fewer where a row covers several (see the module's text)."""
    first_head: int
    num_heads: int
    total_heads: int
    bytes_per_token_head: int
    block_stride_bytes: int
    token_stride_bytes: int
    head_stride_bytes: int


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of memory to register with the transfer engine: whole storages, merged where they overlap."""

    base_address: int
    length_bytes: int


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What block ids of one KV cache group mean."""

    tokens_per_block: int
    """Tokens of one *manager* block, the unit of vLLM's block ids."""
    kernel_blocks_per_block: int
    """Manager block b covers the kernel blocks [b * this, (b + 1) * this)."""
    window_tokens: int
    """Sliding window in tokens; 0: full attention."""
    has_recurrent_state: bool
    """Each block holds the state after its last token, so that only the newest block of a request counts."""


class RankLayout(msgspec.Struct, frozen=True, kw_only=True):
    """All KV memory of one worker: what a handshake sends, what the planner pairs."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    session: str
    """`types.Session` of the engine that serves this memory."""
    groups: tuple[GroupLayout, ...]
    planes: tuple[Plane, ...]
    regions: tuple[Region, ...]
