"""LoRA adapters as part of a prompt's identity: by what they contain, not by what they are called.

vLLM's block hashes name an adapter, in newer versions also its folder. On two engines one name, or one path, may stand for
two adapters, and the KV of one must never be taken for that of the other. So the hashes of a request with an adapter are
salted with a digest of the adapter's files before they go anywhere.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from vllm_mooncake_ascend.connectors.identity import file_identity

logger = logging.getLogger(__name__)

_CONTENT = ("*.safetensors", "*.bin", "*.pt", "adapter_config.json")


class SaltedHashes(Sequence[bytes]):
    """vLLM's live list of block hashes, each salted when it is read; grows with the list."""

    def __init__(self, hashes: Sequence[bytes], salt: bytes) -> None:
        self._hashes = hashes
        self._salt = salt

    def __len__(self) -> int:
        return len(self._hashes)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self._salted(one) for one in self._hashes[index]]
        return self._salted(self._hashes[index])

    def _salted(self, block_hash: bytes) -> bytes:
        return hashlib.sha256(self._salt + block_hash).digest()


def pool_hashes(request: Any) -> Sequence[bytes] | None:
    """The request's block hashes as the pool may use them; None: what its adapter contains cannot be told."""
    lora = getattr(request, "lora_request", None)
    hashes: Sequence[bytes] = request.block_hashes
    if lora is None:
        return hashes
    salt = digest_of(lora)
    return None if salt is None else SaltedHashes(hashes, salt)


def digest_of(lora: Any) -> bytes | None:
    """Of what an adapter contains; None: that cannot be told."""
    return _adapter_digest(str(lora.lora_path), int(getattr(lora, "lora_int_id", 0)))


@functools.lru_cache(maxsize=1024)
def _adapter_digest(folder: str, adapter_id: int) -> bytes | None:  # noqa: ARG001
    """SHA-256 over the adapter's files (as `identity` has weight files); None where it is no folder with such files, told once.

    Looked at once a process, path and `adapter_id`: vLLM, too, loads an adapter once, and gives it another number when it is
    unloaded and loaded again, perhaps with other content.
    """
    root = Path(folder)
    try:
        files = sorted(file for pattern in _CONTENT for file in root.glob(pattern)) if root.is_dir() else []
        digest = hashlib.sha256()
        for file in files:
            digest.update(file.name.encode() + b"\0" + file_identity(file))
    except OSError as error:
        files, reason = [], str(error)
    else:
        reason = "it is no folder with adapter files"
    if files:
        return digest.digest()
    logger.warning("what a LoRA adapter contains cannot be told, so its KV is not pooled: path=%s reason=%s", folder, reason)
    return None
