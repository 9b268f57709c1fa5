"""What the product needs of a transfer engine and of a store, as Protocols: real Mooncake and doubles in memory follow them.

One contract suite each (`testing/contracts.py`, `testing/store_contracts.py`) is run against every implementation. The
doubles are stricter than the real ones, never kinder.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import msgspec

from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.types import Outcome, Session


class ReadResult(msgspec.Struct, frozen=True, kw_only=True):
    """End of one engine call."""

    outcome: Outcome
    reason: str
    """Empty when DONE; else what failed, the engine's code with its meaning, and what to do."""


class TransferEngine(Protocol):
    """One engine of one worker process. `read` is called by one thread at a time; the rest from any thread."""

    @property
    def session(self) -> Session:
        """Where peers read our registered memory."""

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable for peers and usable as a target of `read`. Idempotent for a region already covered.

        Raises:
            EngineError(REFUSED): a region overlaps a registered one in part, or a limit is passed.
        """

    def read(self, session: Session, batch: CopyBatch) -> ReadResult:
        """Copy from the peer's registered memory into ours; blocks until the outcome is known.

        REFUSED without any byte moved when a target run is not inside a registered region, the batch is larger than
        `limits.MAX_CALL_DESCRIPTORS` or `limits.MAX_CALL_BYTES`, or the engine is closed. FAILED when the peer could not
        be reached at all. UNKNOWN for everything else that went wrong.
        Never raises for what the peer or the network does.
        """

    def fence(self) -> bool:
        """After an UNKNOWN read: make sure that nothing of any earlier read can land any more.

        Returns True when that is certain now (over TCP: the reading engine was destroyed and is made anew at the next
        read; also when no read was UNKNOWN), False where the engine has no such means (Ascend, RDMA) and some read was
        UNKNOWN; then only `limits.QUARANTINE_S` helps.
        """

    def close(self) -> None:
        """Unregister and stop; waits for a read under way. Further calls are REFUSED, a second close does nothing."""


StoreKey = str
"""Name of one object: printable ASCII, at most `limits.MAX_ID_CHARS` characters."""


class KeyOutcome(enum.Enum):
    """What is known of one key after a call of the store."""

    DONE = "done"
    """Get: every byte is in place and the value has the expected length. Exists: it is there now. Remove: it is gone."""
    ACCEPTED = "accepted"
    """Put: the store took the call for good. Not to say that it keeps *these* bytes: another client may have put the key
    before, or be putting it, or have died in the midst of it."""
    MISSING = "missing"
    """Get, exists, remove: certainly not there; the target is untouched."""
    FULL = "full"
    """Put: no room; no byte moved and none will."""
    IN_USE = "in use"
    """Remove: still there, under an object lease or while somebody writes it. It can go later."""
    REFUSED = "refused"
    """No call was made."""
    FAILED = "failed"
    """Nothing of it moves any more; a get's target holds an undefined mix of old and new bytes."""
    UNKNOWN = "unknown"
    """Get: bytes may still land in the target. Put: the source may still be read, at any later time, and what is found there
    may land in memory that the pool has given to other objects by then. Exists, remove: no answer."""


class KeyResult(msgspec.Struct, frozen=True, kw_only=True):
    """End of one key's part of a call."""

    outcome: KeyOutcome
    code: int
    """Mooncake's own, 0 where it was not asked or had nothing to complain of."""
    reason: str
    """Empty when DONE, ACCEPTED or MISSING; else what failed, the code with its meaning, and what to do."""


class StoreAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """End of one call: a result for each key, in the order of the keys."""

    results: tuple[KeyResult, ...]
    is_lost: bool
    """The call showed that the master does not answer. Further calls may cost seconds each: open the breaker."""

    @property
    def outcomes(self) -> tuple[KeyOutcome, ...]:
        return tuple(result.outcome for result in self.results)


class StoreHealth(enum.Enum):
    """Whether a store can be used."""

    CONNECTED = "connected"
    UNREACHABLE = "unreachable"
    """The master does not answer. The client goes on trying, and connects again by itself."""
    CLOSED = "closed"
    """There is no client: `connect` was not called, or failed, or the store is closed."""


class KVStore(Protocol):
    """One worker's or scheduler's door to the shared pool. All methods may be called from any thread, at the same time.

    Calls never raise for what the master, an owner of memory or the network does. A call of put or get may take
    `limits.STORE_CALL_S`: only use threads that may wait so long. One call holds at most `limits.MAX_CALL_DESCRIPTORS`
    buffers and `limits.MAX_CALL_BYTES` bytes, a seal of each key included, or a single key; each key once; exists and remove
    at most `limits.MAX_LOOKUP_KEYS` keys. What is beyond that is REFUSED whole.
    """

    def connect(self) -> None:
        """Become a client of the master, with the memory registered so far. Does nothing when connected.

        Raises:
            EngineError: no master answers, or it does not take us. May be tried again.
        """

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory usable as source and target. As `TransferEngine.register`; may come before `connect`."""

    def put(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        """Store the bytes of each key's buffers under it, unless it exists. ACCEPTED, FULL, REFUSED, FAILED or UNKNOWN."""

    def get(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        """Copy each key's value into its buffers. DONE, MISSING, REFUSED, FAILED or UNKNOWN.

        A value whose length is not `batch.value_bytes` is never DONE.
        """

    def exists(self, keys: Sequence[StoreKey]) -> StoreAnswer:
        """Look each key up: DONE, MISSING, REFUSED or UNKNOWN. What is found is kept for the master's object lease."""

    def remove(self, keys: Sequence[StoreKey], *, prefix: str, even_in_use: bool = False) -> StoreAnswer:
        """Take each key out of the pool: DONE, MISSING, IN_USE, REFUSED or UNKNOWN.

        Args:
            prefix: what all keys must begin with, or the call is REFUSED whole: a pool is shared with strangers.
            even_in_use: also under an object lease, so that a reader may get other bytes: only for what is broken.
        """

    def health(self) -> StoreHealth:
        """Where we lend memory: what our own client's last ping said, some seconds old, at no cost. Else the master is asked,
        which takes `limits.STORE_RPC_MS` when it is silent and 5 s right after its death."""

    def fence(self) -> bool:
        """After an UNKNOWN get: make sure that no byte of any earlier one lands any more.

        The client that gets is closed and made anew. Where it also puts, nothing of an earlier put is read any more either,
        and the memory it lends to the pool goes with it. True when it is certain (also when nothing is unknown). False while a
        call is under way: until that ends new calls are REFUSED; ask again. Needs no master.
        """

    def close(self) -> bool:
        """Waits for calls under way, at most `limits.STORE_CALL_S`. Further calls are REFUSED.

        Returns True when all is closed: nothing of any call moves any more. False: a call does not end; close again, later.
        """
