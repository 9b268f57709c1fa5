"""Engines laid out in imagined memory: from a model and a way of storing it to the `RankLayout`s of all ranks.

Nothing is allocated; addresses only have to be apart. Covers what the layout room can say: tensor and pipeline parallel
cuts, tokens or heads major, heads outside of blocks, layers interleaved inside blocks, K and V packed in each way or apart,
padding everywhere, latents, opaque blocks, states, one region for all or one for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from vllm_mooncake_ascend.layout import families
from vllm_mooncake_ascend.layout.overlap import extent
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region
from vllm_mooncake_ascend.layout.ranks import REPLICATED, HeadShare, head_share

Kind = Literal["attention", "opaque", "latent", "state"]
Packing = Literal["apart", "keys_with_values", "values_after_keys"]
Order = Literal["tokens_major", "heads_major", "heads_outermost"]


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of the model, the same for every engine that serves it."""

    name: str
    group_index: int
    kind: Kind
    total_heads: int
    key_bytes: int
    """Per token and head (attention), per token (latent), per head (opaque, with value_bytes; state)."""
    value_bytes: int


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """How one engine keeps the layers of one KV cache group."""

    kernel_tokens: int
    kernel_blocks_per_block: int
    num_blocks: int
    """Manager blocks, the null block included."""
    window_tokens: int
    has_recurrent_state: bool
    order: Order
    packing: Packing
    is_interleaved: bool
    """Layers lie beside each other inside one block of one common buffer; not with heads outermost."""
    padding_bytes: tuple[int, int, int]
    """Behind each token, head and block."""

    @property
    def layout(self) -> GroupLayout:
        """The group as a handshake describes it."""
        return GroupLayout(
            tokens_per_block=self.kernel_tokens * self.kernel_blocks_per_block,
            kernel_blocks_per_block=self.kernel_blocks_per_block,
            window_tokens=self.window_tokens,
            has_recurrent_state=self.has_recurrent_state,
        )


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its cut of the model and where its memory starts."""

    name: str
    tp_size: int
    layers_per_stage: tuple[int, ...]
    """Layers of each pipeline stage, in the model's order."""
    storages: tuple[Storage, ...]
    base_address: int
    has_common_region: bool


class _Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a layer before it has a place: its block as [rows, heads, content] in some order."""

    layer: LayerShape
    part: str
    heads: HeadShare
    num_rows: int
    content_bytes: int


def lay_out(model: Sequence[LayerShape], engine: EngineShape) -> tuple[RankLayout, ...]:
    """Layouts of all ranks of `engine`, pipeline stages outermost."""
    ranks: list[RankLayout] = []
    first_layer = 0
    for pp_rank, num_layers in enumerate(engine.layers_per_stage):
        layers = model[first_layer : first_layer + num_layers]
        first_layer += num_layers
        ranks.extend(_lay_out_rank(layers, engine, tp_rank, pp_rank) for tp_rank in range(engine.tp_size))
    assert first_layer == len(model)
    return tuple(ranks)


def _lay_out_rank(layers: Sequence[LayerShape], engine: EngineShape, tp_rank: int, pp_rank: int) -> RankLayout:
    planes: list[Plane] = []
    regions: list[Region] = []
    next_address = engine.base_address + 64 * (tp_rank + 7 * pp_rank)
    for group_index, storage in enumerate(engine.storages):
        tensors = [
            tensor
            for layer in layers
            if layer.group_index == group_index
            for tensor in _tensors(layer, storage, tp_rank, engine.tp_size)
        ]
        for allocated in _allocations(tensors, storage):
            placed = list(_place(allocated, storage, next_address))
            end_address = max(extent(plane)[1] for plane in placed)
            regions.append(Region(base_address=next_address, length_bytes=end_address - next_address))
            next_address = end_address + (0 if tp_rank % 2 else 5)  # some regions touch, some do not
            planes.extend(placed)
    if engine.has_common_region:
        first_address = regions[0].base_address
        last = regions[-1]
        regions = [Region(base_address=first_address, length_bytes=last.base_address + last.length_bytes - first_address)]
    return RankLayout(
        tp_rank=tp_rank,
        tp_size=engine.tp_size,
        pp_rank=pp_rank,
        pp_size=len(engine.layers_per_stage),
        session=f"{engine.name}:{pp_rank * engine.tp_size + tp_rank}",
        groups=tuple(storage.layout for storage in engine.storages),
        planes=tuple(planes),
        regions=tuple(regions),
    )


def _tensors(layer: LayerShape, storage: Storage, tp_rank: int, tp_size: int) -> Iterator[_Tensor]:
    heads = REPLICATED if layer.kind == "latent" else head_share(layer.total_heads, tp_rank=tp_rank, tp_size=tp_size)
    content_bytes = layer.key_bytes + layer.value_bytes
    num_rows = storage.kernel_tokens
    if layer.kind == "attention" and storage.packing == "apart":
        yield _Tensor(layer=layer, part="k", heads=heads, num_rows=num_rows, content_bytes=layer.key_bytes)
        yield _Tensor(layer=layer, part="v", heads=heads, num_rows=num_rows, content_bytes=layer.value_bytes)
    elif layer.kind == "attention" and storage.packing == "values_after_keys":
        yield _Tensor(layer=layer, part="kv", heads=heads, num_rows=1, content_bytes=num_rows * content_bytes)
    elif layer.kind == "attention":
        yield _Tensor(layer=layer, part="kv", heads=heads, num_rows=num_rows, content_bytes=content_bytes)
    elif layer.kind == "latent":
        yield _Tensor(layer=layer, part="latent", heads=heads, num_rows=num_rows, content_bytes=layer.key_bytes)
    else:
        yield _Tensor(layer=layer, part=layer.kind, heads=heads, num_rows=1, content_bytes=content_bytes)


def _allocations(tensors: Sequence[_Tensor], storage: Storage) -> list[list[_Tensor]]:
    """Tensors that share one buffer."""
    if storage.is_interleaved and tensors:
        return [list(tensors)]
    return [[tensor] for tensor in tensors]


def _place(tensors: Sequence[_Tensor], storage: Storage, address: int) -> Iterator[Plane]:
    """Give the tensors of one buffer their strides and addresses."""
    token_padding, head_padding, block_padding = storage.padding_bytes
    num_blocks = storage.num_blocks * storage.kernel_blocks_per_block
    inner = [_inner_strides(tensor, storage.order, token_padding, head_padding) for tensor in tensors]
    block_stride = sum(block_bytes for _, _, block_bytes in inner) + block_padding
    offset_bytes = 0
    for tensor, (token_stride, head_stride, block_bytes) in zip(tensors, inner, strict=True):
        if storage.order == "heads_outermost":
            head_stride = num_blocks * block_stride + head_padding
        view = families.CacheView(
            layer_name=tensor.layer.name,
            group_index=tensor.layer.group_index,
            base_address=address + offset_bytes,
            num_blocks=num_blocks,
            tokens_per_block=storage.kernel_tokens,
            block_stride_bytes=block_stride,
            token_stride_bytes=token_stride,
            head_stride_bytes=head_stride,
        )
        offset_bytes += block_bytes
        yield from _planes(tensor, view, storage.packing)


def _inner_strides(tensor: _Tensor, order: Order, token_padding: int, head_padding: int) -> tuple[int, int, int]:
    """Token stride, head stride and bytes of a block (of one head, where heads are outermost)."""
    if order == "tokens_major":
        head_stride = tensor.content_bytes + head_padding
        token_stride = tensor.heads.num_heads * head_stride + token_padding
        return token_stride, head_stride, tensor.num_rows * token_stride
    token_stride = tensor.content_bytes + token_padding
    head_stride = tensor.num_rows * token_stride + head_padding
    num_heads = 1 if order == "heads_outermost" else tensor.heads.num_heads
    return token_stride, head_stride, num_heads * head_stride


def _planes(tensor: _Tensor, view: families.CacheView, packing: Packing) -> tuple[Plane, ...]:
    layer = tensor.layer
    if layer.kind == "state":
        return (families.state(view, "state", tensor.heads, bytes_per_head=tensor.content_bytes),)
    if layer.kind == "opaque":
        return families.opaque(view, tensor.heads, bytes_per_block_head=tensor.content_bytes)
    if layer.kind == "latent":
        return (families.replicated(view, "latent", bytes_per_token=layer.key_bytes),)
    if packing == "apart":
        return (families.part(view, tensor.part, tensor.heads, bytes_per_token_head=tensor.content_bytes),)
    packed = families.keys_with_values if packing == "keys_with_values" else families.values_after_keys
    return packed(view, tensor.heads, key_bytes=layer.key_bytes, value_bytes=layer.value_bytes)
