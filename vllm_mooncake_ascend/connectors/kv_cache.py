"""KV caches as vLLM made them -> planes. The only code that asks what kind of cache a layer has.

What comes in, by platform and version (a dict of layer name to):
    one tensor [blocks, heads, tokens, content]      vLLM from 0.29 on, and its CPU backend in all versions
    one tensor [blocks, tokens, content]             MLA latents before 0.29
    one tensor [2, blocks, tokens, heads, dim]       attention on accelerators before 0.29
    a tuple (k, v, ...) of [blocks, tokens, heads, dim]   vllm-ascend, parts of an MLA latent included
    a list of states [blocks, ...]                   recurrent layers
Strides are taken from the tensors, never derived from shapes: padding and interleaving are ordinary. Downstream there are
only planes (`layout.plane`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.layout import families
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region
from vllm_mooncake_ascend.layout.ranks import REPLICATED, HeadShare, head_share

FULL_ATTENTION, LATENT, SLIDING_WINDOW, STATE = "full attention", "MLA", "sliding window", "recurrent state"
SUPPORTED_KINDS = frozenset({FULL_ATTENTION, LATENT})

_KINDS = {
    "FullAttentionSpec": FULL_ATTENTION,
    "MLAAttentionSpec": LATENT,
    "SlidingWindowSpec": SLIDING_WINDOW,
    "MambaSpec": STATE,
}


class GroupDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group in plain words."""

    kind: str
    """One of the names above, or vLLM's class name for a kind that has none here."""
    tokens_per_block: int
    window_tokens: int
    layer_names: tuple[str, ...]


class RankNumbers(msgspec.Struct, frozen=True, kw_only=True):
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int


class _Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The tensors of one layer, each `[blocks, heads, tokens, content]` after permuting views."""

    names: tuple[str, ...]
    tensors: tuple[Any, ...]


def describe_groups(kv_cache_config: Any) -> tuple[GroupDescription, ...]:
    """The groups of a `KVCacheConfig` (any supported vLLM version)."""
    return tuple(_describe_group(group) for group in kv_cache_config.kv_cache_groups)


def block_table(block_ids: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """vLLM's block ids per group as a value."""
    return tuple(tuple(group) for group in block_ids)


def rank_numbers(vllm_config: Any) -> RankNumbers:
    """This worker's place; only in a worker process, after vLLM built its process groups."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    parallel = vllm_config.parallel_config
    return RankNumbers(
        tp_rank=int(get_tensor_model_parallel_rank()),
        tp_size=int(parallel.tensor_parallel_size),
        pp_rank=int(get_pp_group().rank_in_group),
        pp_size=int(parallel.pipeline_parallel_size),
    )


def total_heads(vllm_config: Any) -> int:
    """KV heads of the whole model (of its attention layers)."""
    return int(vllm_config.model_config.get_total_num_kv_heads())


def read_rank_layout(
    kv_caches: dict[str, Any],
    kv_cache_config: Any,
    *,
    rank: RankNumbers,
    total_heads: int,
    device_type: str,
    session: str,
) -> RankLayout:
    """Describe one worker's KV memory.

    Args:
        kv_caches: what vLLM hands to `register_kv_caches`.
        total_heads: KV heads of the model over all ranks.
        device_type: torch's name of the device; "cpu" attention orders the bytes of a (block, head) in its own way.
        session: Mooncake session that will serve the memory.

    Raises:
        ConfigError: a layer's tensors are of a shape this version does not know, or there are too many regions.
    """
    groups = describe_groups(kv_cache_config)
    planes: list[Plane] = []
    kernel_blocks = [1] * len(groups)
    for group_index, group in enumerate(groups):
        for layer_name in _own_layers(group, kv_caches):
            found = _layer_planes(layer_name, kv_caches[layer_name], group, rank, total_heads, device_type)
            planes.extend(msgspec.structs.replace(plane, group_index=group_index) for plane in found)
            kernel_blocks[group_index] = found[0].num_blocks // int(kv_cache_config.num_blocks)
    return RankLayout(
        tp_rank=rank.tp_rank,
        tp_size=rank.tp_size,
        pp_rank=rank.pp_rank,
        pp_size=rank.pp_size,
        session=session,
        groups=tuple(
            GroupLayout(
                tokens_per_block=group.tokens_per_block,
                kernel_blocks_per_block=kernel_blocks[group_index],
                window_tokens=group.window_tokens,
                has_recurrent_state=group.kind == STATE,
            )
            for group_index, group in enumerate(groups)
        ),
        planes=tuple(planes),
        regions=_regions(kv_caches.values()),
    )


def _own_layers(group: GroupDescription, kv_caches: dict[str, Any]) -> list[str]:
    """The layers of a group that have KV of their own here: others are on another rank, or share an earlier layer's."""
    owners: dict[tuple[object, ...], str] = {}
    for layer_name in group.layer_names:
        if layer_name in kv_caches:
            memory = tuple((tensor.data_ptr(), *tensor.stride()) for tensor in _as_list(kv_caches[layer_name]))
            owners.setdefault(memory, layer_name)
    return list(owners.values())


def _describe_group(group: Any) -> GroupDescription:
    spec = group.kv_cache_spec
    members = list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]
    kinds = sorted({_kind(member) for member in members})
    return GroupDescription(
        kind=" + ".join(kinds),
        tokens_per_block=int(spec.block_size),
        window_tokens=int(getattr(spec, "sliding_window", None) or 0) if kinds == [SLIDING_WINDOW] else 0,
        layer_names=tuple(group.layer_names),
    )


def _kind(spec: Any) -> str:
    name = type(spec).__name__
    return _KINDS.get(name, name)


def _layer_planes(
    layer_name: str, cache: Any, group: GroupDescription, rank: RankNumbers, total_heads: int, device_type: str
) -> list[Plane]:
    if group.kind == STATE:
        return _state_planes(layer_name, _as_list(cache), rank)
    parts = _parts(layer_name, cache)
    planes = []
    for name, tensor in zip(parts.names, parts.tensors, strict=True):
        num_heads = int(tensor.shape[1])
        replicated = group.kind == LATENT or num_heads == total_heads == 1
        heads = REPLICATED if replicated else head_share(total_heads, tp_rank=rank.tp_rank, tp_size=rank.tp_size)
        if heads.num_heads != num_heads:
            raise ConfigError(
                f"layer {layer_name}: its KV cache holds {num_heads} heads a rank, but {heads.num_heads} of {total_heads} "
                f"were expected at tensor parallel size {rank.tp_size}; this attention backend is not supported"
            )
        planes.append(_tensor_plane(layer_name, name, tensor, heads, opaque=device_type == "cpu" and not replicated))
    return planes


def _tensor_plane(layer_name: str, name: str, tensor: Any, heads: HeadShare, *, opaque: bool) -> Plane:
    """`tensor`: [kernel blocks, heads, tokens, content], content dense."""
    itemsize = int(tensor.element_size())
    num_blocks, _, tokens_per_block, content = (int(size) for size in tensor.shape)
    block_stride, head_stride, token_stride, content_stride = (int(stride) * itemsize for stride in tensor.stride())
    if content > 1 and content_stride != itemsize:
        raise ConfigError(f"layer {layer_name}: the KV of one token and head is not one run of bytes; cannot be transferred")
    view = families.CacheView(
        layer_name=layer_name,
        group_index=0,
        base_address=int(tensor.data_ptr()),
        num_blocks=num_blocks,
        tokens_per_block=tokens_per_block,
        block_stride_bytes=block_stride,
        token_stride_bytes=token_stride,
        head_stride_bytes=head_stride,
    )
    if not opaque:
        return families.part(view, name, heads, bytes_per_token_head=content * itemsize)
    if token_stride != content * itemsize:
        raise ConfigError(f"layer {layer_name}: the KV of one block and head is not one run of bytes; cannot be transferred")
    (plane,) = families.opaque(view, heads, bytes_per_block_head=tokens_per_block * content * itemsize)
    return plane


def _state_planes(layer_name: str, states: Sequence[Any], rank: RankNumbers) -> list[Plane]:
    heads = HeadShare(first_head=rank.tp_rank, num_heads=1, total_heads=rank.tp_size)
    planes = []
    for index, state in enumerate(states):
        itemsize = int(state.element_size())
        row_bytes = int(state[0].numel()) * itemsize
        view = families.CacheView(
            layer_name=layer_name,
            group_index=0,
            base_address=int(state.data_ptr()),
            num_blocks=int(state.shape[0]),
            tokens_per_block=1,
            block_stride_bytes=int(state.stride(0)) * itemsize,
            token_stride_bytes=row_bytes,
            head_stride_bytes=row_bytes,
        )
        planes.append(families.state(view, f"state{index}", heads, bytes_per_head=row_bytes))
    return planes


def _parts(layer_name: str, cache: Any) -> _Parts:
    """Bring one layer's tensors into the one order [blocks, heads, tokens, content] without moving a byte."""
    if isinstance(cache, tuple | list):
        names = ("k", "v") if len(cache) == 2 else tuple(f"part{index}" for index in range(len(cache)))
        return _Parts(names=names, tensors=tuple(_tokens_major(layer_name, tensor) for tensor in cache))
    if cache.dim() == 5 and cache.shape[0] == 2:
        return _Parts(names=("k", "v"), tensors=tuple(_tokens_major(layer_name, cache[index]) for index in range(2)))
    if cache.dim() == 4:
        return _Parts(names=("kv",), tensors=(cache,))
    if cache.dim() == 3:
        return _Parts(names=("kv",), tensors=(cache.unsqueeze(1),))
    raise ConfigError(f"layer {layer_name}: KV cache of shape {tuple(cache.shape)} is not supported")


def _tokens_major(layer_name: str, tensor: Any) -> Any:
    if tensor.dim() == 3:
        return tensor.unsqueeze(1)
    if tensor.dim() != 4:
        raise ConfigError(f"layer {layer_name}: KV cache part of shape {tuple(tensor.shape)} is not supported")
    return tensor.permute(0, 2, 1, 3)


def _regions(caches: Iterable[Any]) -> tuple[Region, ...]:
    """Whole storages, each once, in address order."""
    storages = {}
    for cache in caches:
        for tensor in _as_list(cache):
            storage = tensor.untyped_storage()
            storages[int(storage.data_ptr())] = int(storage.nbytes())
    if len(storages) > limits.MAX_REGIONS:
        raise ConfigError(
            f"the KV caches lie in {len(storages)} separate allocations, the transfer engine takes {limits.MAX_REGIONS}"
        )
    return tuple(Region(base_address=address, length_bytes=storages[address]) for address in sorted(storages))


def _as_list(cache: Any) -> list[Any]:
    return list(cache) if isinstance(cache, tuple | list) else [cache]
