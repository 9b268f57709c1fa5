"""Families of KV caches as planes: plain numbers in, planes out. `connectors.kv_cache` decides which family a layer is.

    family             bytes of one block
    values_after_keys  [heads] x (K [tokens, dim], then V [tokens, dim])       packed per (block, head)
    keys_with_values   [tokens, heads] or [heads, tokens] x (K [dim], V [dim])  packed per token
    apart              K in one tensor, V in another                           Ascend's [2, blocks, tokens, heads, dim]
    opaque             [heads] x bytes in whatever order                       vLLM's CPU attention
    replicated         [tokens] x bytes, on every rank                         MLA latent, indexer, their scales
    state              [heads] x bytes, one row a block                        conv and SSM states

Strides are always given, never derived from a shape: padding and interleaved layers are ordinary. Scales per (token,
head) are one more tensor for `part`, as is any other row of bytes.
"""

from __future__ import annotations

import msgspec

from vllm_mooncake_ascend.layout.plane import Plane
from vllm_mooncake_ascend.layout.ranks import REPLICATED, HeadShare


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of one layer as the connector sees it; `base_address` is that of (block 0, token 0, head 0)."""

    layer_name: str
    group_index: int
    base_address: int
    num_blocks: int
    """Kernel blocks."""
    tokens_per_block: int
    """Tokens of one kernel block."""
    block_stride_bytes: int
    token_stride_bytes: int
    head_stride_bytes: int


def part(view: CacheView, name: str, heads: HeadShare, *, bytes_per_token_head: int, offset_bytes: int = 0) -> Plane:
    """One part of a layer with the view's own strides, `offset_bytes` behind its base. The other families are made of it."""
    return Plane(
        name=f"{view.layer_name}/{name}",
        group_index=view.group_index,
        base_address=view.base_address + offset_bytes,
        num_blocks=view.num_blocks,
        tokens_per_block=view.tokens_per_block,
        first_head=heads.first_head,
        num_heads=heads.num_heads,
        total_heads=heads.total_heads,
        bytes_per_token_head=bytes_per_token_head,
        block_stride_bytes=view.block_stride_bytes,
        token_stride_bytes=view.token_stride_bytes,
        head_stride_bytes=view.head_stride_bytes,
    )


def values_after_keys(view: CacheView, heads: HeadShare, *, key_bytes: int, value_bytes: int) -> tuple[Plane, Plane]:
    """Inside each (block, head) all keys of the block, then all values; `key_bytes` and `value_bytes` of one token and head.

    The view's token stride is of no account. Only where a token's key is one run of bytes; otherwise `opaque`.
    """
    key_view = msgspec.structs.replace(view, token_stride_bytes=key_bytes)
    value_view = msgspec.structs.replace(view, token_stride_bytes=value_bytes)
    offset_bytes = view.tokens_per_block * key_bytes
    return (
        part(key_view, "k", heads, bytes_per_token_head=key_bytes),
        part(value_view, "v", heads, bytes_per_token_head=value_bytes, offset_bytes=offset_bytes),
    )


def keys_with_values(view: CacheView, heads: HeadShare, *, key_bytes: int, value_bytes: int) -> tuple[Plane, Plane]:
    """Each token and head has its key and right behind it its value."""
    return (
        part(view, "k", heads, bytes_per_token_head=key_bytes),
        part(view, "v", heads, bytes_per_token_head=value_bytes, offset_bytes=key_bytes),
    )


def apart(
    key_view: CacheView, value_view: CacheView, heads: HeadShare, *, key_bytes: int, value_bytes: int
) -> tuple[Plane, Plane]:
    """Keys and values in two tensors."""
    return (
        part(key_view, "k", heads, bytes_per_token_head=key_bytes),
        part(value_view, "v", heads, bytes_per_token_head=value_bytes),
    )


def opaque(view: CacheView, heads: HeadShare, *, bytes_per_block_head: int) -> tuple[Plane]:
    """Attention whose (block, head) is one run of bytes in an order of its own, so that only whole blocks can move.

    vLLM's CPU attention: V is [tokens, dim] but K is [dim, tokens] or tiled, by instruction set (seen on vLLM 0.32 with
    its `vec` and `vec16` kernels; the order is not told anywhere, so the fingerprint must name the kernel).
    """
    row_view = msgspec.structs.replace(view, tokens_per_block=1, token_stride_bytes=bytes_per_block_head)
    return (part(row_view, "kv", heads, bytes_per_token_head=bytes_per_block_head),)


def replicated(view: CacheView, name: str, *, bytes_per_token: int) -> Plane:
    """Rows that every rank holds alike: an MLA latent (or its parts), an indexer's keys, scales."""
    return part(view, name, REPLICATED, bytes_per_token_head=bytes_per_token)


def state(view: CacheView, name: str, heads: HeadShare, *, bytes_per_head: int) -> Plane:
    """A recurrent state: one row a block, cut by heads (for states cut otherwise: one head a rank)."""
    row_view = msgspec.structs.replace(view, tokens_per_block=1, token_stride_bytes=0)
    return part(row_view, name, heads, bytes_per_token_head=bytes_per_head)
