"""What the product needs of a transfer engine, as a Protocol: real Mooncake and the in-memory engine both follow it.

One contract suite (`testing/contracts.py`) is run against every implementation. The in-memory engine is stricter than
the real one, never kinder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
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
