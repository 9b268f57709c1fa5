"""What can happen to the machines of a transfer. All values; `now` travels beside them, never inside.

Message arrivals carry `peer`: for the producer the routing identity of the reader's socket, for the consumer the address
it connected to.
"""

from __future__ import annotations

from typing import Union

import msgspec

from vllm_mooncake_ascend.types import Outcome, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire.messages import FromProducer, FromReader
from vllm_mooncake_ascend.wire.params import RemotePrefill
from vllm_mooncake_ascend.wire.steps import ReadEnded

BlockTable = tuple[tuple[int, ...], ...]
"""Block ids per KV cache group, from prompt token 0 on."""


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


# --- producer (scheduler-role connector of a prefill engine) -----------------------------------------------------------


class PrefillArrived(_Event, frozen=True, kw_only=True):
    """A request with do_remote_decode was admitted. `wanted_id`: the id the proxy minted, None: mint `fresh_id`.

    `fresh_id` is random, drawn by the shell; it is also used when `wanted_id` names a live transfer.
    """

    request_id: RequestId
    wanted_id: TransferId | None
    fresh_id: TransferId
    prompt_digest: bytes
    num_prompt_tokens: int


class PrefillProgressed(_Event, frozen=True, kw_only=True):
    """A step whose output has come back wrote KV: tokens [0, num_tokens) are in `block_ids`, whole blocks only.

    Fed by vLLM's scheduler thread, at once: the blocks are the request's when their pins are taken.
    """

    request_id: RequestId
    num_tokens: int
    block_ids: BlockTable


class PrefillPreempted(_Event, frozen=True, kw_only=True):
    """vLLM took the blocks of a running prefill away: what was offered of them is withdrawn, and read again later."""

    request_id: RequestId


class PrefillEnded(_Event, frozen=True, kw_only=True):
    """The prefill finished. `has_kv`: by length or stop, with the KV of `num_tokens` prompt tokens in `block_ids`
    (tail block included); otherwise by abort or error (`reason`)."""

    request_id: RequestId
    has_kv: bool
    num_tokens: int
    block_ids: BlockTable
    reason: str


class ReaderSpoke(_Event, frozen=True, kw_only=True):
    peer: bytes
    message: FromReader


class LeasesRevoked(_Event, frozen=True, kw_only=True):
    """Drop every lease now: reset_cache, shutdown. Readers get `lost`."""

    reason: str


# --- consumer (scheduler-role connector of a decode engine) -------------------------------------------------------------


class RequestArrived(_Event, frozen=True, kw_only=True):
    """A request with do_remote_prefill was given to the engine."""

    request_id: RequestId
    transfer: RemotePrefill
    prompt_digest: bytes
    num_prompt_tokens: int


class BlocksAllocated(_Event, frozen=True, kw_only=True):
    """vLLM allocated blocks and fixed the range: tokens [num_local_tokens, num_local_tokens + num_remote_tokens) are to
    come from remote; 0 remote tokens: nothing is to be read (any more).

    `block_ids`: the whole local table of the request. `loaded_block_ids`: only the blocks that remote KV is written to,
    in one flat list (these are pinned; a locally hit prefix is not).
    """

    request_id: RequestId
    num_local_tokens: int
    num_remote_tokens: int
    block_ids: BlockTable
    loaded_block_ids: tuple[int, ...]


class RequestEnded(_Event, frozen=True, kw_only=True):
    """vLLM finished or aborted the request, at whatever stage."""

    request_id: RequestId


class ProducerSpoke(_Event, frozen=True, kw_only=True):
    peer: PeerAddress
    message: FromProducer


class PeerDisconnected(_Event, frozen=True, kw_only=True):
    """The socket to the peer broke and was not re-established within its grace, or the peer was never reachable."""

    peer: PeerAddress
    reason: str


class RankReadEnded(_Event, frozen=True, kw_only=True):
    """One decode rank's read has ended (see `wire.steps.ReadEnded`)."""

    ended: ReadEnded


# --- reader (decode worker) -----------------------------------------------------------------------------------------------


class ReadPlanned(_Event, frozen=True, kw_only=True):
    """One part of a read was planned into `num_calls` engine calls (0: nothing of it is this rank's).

    Calls of a read are numbered through all its parts.
    """

    transfer_id: TransferId
    request_id: RequestId
    session: str
    num_calls: int
    part: int = 0
    generation: int = 0
    is_last: bool = True


class ReadRefused(_Event, frozen=True, kw_only=True):
    """A part could not be planned; no call of it was made, and no part after it will come to anything."""

    transfer_id: TransferId
    request_id: RequestId
    reason: str
    part: int = 0


class ReadCancelled(_Event, frozen=True, kw_only=True):
    """Reads are keyed by the local request: n>1 children of one prompt read one transfer, each for itself."""

    request_id: RequestId


class CallEnded(_Event, frozen=True, kw_only=True):
    """The engine call under way ended. `outcome` is already FAILED where the shell fenced an UNKNOWN one."""

    request_id: RequestId
    call_index: int
    outcome: Outcome
    reason: str
    num_bytes: int
    num_descriptors: int


# --- all --------------------------------------------------------------------------------------------------------------------


class TimerFired(_Event, frozen=True, kw_only=True):
    """The time that `next_timer()` named has come (or passed)."""


ProducerEvent = Union[PrefillArrived, PrefillProgressed, PrefillPreempted, PrefillEnded, ReaderSpoke, LeasesRevoked, TimerFired]
ConsumerEvent = Union[RequestArrived, BlocksAllocated, RequestEnded, ProducerSpoke, PeerDisconnected, RankReadEnded, TimerFired]
ReaderEvent = Union[ReadPlanned, ReadRefused, ReadCancelled, CallEnded, TimerFired]
