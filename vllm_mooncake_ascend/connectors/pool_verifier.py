"""PoolVerifier: a connector that compares what a pool holds of a prompt with what this engine has computed for it.

It is the pool's connector, told neither to load nor to save, so every prompt is computed. When vLLM is done with a request,
and before it frees the blocks, each block's object is got into memory of its own and compared with the block. It runs in an
engine whose scheduler and worker are one process (`verify`), because it reads the worker's memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_mooncake_ascend.connectors import adapters, requests
from vllm_mooncake_ascend.connectors.device import device_type
from vllm_mooncake_ascend.connectors.envelopes import Handshake
from vllm_mooncake_ascend.connectors.pool import MooncakeStoreConnectorV1
from vllm_mooncake_ascend.connectors.pool_scheduler_side import PoolSchedulerSide
from vllm_mooncake_ascend.connectors.pool_store import make_store
from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore, StoreKey
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.layout.blocks import NULL_BLOCK
from vllm_mooncake_ascend.layout.plane import RankLayout, Region
from vllm_mooncake_ascend.planner import pool_keys
from vllm_mooncake_ascend.planner.bounds import CopyBounds
from vllm_mooncake_ascend.planner.store_batch import ObjectTemplate, StoreBatch, object_template, split_keys, store_batch

Bytes = npt.NDArray[np.uint8]

CLOSE_RATIO = 0.01
"""A value may be off by this share of the block's largest one: other kernel shapes round in other ways, and add up over the
layers. Bytes that are wrong are off by all of it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool holds of one prompt."""

    namespace: str
    num_tokens: int
    """Of the prompt."""
    num_objects: int
    """Of its whole blocks."""
    in_pool: int
    equal: int = 0
    """Bit by bit."""
    close: int = 0
    different: int = 0
    unread: int = 0
    """In the pool, and not to be had."""
    max_difference: float | None = 0.0
    """The largest difference between two values, of blocks that are not equal. None: of no meaning for values of this type."""
    reasons: tuple[str, ...] = ()
    """Why objects could not be had, each reason once."""


VERDICTS: list[Verdict] = []
"""Of this process's one engine, in the order in which prompts ended."""


def difference(stored: Bytes, computed: Bytes, dtype: str) -> tuple[float | None, bool]:
    """The largest difference between values of two blocks of equal length, and whether they are close.

    Args:
        dtype: of the values, as torch names it; for other types than floats of 16 and 32 bits None and False.
    """
    if dtype not in ("float32", "float16", "bfloat16"):
        return None, False
    theirs, ours = _values(stored, dtype), _values(computed, dtype)
    largest = float(np.abs(theirs - ours).max(initial=0.0))
    return largest, largest <= CLOSE_RATIO * float(np.abs(ours).max(initial=0.0))


def _values(block: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        # The upper half of a float32.
        return (block.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return block.view(dtype).astype(np.float32)


class PoolVerifier(MooncakeStoreConnectorV1):
    """As `MooncakeStoreConnectorV1` with `loads` and `saves` false.

    Raises:
        ConfigError: the worker's memory cannot be read from here, or nobody else has this engine's block hashes.
    """

    _layout_of_rank: RankLayout
    _reader: KVStore
    _scratch: Bytes

    def _make_scheduler_side(self, vllm_config: Any, kv_cache_config: Any) -> PoolSchedulerSide:
        if self._config.loads or self._config.saves is not False:
            raise ConfigError("verifying a pool: loads and saves must be false, or there would be nothing to compare")
        if device_type() != "cpu" or vllm_config.parallel_config.world_size > 1:
            raise ConfigError("verifying a pool works with one worker on CPU: its memory is read from this process")
        cache_dtype = str(vllm_config.cache_config.cache_dtype)
        model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        self._dtype = model_dtype if cache_dtype == "auto" else cache_dtype
        return cast("PoolSchedulerSide", super()._make_scheduler_side(vllm_config, kv_cache_config))

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        (handshake,) = metadata.values()
        assert isinstance(handshake, Handshake)
        self._layout_of_rank = msgspec.msgpack.decode(handshake.layout, type=RankLayout)
        self._namespace = cast("PoolSchedulerSide", self._scheduler).shared_namespace
        if not self._namespace:
            raise ConfigError("verifying a pool: this engine's block hashes are its own, so nothing in the pool is")
        templates = (object_template(self._layout_of_rank, index) for index in range(len(self._layout_of_rank.groups)))
        self._templates = [template for template in templates if template is not None]
        bounds = CopyBounds()
        largest_bytes = max(template.value_bytes for template in self._templates)
        self._scratch = np.zeros(max(bounds.max_call_bytes, largest_bytes), dtype=np.uint8)
        self._reader = make_store(self._config, segment_bytes=0, is_sealed=True)
        self._reader.register([Region(base_address=self._scratch.ctypes.data, length_bytes=self._scratch.nbytes)])
        self._reader.connect()

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """The blocks are still the request's."""
        hashes = adapters.pool_hashes(request) or ()
        num_tokens = requests.num_prompt_tokens(request)
        counted = _Count()
        for template in self._templates:
            self._verify_group(template, hashes, num_tokens, block_ids[template.group_index], counted)
        VERDICTS.append(counted.verdict(self._namespace, num_tokens))
        return super().request_finished_all_groups(request, block_ids)

    def _verify_group(
        self, template: ObjectTemplate, hashes: Sequence[bytes], num_tokens: int, block_ids: Sequence[int], counted: _Count
    ) -> None:
        group = self._layout_of_rank.groups[template.group_index]
        hash_tokens = cast("PoolSchedulerSide", self._scheduler).hash_tokens
        of_blocks = pool_keys.group_hashes(hashes, group.tokens_per_block // hash_tokens)
        num_blocks = min(num_tokens // group.tokens_per_block, len(of_blocks), len(block_ids))
        ids = [block_id for block_id in block_ids[:num_blocks] if block_id != NULL_BLOCK]
        kept = [of_blocks[index] for index in range(num_blocks) if block_ids[index] != NULL_BLOCK]
        prefix = pool_keys.key_prefix(
            self._namespace, template.group_index, pool_keys.shard_name(self._layout_of_rank, template.group_index)
        )
        keys = pool_keys.keys_of(prefix, kept)
        counted.num_objects += len(keys)
        found = self._reader.exists(keys)
        counted.note([result.reason for result in found.results])
        there = [index for index, outcome in enumerate(found.outcomes) if outcome is KeyOutcome.DONE]
        counted.in_pool += len(there)
        for call in split_keys(template, len(there), CopyBounds()):
            chosen = [there[position] for position in call]
            self._compare(template, [keys[index] for index in chosen], [ids[index] for index in chosen], counted)

    def _compare(self, template: ObjectTemplate, keys: Sequence[StoreKey], block_ids: Sequence[int], counted: _Count) -> None:
        """Get as many objects as one call may have, and look at each."""
        size = template.value_bytes
        targets = self._scratch.ctypes.data + np.arange(len(keys), dtype=np.int64)[:, None] * size
        answer = self._reader.get(keys, StoreBatch(addresses=targets, lengths_bytes=np.array([size], dtype=np.int64)))
        computed = store_batch(template, block_ids)
        for position, result in enumerate(answer.results):
            if result.outcome is not KeyOutcome.DONE:
                counted.unread += 1
                counted.note([result.reason or "it was gone when it was got"])
                continue
            stored = self._scratch[position * size : (position + 1) * size]
            counted.add(stored, _gathered(computed, position), self._dtype)
        # After an UNKNOWN get bytes may still come into the scratch memory. No call is under way now, so the fence holds.
        is_fenced = self._reader.fence()
        assert is_fenced

    def shutdown(self) -> None:
        if hasattr(self, "_reader"):
            self._reader.close()
        super().shutdown()


class _Count:
    """What has been seen of one prompt."""

    def __init__(self) -> None:
        self.num_objects = self.in_pool = self.unread = 0
        self._kinds = {"equal": 0, "close": 0, "different": 0}
        self._max_difference: float | None = 0.0
        self._reasons: dict[str, None] = {}

    def note(self, reasons: Sequence[str]) -> None:
        self._reasons.update(dict.fromkeys(reason for reason in reasons if reason))

    def add(self, stored: Bytes, computed: Bytes, dtype: str) -> None:
        if np.array_equal(stored, computed):
            self._kinds["equal"] += 1
            return
        largest, is_close = difference(stored, computed, dtype)
        self._kinds["close" if is_close else "different"] += 1
        self._max_difference = None if largest is None else max(self._max_difference or 0.0, largest)

    def verdict(self, namespace: str, num_tokens: int) -> Verdict:
        return Verdict(
            namespace=namespace,
            num_tokens=num_tokens,
            num_objects=self.num_objects,
            in_pool=self.in_pool,
            **self._kinds,
            unread=self.unread,
            max_difference=self._max_difference,
            reasons=tuple(self._reasons),
        )


def _gathered(batch: StoreBatch, index: int) -> Bytes:
    """The bytes of one object's buffers, in their order."""
    pairs = zip(batch.addresses[index].tolist(), batch.lengths_bytes.tolist(), strict=True)
    return np.frombuffer(b"".join(ctypes.string_at(address, length) for address, length in pairs), dtype=np.uint8)
