"""Records of the producer: one transfer, its readers, and how long its blocks must be kept. Decides nothing.

States of a transfer:

    UNKNOWN    not in the table
    AWAITED    somebody subscribed to or released it, no prefill has announced it (yet)
    RUNNING    announced; its prefill runs. Nothing expires here
    LEASED     the prefill ended with KV; the blocks are pinned until all readers are done or the lease is over
    DRAINING   revoked, but a reader may still trust an acknowledged lease: pinned until it answers or that time is over
    ENDED      nothing is pinned; verdicts are remembered for a while
"""

from __future__ import annotations

import dataclasses
import enum

from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.p2p import counters
from vllm_mooncake_ascend.p2p.events import BlockTable
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire.messages import Offer

ReaderKey = tuple[Incarnation, RequestId]
"""A reader is one request of one start of one decode engine (or a proxy that only releases)."""


GONE_TEXTS = {
    counters.RELEASED: "every reader has read or released it",
    counters.EXPIRED: "its lease expired",
    counters.REVOKED: "the prefill engine dropped its leases",
    counters.CAPACITY: "the prefill engine had no room to keep its blocks",
    counters.UNKNOWN_TRANSFER: "no prefill announced it",
    counters.TOO_MANY: "too many readers or transfers wait",
    counters.TOO_LATE: "its lease is about to end",
    counters.READER_DONE: "this reader has read or released it",
}
"""Why there is no such transfer, in words for a reader, by the reason that is counted."""


class TransferState(enum.Enum):
    """See the module's table."""

    UNKNOWN = "unknown"
    AWAITED = "awaited"
    RUNNING = "running"
    LEASED = "leased"
    DRAINING = "draining"
    ENDED = "ended"


class TransferInput(enum.Enum):
    """What can happen to a transfer."""

    ANNOUNCED = "prefill announced"
    PROGRESSED = "prefill progressed"
    PREEMPTED = "prefill preempted"
    ENDED_WITH_KV = "prefill ended with KV"
    ENDED_WITHOUT_KV = "prefill ended without KV"
    SUBSCRIBED = "Subscribe"
    RENEWED = "Renew"
    READ = "ReadDone(ok)"
    RELEASED = "Release, ReadDone(not ok)"
    REVOKED = "leases revoked"
    LAPSED = "time is over"


@dataclasses.dataclass(slots=True)
class Reader:
    """One reader of one transfer."""

    peer: bytes
    """Where its last message came from."""
    promised_until_s: float
    """It may trust the blocks until then: its latest acknowledged renewal plus the ttl."""
    is_done: bool = False
    """It has read or given up; what it says afterwards changes nothing."""
    held: bool = False
    """Its verdict, once done."""
    streams: bool = False
    """It reads while the prefill runs."""
    num_told_blocks: tuple[int, ...] = ()
    """Per KV cache group, of the published table."""


@dataclasses.dataclass(slots=True)
class Transfer:
    """One transfer of this producer."""

    transfer_id: TransferId
    state: TransferState = TransferState.UNKNOWN
    prompt_digest: bytes = b""
    generation: int = 0
    num_tokens: int = 0
    block_ids: BlockTable = ()
    pins: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    """Block ids of each PinBlocks, to be given back by one UnpinBlocks each."""
    kept: tuple[int, ...] = ()
    """Blocks that its lease keeps."""
    readers: dict[ReaderKey, Reader] = dataclasses.field(default_factory=dict)
    awaited_by: Incarnation | None = None
    """Which reader engine made an AWAITED record, for the bound per engine."""
    made_at_s: float = 0.0
    asked_at_s: float = 0.0
    """When the first reader that still waits for the announcement of an AWAITED transfer came."""
    ended_at_s: float = 0.0
    """When the prefill ended."""
    end_reason: str = ""
    """Why an ENDED transfer ended, in words for a reader."""

    def unfinished(self) -> list[tuple[ReaderKey, Reader]]:
        """Readers that may still want the blocks."""
        return [(key, reader) for key, reader in self.readers.items() if not reader.is_done]

    def promised_until_s(self) -> float:
        """No reader trusts the blocks beyond this; 0 without an unfinished reader."""
        return max((reader.promised_until_s for reader in self.readers.values() if not reader.is_done), default=0.0)

    def has_streaming_reader(self) -> bool:
        """Somebody wants to read while the prefill runs."""
        return any(reader.streams and not reader.is_done for reader in self.readers.values())

    def all_readers_done(self) -> bool:
        """There were readers, and none of them wants anything more."""
        return bool(self.readers) and all(reader.is_done for reader in self.readers.values())

    def goes_on(self, block_ids: BlockTable) -> bool:
        """A table begins with what is published."""
        heads = self.block_ids
        return bool(heads) and all(table[: len(head)] == head for table, head in zip(block_ids, heads, strict=True))

    def offer_to(
        self, request_id: RequestId, reader: Reader, producer: Incarnation, lease_ttl_s: float, *, is_whole: bool
    ) -> Offer:
        """What a reader is told of it: before the prefill has ended, blocks only if it streams; without `is_whole` only those
        it was not told of."""
        is_ready = self.state is TransferState.LEASED
        may_read = is_ready or reader.streams
        table = self.block_ids if may_read else ()
        num_known_blocks = () if is_whole else reader.num_told_blocks
        reader.num_told_blocks = tuple(map(len, table))
        if num_known_blocks:
            table = tuple(ids[num_known:] for ids, num_known in zip(table, num_known_blocks, strict=True))
        return Offer(
            incarnation=producer,
            transfer_id=self.transfer_id,
            request_id=request_id,
            state="ready" if is_ready else "pending",
            num_tokens=self.num_tokens if may_read else 0,
            generation=self.generation,
            block_ids=table,
            prompt_digest=self.prompt_digest,
            lease_ttl_s=lease_ttl_s,
            num_layers_ready=0,
            num_known_blocks=num_known_blocks,
        )

    def unpinned_blocks(self, block_ids: BlockTable) -> tuple[int, ...]:
        """The blocks of a table that no pin of this transfer holds, each once; never the null block 0.

        What was published is pinned: of a table that goes on from there only the rest is looked at.
        """
        if self.goes_on(block_ids):
            return blocks_of(tuple(table[len(head) :] for table, head in zip(block_ids, self.block_ids, strict=True)))
        pinned = {block_id for pin in self.pins for block_id in pin}
        return tuple(block_id for block_id in blocks_of(block_ids) if block_id not in pinned)


def blocks_of(block_ids: BlockTable) -> tuple[int, ...]:
    """The blocks of a table, each once; never the null block 0."""
    return tuple(block_id for block_id in dict.fromkeys(block_id for table in block_ids for block_id in table) if block_id)


_S, _I = TransferState, TransferInput

TRANSFER_LAW: Law[TransferState, TransferInput] = Law(
    {
        _S.UNKNOWN: {
            _I.ANNOUNCED: Cell("name it", (_S.RUNNING,)),
            _I.SUBSCRIBED: Cell("Offer(pending) and wait for its prefill; Gone if too many wait", (_S.AWAITED, _S.UNKNOWN)),
            _I.RENEWED: Cell("gone", (_S.UNKNOWN,)),
            _I.READ: Cell("Verdict(lost)", (_S.UNKNOWN,)),
            _I.RELEASED: Cell("remember that this reader left", (_S.AWAITED, _S.UNKNOWN)),
        },
        _S.AWAITED: {
            _I.ANNOUNCED: Cell("name it; its early readers are its readers", (_S.RUNNING,)),
            _I.SUBSCRIBED: Cell("Offer(pending); Gone to a reader that left", (_S.AWAITED,)),
            _I.RENEWED: Cell("acknowledge; a reader that left is gone", (_S.AWAITED,)),
            _I.READ: Cell("Verdict(lost); the reader has left", (_S.AWAITED,)),
            _I.RELEASED: Cell("remember that this reader left", (_S.AWAITED,)),
            _I.LAPSED: Cell("Gone to those who wait; forget it when nobody did", (_S.AWAITED, _S.UNKNOWN)),
        },
        _S.RUNNING: {
            _I.PROGRESSED: Cell("note the tokens; pin and offer them to who streams", (_S.RUNNING,)),
            _I.PREEMPTED: Cell("next generation, unpin, Offer(pending, no blocks)", (_S.RUNNING,)),
            _I.ENDED_WITH_KV: Cell(
                "pin, Offer(ready); end at once if all readers left, or if there is no room for its blocks",
                (_S.LEASED, _S.ENDED),
            ),
            _I.ENDED_WITHOUT_KV: Cell("unpin, Gone", (_S.ENDED,)),
            _I.SUBSCRIBED: Cell("Offer(pending); Gone to a reader that left", (_S.RUNNING,)),
            _I.RENEWED: Cell("acknowledge; a reader that left is gone", (_S.RUNNING,)),
            _I.READ: Cell("Verdict(lost): not all was offered; the reader has left", (_S.RUNNING,)),
            _I.RELEASED: Cell("the reader has left", (_S.RUNNING,)),
            _I.REVOKED: Cell("as if preempted", (_S.RUNNING,)),
        },
        _S.LEASED: {
            _I.SUBSCRIBED: Cell("Offer(ready), one ttl more; Gone to a reader that left or comes too late", (_S.LEASED,)),
            _I.RENEWED: Cell("one ttl more; gone to a reader that left, or when lease_max_s would be passed", (_S.LEASED,)),
            _I.READ: Cell("Verdict(held); end when it was the last reader", (_S.LEASED, _S.ENDED)),
            _I.RELEASED: Cell("the reader has left; end when it was the last", (_S.LEASED, _S.ENDED)),
            _I.REVOKED: Cell("Gone; end when no reader trusts an acknowledged lease", (_S.DRAINING, _S.ENDED)),
            _I.LAPSED: Cell("unpin, Gone", (_S.ENDED,)),
        },
        _S.DRAINING: {
            _I.SUBSCRIBED: Cell("Gone", (_S.DRAINING,)),
            _I.RENEWED: Cell("gone", (_S.DRAINING,)),
            _I.READ: Cell("Verdict(lost); end when no reader trusts its lease any more", (_S.DRAINING, _S.ENDED)),
            _I.RELEASED: Cell("the reader has left; end when no reader trusts its lease any more", (_S.DRAINING, _S.ENDED)),
            _I.REVOKED: Cell("already", (_S.DRAINING,)),
            _I.LAPSED: Cell("unpin", (_S.ENDED,)),
        },
        _S.ENDED: {
            _I.SUBSCRIBED: Cell("Gone, and why", (_S.ENDED,)),
            _I.RENEWED: Cell("gone", (_S.ENDED,)),
            _I.READ: Cell("the same Verdict again; lost to who has none", (_S.ENDED,)),
            _I.RELEASED: Cell("the same Verdict again", (_S.ENDED,)),
            _I.LAPSED: Cell("forget it", (_S.UNKNOWN,)),
        },
    }
)
"""Law of a transfer at the producer. An announcement under an id that is not UNKNOWN or AWAITED is one of a fresh id."""
