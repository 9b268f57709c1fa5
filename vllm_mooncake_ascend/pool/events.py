"""What can happen to the machines of the pool. All values; `now` travels beside them, never inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import msgspec

from vllm_mooncake_ascend.types import Outcome, RequestId
from vllm_mooncake_ascend.wire.pool_steps import LoadEnded, SaveEnded

BlockTable = tuple[tuple[int, ...], ...]
"""Block ids per KV cache group, from prompt token 0 on; 0 where a group holds nothing (any more)."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# --- scheduler -----------------------------------------------------------------------------------------------------------


class RequestArrived(_Event, frozen=True, kw_only=True):
    """A request was given to the engine (`on_new_request`, on older vLLM its first query).

    `hashes` is vLLM's own list of block hashes, not a copy: it grows with the request.
    """

    request_id: RequestId
    hashes: Sequence[bytes]
    num_prompt_tokens: int
    num_local_tokens: int
    """What the local cache seems to have; only what is beyond is asked for. A guess too low costs time, one too high a hit."""
    may_load: bool
    """False: it is not to look into the pool (prompt log probabilities, another source goes first)."""
    may_save: bool


class AdmissionTried(_Event, frozen=True, kw_only=True):
    """vLLM asks for remote tokens (again). Precedes every `hit_tokens`: the first one starts the time that is waited."""

    request_id: RequestId
    num_local_tokens: int


class LookupEnded(_Event, frozen=True, kw_only=True):
    """The store has answered a lookup. `end_token`: of the longest usable prefix, the asked `first_token` for none."""

    lookup_id: int
    end_token: int
    is_lost: bool
    """The call showed that the store does not answer."""


class BlocksAllocated(_Event, frozen=True, kw_only=True):
    """vLLM allocated blocks and fixed the range: tokens [num_local_tokens, num_local_tokens + num_remote_tokens) are to
    come from the pool; 0 remote tokens: nothing is to be loaded.

    `loaded_block_ids`: only the blocks that are written to, in one flat list (these are pinned).
    """

    request_id: RequestId
    num_local_tokens: int
    num_remote_tokens: int
    block_ids: BlockTable
    loaded_block_ids: tuple[int, ...]


class RankLoadEnded(_Event, frozen=True, kw_only=True):
    ended: LoadEnded


class ChunkComputed(_Event, frozen=True, kw_only=True):
    """A step whose output has come back wrote KV: tokens [0, num_tokens) are in `block_ids`.

    `chain` is what `PoolScheduler.chain` said when the step was scheduled. Fed before the blocks can be freed.
    """

    request_id: RequestId
    chain: int
    num_tokens: int
    block_ids: BlockTable


class RankSaveEnded(_Event, frozen=True, kw_only=True):
    ended: SaveEnded


class RequestPreempted(_Event, frozen=True, kw_only=True):
    """vLLM took its blocks away. Saves that were ordered go on, from their pins."""

    request_id: RequestId


class RequestEnded(_Event, frozen=True, kw_only=True):
    """vLLM finished or aborted the request, at whatever stage."""

    request_id: RequestId


class PoolReset(_Event, frozen=True, kw_only=True):
    """`reset_cache`: what live requests have computed is of the past. Everything from now on is under `namespace`."""

    namespace: str


# --- worker ----------------------------------------------------------------------------------------------------------------


class LoadPlanned(_Event, frozen=True, kw_only=True):
    """A load order was cut into calls: the block of each key of each call. No call: nothing of it is this rank's."""

    load_id: int
    calls: tuple[tuple[int, ...], ...]


class LoadRefused(_Event, frozen=True, kw_only=True):
    """The order could not be planned; no call was made and none will be."""

    load_id: int
    block_ids: tuple[int, ...]


class LoadCancelled(_Event, frozen=True, kw_only=True):
    load_id: int


class GetEnded(_Event, frozen=True, kw_only=True):
    """One get has ended. `outcomes`: per key; a value of another size than expected is FAILED, and so is a missing one."""

    load_id: int
    call_index: int
    outcomes: tuple[Outcome, ...]
    num_missing: int
    """Keys that were not in the pool (any more)."""
    num_bytes: int
    is_lost: bool
    """The call showed that the store does not answer."""


class SavePlanned(_Event, frozen=True, kw_only=True):
    """A save order was cut into calls: keys of each. No call: nothing of it is this rank's."""

    save_id: int
    chain: int
    calls: tuple[int, ...]


class SaveRefused(_Event, frozen=True, kw_only=True):
    """The order could not be planned; no call was made and none will be."""

    save_id: int
    chain: int


class PutEnded(_Event, frozen=True, kw_only=True):
    """One put has ended. `outcomes`: per key; FAILED where the store had no room."""

    save_id: int
    call_index: int
    outcomes: tuple[Outcome, ...]
    num_bytes: int
    is_full: bool
    """Some key found no room."""
    is_lost: bool


class FenceEnded(_Event, frozen=True, kw_only=True):
    """A fence of the store has ended."""

    holds: bool
    """It is certain that nothing of any earlier call moves any more. False also when it raised."""


# --- both ------------------------------------------------------------------------------------------------------------------


class ProbeEnded(_Event, frozen=True, kw_only=True):
    """Whether the store's client finds itself healthy."""

    is_healthy: bool


class StoreLost(_Event, frozen=True, kw_only=True):
    """There is no client of the store: no call need find out how that is."""


class TimerFired(_Event, frozen=True, kw_only=True):
    """The time that `next_timer()` named has come (or passed)."""


SchedulerEvent = Union[
    RequestArrived,
    AdmissionTried,
    LookupEnded,
    BlocksAllocated,
    RankLoadEnded,
    ChunkComputed,
    RankSaveEnded,
    RequestPreempted,
    RequestEnded,
    PoolReset,
    ProbeEnded,
    StoreLost,
    TimerFired,
]
WorkerEvent = Union[
    LoadPlanned,
    LoadRefused,
    LoadCancelled,
    GetEnded,
    SavePlanned,
    SaveRefused,
    PutEnded,
    FenceEnded,
    ProbeEnded,
    StoreLost,
    TimerFired,
]
