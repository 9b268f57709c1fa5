"""What the machines of a transfer ask for. Shells carry these out in order and feed outcomes back as events.

Which thread: `SendTo...` by the control thread that owns the sockets; `PinBlocks`, `UnpinBlocks`, `OrderRead`,
`CancelRead`, `ShareLayout`, `ForgetLayout`, `ReportReceive`, `NameTransfer` by vLLM's scheduler thread at its next hook
(`NameTransfer` and pins of an event fed by that thread: at once); `StartCall` and `EndRead` by the worker's transfer
thread.
"""

from __future__ import annotations

from typing import Union

import msgspec

from vllm_mooncake_ascend.types import PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire.messages import FromProducer, FromReader
from vllm_mooncake_ascend.wire.steps import PeerRanks, ReadEnded, ReadOrder, Report


class _Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class SendToReader(_Action, frozen=True, kw_only=True):
    peer: bytes
    message: FromProducer


class SendToProducer(_Action, frozen=True, kw_only=True):
    peer: PeerAddress
    message: FromReader


class ClosePeer(_Action, frozen=True, kw_only=True):
    """Nothing is expected from this producer any more; the socket to it may go."""

    peer: PeerAddress


class NameTransfer(_Action, frozen=True, kw_only=True):
    """The id under which the prefill request's KV will be offered."""

    request_id: RequestId
    transfer_id: TransferId


class PinBlocks(_Action, frozen=True, kw_only=True):
    """Take one block-pool reference on each block."""

    transfer_id: TransferId
    block_ids: tuple[int, ...]


class UnpinBlocks(_Action, frozen=True, kw_only=True):
    """Give back the references of one `PinBlocks` (the same ids, exactly once)."""

    transfer_id: TransferId
    block_ids: tuple[int, ...]


class ShareLayout(_Action, frozen=True, kw_only=True):
    """Give the workers a producer's layout; precedes the first OrderRead that needs it."""

    peer: PeerRanks


class ForgetLayout(_Action, frozen=True, kw_only=True):
    incarnation: str


class OrderRead(_Action, frozen=True, kw_only=True):
    order: ReadOrder


class CancelRead(_Action, frozen=True, kw_only=True):
    """Start no further call for this request's read; each rank still answers with ReadEnded.

    Keyed by the local request, as all reads are: n>1 children of one prompt read one transfer, each for itself.
    """

    transfer_id: TransferId
    request_id: RequestId


class ReportReceive(_Action, frozen=True, kw_only=True):
    """The one report of a request's receive to vLLM."""

    report: Report


class StartCall(_Action, frozen=True, kw_only=True):
    """Reader: run engine call `call_index` of the plan; at most one call is under way at a time."""

    transfer_id: TransferId
    request_id: RequestId
    call_index: int


class EndRead(_Action, frozen=True, kw_only=True):
    """Reader: the read of this rank has ended; tell the scheduler and drop the plan."""

    ended: ReadEnded


class Count(_Action, frozen=True, kw_only=True):
    """Add to a counter of `metrics.names`; `reason` is a label from a bounded set ("" where the counter has none)."""

    name: str
    reason: str = ""
    amount: float = 1.0


class Note(_Action, frozen=True, kw_only=True):
    """One line for the operator: a state change that can be acted on. Goes to the log with the transfer's story."""

    level: str
    """info, warning or error."""
    transfer_id: TransferId
    text: str


ProducerAction = Union[SendToReader, NameTransfer, PinBlocks, UnpinBlocks, Count, Note]
ConsumerAction = Union[
    SendToProducer,
    ClosePeer,
    PinBlocks,
    UnpinBlocks,
    ShareLayout,
    ForgetLayout,
    OrderRead,
    CancelRead,
    ReportReceive,
    Count,
    Note,
]
ReaderAction = Union[StartCall, EndRead, Count, Note]
