"""What makes KV caches of two engines interchangeable, read from vLLM's configuration and the model's files.

Never the folder's name, never all weight bytes: `config.json` as vLLM sees it, and of each weight file its size, its
safetensors header and a sample of every tensor, so that a fine-tune that changes a few kinds of tensors differs too. Of
settings that are no property of the model only those that reach KV bytes: engines may differ in all others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures_source")
_SAMPLE_BYTES = 256
"""Of a tensor: 128 weights of which a fine-tune changes some, or all of a scale."""
_NUM_SAMPLES = 64
"""Of each file, whatever is in it."""
_MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself takes for a header; the first bytes of other files are no length at all."""
_LLAMA4_TUNED_TOKENS = 32_768
"""vLLM scales Llama 4's attention by position where `max_model_len` is above this (`models/llama4.py`)."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""The first kind that a folder has."""
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_PROCESSOR_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)


def cache_identity(vllm_config: Any, device_type: str) -> dict[str, str]:
    """Named values for the fingerprint: the same on two engines exactly if their KV bytes may be exchanged. Reads files."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    config = model.hf_config.to_dict()
    return {
        "model config": _digest(json.dumps(_stable(config), sort_keys=True, default=str).encode()),
        "model weights": _weights_identity(vllm_config),
        "model dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(getattr(model, "quantization", None)),
        "kv cache dtype": str(cache.cache_dtype),
        "attention kernel": _attention_kernel(vllm_config, device_type),
        "use of max_model_len": "; ".join(_uses_of_length(model, config)),
        "multimodal processor": _processor_identity(model),
    }


def _attention_kernel(vllm_config: Any, device_type: str) -> str:
    """What decides the order of bytes inside a block: on CPU the instruction set and the kernel's version, elsewhere the
    layout, which the planes tell, but for vllm-ascend's NZ format, which keeps shape and strides."""
    if device_type != "cpu":
        additional = getattr(vllm_config, "additional_config", None)
        is_nz = isinstance(additional, dict) and bool(additional.get("enable_kv_nz", False))
        return f"{device_type} NZ" if is_nz else device_type
    import platform

    import torch
    import vllm

    instructions = [name for name in ("avx512", "amx_tile") if getattr(torch.cpu, f"_is_{name}_supported", bool)()]
    return f"cpu {platform.machine()} {'+'.join(instructions) or 'plain'} vllm {vllm.__version__}"


def _stable(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _VOLATILE}


def _uses_of_length(model: Any, config: dict[str, Any]) -> Iterator[str]:
    """What `max_model_len` does to KV bytes in the few models where it does something.

    Source: vLLM 0.32 `rotary_embedding/phi3_long_rope_scaled_rope.py`, `models/llama4.py`; a dynamic rotary embedding starts
    from the length that some models hand to it.
    """
    num_tokens = int(model.max_model_len)
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type"))
        if kind == "longrope":
            limit = int(rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or 0)
            yield f"longrope beyond {limit}: {num_tokens > limit}"
        elif kind == "dynamic":
            yield f"dynamic rope up to {num_tokens}"
    if any(str(one.get("model_type", "")).startswith("llama4") for one in (config, config.get("text_config") or {})):
        generation = getattr(model, "override_generation_config", None) or {}
        is_tuned = generation.get("attn_temperature_tuning", num_tokens > _LLAMA4_TUNED_TOKENS)
        yield f"attention temperature: {is_tuned}"


def _ropes(config: Any) -> Iterator[dict[str, Any]]:
    """Settings of all rotary embeddings in a configuration: in older ones `rope_scaling`, in newer ones `rope_parameters`,
    perhaps one by kind of layer."""
    if isinstance(config, dict):
        if "rope_type" in config or ("type" in config and "factor" in config):
            yield config
        for value in config.values():
            yield from _ropes(value)


def _processor_identity(model: Any) -> str:
    """What turns an image or a sound into embeddings, beside the model and what vLLM hashes with each item."""
    settings = getattr(model, "multimodal_config", None)
    if settings is None:
        return ""
    chosen = {name: getattr(settings, name, None) for name in _PROCESSOR_SETTINGS}
    content = json.dumps(chosen, sort_keys=True, default=str).encode()
    folder = Path(str(model.model))
    files = [file for file in (folder / name for name in _PROCESSORS) if file.is_file()]
    return _digest(content + b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files))


def _weights_identity(vllm_config: Any) -> str:
    model, load = vllm_config.model_config, getattr(vllm_config, "load_config", None)
    if str(getattr(load, "load_format", "")) == "dummy":
        return "dummy"
    place = Path(str(model.model))
    files = [place] if place.is_file() else next(filter(None, (sorted(place.glob(kind)) for kind in _WEIGHTS)), [])
    if not files:
        commit = getattr(model.hf_config, "_commit_hash", None)
        return f"{model.model}@{commit or getattr(model, 'revision', None)}"
    digest = hashlib.sha256()
    for file in files:
        digest.update(file_identity(file))
    return digest.hexdigest()[:32]


def file_identity(file: Path) -> bytes:
    """Size, safetensors header and samples of the data; of another kind of file its size and samples."""
    size_bytes = file.stat().st_size
    digest = hashlib.sha256(size_bytes.to_bytes(8, "little"))
    with file.open("rb") as opened:
        descriptor = opened.fileno()
        header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        header = os.pread(descriptor, header_bytes, 8) if header_bytes < min(size_bytes, _MAX_HEADER_BYTES) else b""
        digest.update(header)
        for offset in _sample_offsets(header, size_bytes):
            digest.update(os.pread(descriptor, _SAMPLE_BYTES, offset))
    return digest.digest()


def _sample_offsets(header: bytes, size_bytes: int) -> list[int]:
    """Places all over the file, and where a safetensors header tells of tensors the middle of each."""
    last = max(0, size_bytes - _SAMPLE_BYTES)
    spread = [last * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)]
    try:
        tensors = json.loads(header)
        spans = sorted(tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__")
        return spread + [8 + len(header) + max(first, (first + end - _SAMPLE_BYTES) // 2) for first, end in spans]
    except (ValueError, TypeError, KeyError, AttributeError):
        return spread


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
