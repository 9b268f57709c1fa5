"""Scheduler -> worker step and worker -> scheduler results: the connector's metadata of one engine step.

vLLM pickles both between the processes of one engine; they carry no device object. An idle step is `EMPTY_STEP`.
"""

from __future__ import annotations

import msgspec

from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.types import Incarnation, Outcome, RequestId, TransferId


class PeerRanks(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of a producer, sent to the workers once before the first read from it."""

    incarnation: Incarnation
    ranks: tuple[RankLayout, ...]


class ReadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Read the KV of prompt tokens [first_token, end_token) of one transfer into local blocks: one part of a read.

    `remote_block_ids` and `local_block_ids` are per KV cache group, counted from prompt token `table_token`; positions before
    `first_token` may be 0 (null) on either side. `request_id` is the local one. A part may be of no tokens, and
    then has no tables.
    """

    transfer_id: TransferId
    request_id: RequestId
    incarnation: Incarnation
    first_token: int
    end_token: int
    remote_block_ids: tuple[tuple[int, ...], ...]
    local_block_ids: tuple[tuple[int, ...], ...]
    part: int = 0
    """Parts of a read count from 0 and come in order."""
    generation: int = 0
    """Of the prefill: parts of an older one are of no use any more, and their calls that have not begun never do."""
    table_token: int = 0
    """A block begins with it in every group of both sides, so that a part carries its own blocks only."""
    is_last: bool = True
    """No part follows: the read ends when everything ordered so far of this generation is done."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Tell vLLM, in this step, that the receive of a request has ended; every worker reports it once."""

    request_id: RequestId
    ok: bool
    block_ids: tuple[int, ...]
    """Blocks to name as invalid on vLLM < 0.30 when not ok."""


class WorkerStep(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must do in this step. Order of execution: peers, reads, cancels, forget.

    Reads are keyed by the local request everywhere: n>1 children of one prompt read one transfer, each for itself.
    """

    peers: tuple[PeerRanks, ...] = ()
    reads: tuple[ReadOrder, ...] = ()
    cancels: tuple[RequestId, ...] = ()
    forget: tuple[Incarnation, ...] = ()


EMPTY_STEP = WorkerStep()


class ReadEnded(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's read has ended: no call of it is under way and none will start."""

    transfer_id: TransferId
    request_id: RequestId
    rank: int
    outcome: Outcome
    reason: str
    num_bytes: int
    num_descriptors: int
    seconds: float
    """Wall time from the start of the first engine call to the end of the last, less what it waited for parts to come."""


class WorkerResults(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker (or, after aggregation, all of them) has to tell its scheduler."""

    ended: tuple[ReadEnded, ...] = ()


NO_READS = WorkerResults()
