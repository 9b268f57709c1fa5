"""What makes KV caches of two engines interchangeable, read from vLLM's configuration and the model's files.

Never the folder's name, never all weight bytes: `config.json` as vLLM sees it, and of each weight file its size, its
safetensors header and three small samples of its data, so that two fine-tunes of one architecture differ.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_VOLATILE = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures_source")
_SAMPLE_BYTES = 4096


def cache_identity(vllm_config: Any, device_type: str) -> dict[str, str]:
    """Named values for the fingerprint: the same on two engines exactly if their KV bytes may be exchanged."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    return {
        "model config": _digest(json.dumps(_stable(model.hf_config.to_dict()), sort_keys=True, default=str).encode()),
        "model weights": _weights_identity(str(model.model), getattr(model, "revision", None)),
        "model dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(getattr(model, "quantization", None)),
        "kv cache dtype": str(cache.cache_dtype),
        "attention kernel": _attention_kernel(device_type),
    }


def _attention_kernel(device_type: str) -> str:
    """What decides the order of bytes inside a block: on CPU the instruction set and the kernel's version, elsewhere the
    layout alone, which the planes tell."""
    if device_type != "cpu":
        return device_type
    import platform

    import torch
    import vllm

    instructions = [name for name in ("avx512", "amx_tile") if getattr(torch.cpu, f"_is_{name}_supported", bool)()]
    return f"cpu {platform.machine()} {'+'.join(instructions) or 'plain'} vllm {vllm.__version__}"


def _stable(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _VOLATILE}


def _weights_identity(model: str, revision: str | None) -> str:
    folder = Path(model)
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        return f"{model}@{revision}"
    digest = hashlib.sha256()
    for file in files:
        digest.update(file_identity(file))
    return digest.hexdigest()[:32]


def file_identity(file: Path) -> bytes:
    """Size, safetensors header (its length stands in the first eight bytes, little-endian) and samples of the data."""
    size_bytes = file.stat().st_size
    digest = hashlib.sha256(size_bytes.to_bytes(8, "little"))
    with file.open("rb") as opened:
        header_bytes = min(int.from_bytes(opened.read(8), "little"), size_bytes)
        digest.update(opened.read(header_bytes))
        for offset in (8 + header_bytes, size_bytes // 2, max(0, size_bytes - _SAMPLE_BYTES)):
            opened.seek(offset)
            digest.update(opened.read(_SAMPLE_BYTES))
    return digest.digest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]
