"""What the machines of the pool ask for. Shells carry these out in order and feed outcomes back as events.

Which thread: `StartLookup`, `StartGet`, `StartPut`, `FenceStore` and `ProbeStore` by threads that may block (lookups, gets and
puts on threads of their own, as many as may be under way at once; a fence on any of those for gets); `PinBlocks`,
`UnpinBlocks`, `Order...`, `CancelLoad`, `ReportReceive` and those of KV events by vLLM's scheduler thread, pins before the hook
returns that fed the event; `End...` go up with the worker's next output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Union

import msgspec

from vllm_mooncake_ascend.pool.known import BlockName
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.pool_steps import LoadEnded, LoadOrder, SaveEnded, SaveOrder
from vllm_mooncake_ascend.wire.steps import Report


class _Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class StartLookup(_Action, frozen=True, kw_only=True):
    """Ask the store, in one batch call, for all that a prefix in (first_token, end_token] may need (`planner.hits`).

    Answered by one LookupEnded. `hashes` is vLLM's list: take what is needed of it, as it may grow meanwhile.
    """

    lookup_id: int
    request_id: RequestId
    namespace: str
    hashes: Sequence[bytes]
    first_token: int
    end_token: int


class PinBlocks(_Action, frozen=True, kw_only=True):
    """Take one block-pool reference on each block."""

    request_id: RequestId
    block_ids: tuple[int, ...]


class UnpinBlocks(_Action, frozen=True, kw_only=True):
    """Give back the references of one `PinBlocks` (the same ids, exactly once)."""

    request_id: RequestId
    block_ids: tuple[int, ...]


class OrderLoad(_Action, frozen=True, kw_only=True):
    """Every rank ends it once, with LoadEnded."""

    order: LoadOrder


class CancelLoad(_Action, frozen=True, kw_only=True):
    """Start no further get of this load; each rank still ends it."""

    load_id: int


class OrderSave(_Action, frozen=True, kw_only=True):
    """Every rank ends it once, with SaveEnded."""

    order: SaveOrder


class Stored(_Action, frozen=True, kw_only=True):
    """All blocks of this save can be loaded from the pool: to be told as a KV event. Each save that was ordered ends in this or
    in `NotStored`, where `PoolSettings.tells_events`."""

    save_id: int


class NotStored(_Action, frozen=True, kw_only=True):
    """Nothing is to be told of this save."""

    save_id: int


class Gone(_Action, frozen=True, kw_only=True):
    """Of what was told as stored, these can not be loaded any more, or that is not certain. Never empty."""

    blocks: tuple[BlockName, ...]


class ReportReceive(_Action, frozen=True, kw_only=True):
    """The one report of a request's receive to vLLM."""

    report: Report


class StartGet(_Action, frozen=True, kw_only=True):
    """Worker: run get `call_index` of the load's plan. Answered by one GetEnded."""

    load_id: int
    call_index: int


class EndLoad(_Action, frozen=True, kw_only=True):
    """Worker: tell the scheduler and drop the plan."""

    ended: LoadEnded


class StartPut(_Action, frozen=True, kw_only=True):
    """Worker: run put `call_index` of the save's plan, perhaps once more; one put is under way at a time."""

    save_id: int
    call_index: int


class EndSave(_Action, frozen=True, kw_only=True):
    """Worker: tell the scheduler and drop the plan."""

    ended: SaveEnded


class ProbeStore(_Action, frozen=True, kw_only=True):
    """Ask the store's client for its health. Answered by one ProbeEnded."""


class FenceStore(_Action, frozen=True, kw_only=True):
    """Worker: fence the store (`KVStore.fence`). Answered by one FenceEnded; no get of this worker starts before that,
    and no put but those of a save that is under way."""


class Count(_Action, frozen=True, kw_only=True):
    """Add to a counter of `pool.counters`; `reason` is a label from a bounded set ("" where the counter has none)."""

    name: str
    reason: str = ""
    amount: float = 1.0


class Note(_Action, frozen=True, kw_only=True):
    """One line for the operator: a state change that can be acted on."""

    level: str
    """info, warning or error."""
    text: str


SchedulerAction = Union[
    StartLookup,
    PinBlocks,
    UnpinBlocks,
    OrderLoad,
    CancelLoad,
    OrderSave,
    Stored,
    NotStored,
    Gone,
    ReportReceive,
    ProbeStore,
    Count,
    Note,
]
WorkerAction = Union[StartGet, EndLoad, StartPut, EndSave, FenceStore, ProbeStore, Count, Note]
