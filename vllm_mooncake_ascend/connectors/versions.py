"""What differs between the supported vLLM versions (0.27.1 to 0.33), found by looking, never by comparing numbers.

Everything that is not in all of them is imported or probed here; the rest of the room uses these names only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

TransferResults: type | None = getattr(base, "KVConnectorTransferResults", None)
"""0.30+: sends, receives and failed receives of one step together."""

HAS_FAILED_RECEIVES = TransferResults is not None
"""Whether a failed receive is named by request (0.30+). Before that only block ids can be named, a request with a local
prefix is recomputed into the very blocks a late byte may still reach, and a model with several KV cache groups has no
failure route at all."""


def hit_source(name: str) -> Any:
    """vLLM's label of where loaded tokens came from, by its name (0.32+; nobody asks before)."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    return CacheHitSource[name]


def no_transfer_results() -> Any:
    """Nothing to report of a step (0.30+ only). A new one each time: vLLM hands its sets on."""
    assert TransferResults is not None
    return TransferResults()


def transfer_results(received: set[str], failed: set[str]) -> Any:
    """The worker's report of one step; failed receives are received ones too (0.30+ only)."""
    assert TransferResults is not None
    assert failed <= received
    return TransferResults(finished_sending=set(), finished_recving=received, failed_recving=failed)


def scheduler_transfer_config(vllm_config: Any) -> Any:
    """The KVTransferConfig that vLLM's scheduler reads, for a connector that is being made.

    MultiConnector makes each child with a copy of the configuration that has a KVTransferConfig of the child's own; what is set
    there the scheduler never sees. The original is an argument of the MultiConnector's own constructor, which is our caller.
    """
    frame = inspect.currentframe()
    while frame is not None:
        maker = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and type(maker).__name__ == "MultiConnector":
            return frame.f_locals["vllm_config"].kv_transfer_config
        frame = frame.f_back
    return vllm_config.kv_transfer_config


class BlockPins:
    """References of ours on blocks of vLLM's block pool, so that a block in flight is not handed out again.

    vLLM keeps the methods used here through all supported versions: `blocks`, `touch`, `free_blocks`.
    """

    def __init__(self, block_pool: Any) -> None:
        self._block_pool = block_pool
        self.num_pinned = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return len(self._block_pool.blocks)

    def pin(self, block_ids: tuple[int, ...]) -> None:
        """Take one reference on each block; the blocks are in use now, so none of them is on the free list."""
        blocks = self._blocks(block_ids)
        assert all(block.ref_cnt > 0 for block in blocks), "a block must be pinned while its request still holds it"
        self._block_pool.touch(blocks)
        self.num_pinned += len(blocks)

    def unpin(self, block_ids: tuple[int, ...]) -> None:
        """Give one reference on each block back; the tail first, as vLLM frees, so that a prefix is evicted last."""
        blocks = self._blocks(block_ids)
        assert all(block.ref_cnt > 0 for block in blocks)
        self._block_pool.free_blocks(reversed(blocks))
        self.num_pinned -= len(blocks)
        assert self.num_pinned >= 0

    def _blocks(self, block_ids: tuple[int, ...]) -> list[Any]:
        return [self._block_pool.blocks[block_id] for block_id in block_ids]


class LocalCache:
    """vLLM's own prefix cache."""

    def __init__(self, block_pool: Any) -> None:
        self._block_pool = block_pool

    def forget(self) -> None:
        """No prompt to come finds any block of it; blocks in use stay in use."""
        self._block_pool.evict_blocks({block.block_id for block in self._block_pool.blocks if block.block_hash is not None})

    def num_prefix_blocks(self, hashes: Sequence[bytes]) -> int:
        """A guess that costs next to nothing: blocks of a prefix that seem to be cached (first group). Found by doubling and
        halving, as vLLM evicts a chain from its end: a hole in the midst of it may go unnoticed."""
        known, unknown = 0, 1
        while unknown <= len(hashes) and self._has(hashes[unknown - 1]):
            known, unknown = unknown, 2 * unknown
        unknown = min(unknown, len(hashes) + 1)
        while unknown - known > 1:
            middle = (known + unknown) // 2
            known, unknown = (middle, unknown) if self._has(hashes[middle - 1]) else (known, middle)
        return known

    def _has(self, block_hash: bytes) -> bool:
        return self._block_pool.get_cached_block(block_hash, [0]) is not None


def block_pool_of(manager: Any) -> Any:
    """The block pool of a KV cache manager (`bind_kv_cache_manager`, 0.30+)."""
    return manager.block_pool


def spin_conditions() -> list[Any]:
    """Readers of vLLM's shared-memory message queues in this process: objects with `busy_loop_s` and
    `last_read`, or none."""
    try:
        from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
    except ImportError:
        return []
    import gc

    # By type, never by isinstance: that asks every object of the process for its __class__, and lazy modules load for it.
    conditions = [found for found in gc.get_objects() if issubclass(type(found), SpinCondition)]
    needed = ("busy_loop_s", "last_read")
    return [found for found in conditions if getattr(found, "is_reader", False) and all(hasattr(found, one) for one in needed)]
