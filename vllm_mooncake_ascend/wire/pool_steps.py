"""What one engine step carries for the prefix pool: orders from the scheduler to its workers, and their ends back.

vLLM pickles both between the processes of one engine; they carry no device object. Every rank ends every order once. Loads
and saves have numbers of their own, because request ids come again.
"""

from __future__ import annotations

import msgspec

from vllm_mooncake_ascend.planner.pool_keys import Shard
from vllm_mooncake_ascend.types import Outcome, RequestId


class GroupBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of one KV cache group and the hash of each, in the order of the prompt. Neither is empty."""

    group_index: int
    block_ids: tuple[int, ...]
    hashes: tuple[bytes, ...]


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Get these blocks from the pool. `namespace`: the first part of their keys."""

    load_id: int
    request_id: RequestId
    namespace: str
    groups: tuple[GroupBlocks, ...]


class SaveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Put these blocks, which are pinned and whose KV is written, into the pool.

    `chain` is equal for the saves of one request up to its preemption: after a gap in it the rest is of no use.
    """

    save_id: int
    chain: int
    request_id: RequestId
    namespace: str
    groups: tuple[GroupBlocks, ...]


class LoadEnded(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's load has ended: no call of it is under way, none will start, and nothing of it can land any more."""

    load_id: int
    rank: int
    outcome: Outcome
    """REFUSED: no call was made. FAILED: some block did not come; see `failed_block_ids`. Never UNKNOWN: the rank fences."""
    failed_block_ids: tuple[int, ...]
    """Blocks that do not hold what was asked for."""
    missing_block_ids: tuple[int, ...] = ()
    """Of these, blocks of which it is certain that the pool does not have them (any more)."""
    reason: str
    """A reason of `pool.counters`, "" when DONE."""
    num_bytes: int
    seconds: float


class SaveEnded(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's save has ended: no call of it is under way and none will start."""

    save_id: int
    rank: int
    outcome: Outcome
    """DONE: the store took every key, which is not to say that it kept them."""
    reason: str
    """A reason of `pool.counters`, "" when DONE."""
    num_bytes: int
    seconds: float


class PoolStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must do for the pool in this step. Order of execution: shards, cancels, loads, saves."""

    shards: tuple[Shard, ...] = ()
    """All shards of the engine, from which a worker takes which blocks are its own to save. In the first step that has a save,
    or any number of them; before it has heard them a worker refuses saves. Loads need none."""
    cancels: tuple[int, ...] = ()
    """Ids of loads of which no further call is to start."""
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()


EMPTY_POOL_STEP = PoolStep()


class PoolResults(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker (or, after aggregation, all of them) has to tell its scheduler about the pool."""

    loads: tuple[LoadEnded, ...] = ()
    saves: tuple[SaveEnded, ...] = ()


NO_POOL_RESULTS = PoolResults()
