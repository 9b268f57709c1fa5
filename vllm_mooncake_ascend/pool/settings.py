"""What the operator may choose about the machines of the pool. Everything else is a bound in `limits`."""

from __future__ import annotations

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.plane import GroupLayout


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of the scheduler's side of one engine."""

    namespace: str
    """The first part of all keys, until a reset gives another."""
    groups: tuple[GroupLayout, ...]
    hash_tokens: int
    """Tokens of one of vLLM's block hashes; divides the block size of every group."""
    num_ranks: int
    """Workers of this engine: each ends every order once."""
    can_report_unknown_at_once: bool
    """A failed receive gives the request other blocks (vLLM >= 0.30), so that a pin keeps late bytes from it; else the report
    itself waits until nothing can land."""
    max_saved_blocks: int
    """Blocks that saves may hold at once; never passed."""
    tells_events: bool = False
    """Somebody listens to KV events: say which blocks are in the pool, and which are not any more."""
    min_hit_tokens: int = limits.MIN_HIT_TOKENS
    lookup_wait_s: float = limits.LOOKUP_WAIT_S
    """How long vLLM is made to wait for a lookup, and LOOKUP_WAIT_PER_BLOCK_S longer for each block; 0: never."""
    load_wait_s: float = limits.LOAD_WAIT_S
    """After this a request computes what has not come."""
    object_lease_s: float = limits.OBJECT_LEASE_S
    """`default_kv_lease_ttl` of the master."""

    def __post_init__(self) -> None:
        assert self.groups, "an engine without KV cache has nothing to share"
        assert all(group.tokens_per_block % self.hash_tokens == 0 for group in self.groups)
        assert self.num_ranks >= 1
        assert self.min_hit_tokens >= 1
        assert self.max_saved_blocks >= 0
        assert self.lookup_wait_s >= 0
        assert 0 < self.load_wait_s < self.object_lease_s, "what a lookup found must outlive the load"

    def lookup_bound_s(self, num_tokens: int) -> float:
        """How long vLLM is made to wait for one lookup of so many tokens."""
        if self.lookup_wait_s == 0:
            return 0.0
        block_tokens = min(group.tokens_per_block for group in self.groups)
        return self.lookup_wait_s + limits.LOOKUP_WAIT_PER_BLOCK_S * (num_tokens // block_tokens)

    @property
    def memo_s(self) -> float:
        """A lookup is trusted this long: half of what the object lease leaves beside the load."""
        return (self.object_lease_s - self.load_wait_s) / 2


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one worker's calls to the store."""

    load_wait_s: float = limits.LOAD_WAIT_S
    """No get of a load starts later than this after its order."""
    save_wait_s: float = limits.SAVE_WAIT_S
    """No put of a save starts later than this after its order."""
    max_gets_at_once: int = limits.MAX_GETS_AT_ONCE
    max_queued_blocks: int = limits.MAX_QUEUED_SAVE_BLOCKS
    """Blocks of saves that wait for their turn; the oldest saves are dropped first."""

    def __post_init__(self) -> None:
        assert self.load_wait_s > 0
        assert self.save_wait_s > 0
        assert self.max_gets_at_once >= 1
        assert self.max_queued_blocks >= 1
