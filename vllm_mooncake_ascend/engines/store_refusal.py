"""What a store refuses before anything is asked of anyone. Shared by every implementation; pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import StoreKey
from vllm_mooncake_ascend.engines.register import MemoryRegister
from vllm_mooncake_ascend.planner.store_batch import MAX_VALUE_BYTES, StoreBatch

_KEY = re.compile(rf"[!-~]{{1,{limits.MAX_ID_CHARS}}}")


def data_refusal(keys: Sequence[StoreKey], batch: StoreBatch, register: MemoryRegister) -> str | None:
    """Why these keys must not be put from, or got into, the buffers of `batch`; None if they may."""
    reason = _keys_refusal(keys) or _size_refusal(keys, batch)
    if reason is not None:
        return reason
    if len(set(keys)) != len(keys):
        # Mooncake 0.3.13 says success for both and fills one target (`client_service.cpp`: slices go by key).
        return "a key is named twice in one call"
    lengths = np.broadcast_to(batch.lengths_bytes, batch.addresses.shape).reshape(-1)
    index = register.first_outside(batch.addresses.reshape(-1), lengths)
    if index is not None:
        address = int(batch.addresses.reshape(-1)[index])
        return f"buffer {index} [{address:#x}, +{int(lengths[index])} bytes] is not inside one registered region"
    return None


def lookup_refusal(keys: Sequence[StoreKey]) -> str | None:
    """Why these keys must not be looked up; None if they may."""
    if len(keys) > limits.MAX_LOOKUP_KEYS:
        return f"{len(keys)} keys in one call, the limit is {limits.MAX_LOOKUP_KEYS}"
    return _keys_refusal(keys)


def removal_refusal(keys: Sequence[StoreKey], prefix: str) -> str | None:
    """Why these keys must not be removed by the owner of `prefix`; None if they may."""
    if not prefix:
        return "an empty prefix stands for the keys of everybody"
    for key in keys:
        if not key.startswith(prefix):
            return f"{key[: limits.MAX_ID_CHARS]!r} does not begin with {prefix!r}"
    return lookup_refusal(keys)


def _keys_refusal(keys: Sequence[StoreKey]) -> str | None:
    text = np.frombuffer("".join(keys).encode(errors="surrogatepass"), dtype=np.uint8)
    is_printable = len(text) == 0 or (text.min() >= ord("!") and text.max() <= ord("~"))
    if is_printable and all(1 <= length <= limits.MAX_ID_CHARS for length in set(map(len, keys))):
        return None  # at once for all: one by one, ten thousand take 4 ms in which nobody else runs Python
    for key in keys:
        if _KEY.fullmatch(key) is None:
            return f"{key[: limits.MAX_ID_CHARS]!r} is not a key of 1 to {limits.MAX_ID_CHARS} printable characters"
    return None


def _size_refusal(keys: Sequence[StoreKey], batch: StoreBatch) -> str | None:
    if len(keys) != len(batch):
        return f"{len(keys)} keys for {len(batch)} values"
    if batch.value_bytes > MAX_VALUE_BYTES:
        return f"a value of {batch.value_bytes} bytes, the limit is {MAX_VALUE_BYTES}"
    if len(keys) > 1 and batch.addresses.size > limits.MAX_CALL_DESCRIPTORS:
        return f"{batch.addresses.size} buffers in one call, the limit is {limits.MAX_CALL_DESCRIPTORS}"
    if len(keys) > 1 and len(keys) * batch.value_bytes > limits.MAX_CALL_BYTES:
        return f"{len(keys) * batch.value_bytes} bytes in one call, the limit is {limits.MAX_CALL_BYTES}"
    return None
