"""How this engine's vLLM computes block hashes, and why other engines perhaps never have the same ones.

A block hash covers the hash before it, the block's tokens and extra keys (LoRA, multimodal inputs, salt); the first one
starts from a seed. What differs between vLLM versions (`vllm/v1/core/kv_cache_utils.py`) is found by looking:

    the seed        up to 0.28 random unless PYTHONHASHSEED is set; from 0.29 on fixed for sha256 and sha256_cbor, random for
                    xxhash and xxhash_cbor unless PYTHONHASHSEED is set
    the extra keys  bare values up to 0.30, from 0.31 on with tags; newer ones also name a LoRA adapter's folder: vLLM is asked
                    for those of a made-up request
    the look-ahead  0.33 with MTP or EAGLE: a hash also covers tokens behind its block

vLLM draws its seed after it has built the connector, so what it will be is worked out here, in the same process.
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import msgspec
import vllm
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from vllm_mooncake_ascend.planner.pool_keys import Hashing

_SEED_VARIABLE = "PYTHONHASHSEED"
_NO_SEED = "(random)"
"""Stands for a seed that only this process knows."""
_ADAPTER_FOLDER = "/adapter folder"
_TELLING_APART = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
"""Algorithms of 128 bits and more whose value depends on nothing but their input. `builtin` of older versions does neither."""


def hash_block_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    """Tokens of one block hash; divides the block size of every KV cache group that has a prefix cache."""
    known = getattr(kv_cache_config, "hash_block_size", None)
    if known is not None:
        return int(known)
    _, hash_block_size = kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(hash_block_size)


def hashing_of(vllm_config: Any, kv_cache_config: Any) -> Hashing:
    """All that two engines must have in common to have the same hashes for the same tokens.

    Where `private_reason` gives a reason the seed is not in it: then nothing in the pool is of use to others, and the
    namespace should have a random `generation`.
    """
    return Hashing(
        algorithm=_algorithm(vllm_config),
        seed=_shared_seed(vllm_config) or _NO_SEED,
        dialect=_dialect(),
        block_tokens=hash_block_tokens(vllm_config, kv_cache_config),
        lookahead_tokens=int(getattr(vllm_config, "num_hash_lookahead_tokens", 0) or 0),
    )


def private_reason(vllm_config: Any) -> str:
    """Why no other engine can have this one's block hashes, and what to do; "" when others can."""
    algorithm = _algorithm(vllm_config)
    if algorithm not in _TELLING_APART:
        return (
            f"block hashes cannot be shared: prefix_caching_hash_algo={algorithm} is not known to tell prompts of different "
            "engines apart; set --prefix-caching-hash-algo sha256 on all engines"
        )
    if _shared_seed(vllm_config) is not None:
        return ""
    if hasattr(kv_cache_utils, "resolve_none_hash_seed"):
        remedy = "set --prefix-caching-hash-algo sha256 on all engines, or"
    else:
        remedy = "use vLLM 0.29 or newer with --prefix-caching-hash-algo sha256, or"
    return (
        f"block hashes cannot be shared: with prefix_caching_hash_algo={algorithm} vLLM {vllm.__version__} starts them from a "
        f"random seed, because {_SEED_VARIABLE} is not set; {remedy} start all engines with one {_SEED_VARIABLE}, "
        f"such as {_SEED_VARIABLE}=0"
    )


def fingerprint(hashing: Hashing) -> str:
    """`[8] hex digits` for log lines: engines with different ones never find each other's blocks."""
    return f"{zlib.crc32(msgspec.json.encode(hashing)):08x}"


def tells_adapter_folders_apart(hashing: Hashing) -> bool:
    """Whether the hash of a LoRA request covers where its adapter lies. In older vLLM it covers the name alone: two engines
    that gave one name to two adapters have equal hashes for different KV."""
    return _ADAPTER_FOLDER in hashing.dialect


def _algorithm(vllm_config: Any) -> str:
    return str(vllm_config.cache_config.prefix_caching_hash_algo)


def _shared_seed(vllm_config: Any) -> str | None:
    """What vLLM's first hash will start from, None when it is random."""
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    if resolve is None:
        return os.environ.get(_SEED_VARIABLE)
    function = get_hash_fn_by_name(_algorithm(vllm_config))
    first, second = resolve(function), resolve(function)
    return str(first) if first == second else None


def _dialect() -> str:
    """The extra keys that vLLM makes of a request with an adapter, an image and a salt, as text."""
    try:
        image = MultiModalFeatureSpec(
            data=None, modality="image", identifier="image", mm_position=PlaceholderRange(offset=1, length=2)
        )
        request = Request(
            request_id="dialect",
            prompt_token_ids=[0, 1, 2, 3],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            mm_features=[image],
            lora_request=LoRARequest(lora_name="adapter", lora_int_id=1, lora_path=_ADAPTER_FOLDER),
            cache_salt="salt",
        )
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, 4, 0)
    except (TypeError, AttributeError, ValueError):
        # A vLLM that makes requests in a way this package does not know: a dialect of its own is always safe.
        return f"vllm {vllm.__version__}"
    return repr(keys)
