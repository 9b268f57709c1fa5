"""Book: what the scheduler of one engine knows of each live request for the pool's sake. Decides nothing.

A *chain* is one life of a request from its start, or its last preemption, on. Its number never comes again, so whatever was
noted in an earlier life, or for an earlier request of the same id, cannot be taken for news of this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm_mooncake_ascend.types import RequestId


@dataclasses.dataclass(slots=True)
class Entry:
    """One live request."""

    request_id: RequestId
    hashes: Sequence[bytes]
    """vLLM's own list, which grows."""
    chain: int
    may_save: bool
    """False from the first gap of this chain on, and for good after a reset."""
    is_past: bool = False
    """A reset came while it lived: its KV is of the past, and nothing of it is saved any more."""
    saved_tokens: int = 0
    """Save cursor: what of this chain was looked at for saving."""


class Book:
    """Entries by request; `len` is their number."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, Entry] = {}
        self._last_chain = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: RequestId) -> Entry | None:
        return self._entries.get(request_id)

    def chain(self, request_id: RequestId) -> int | None:
        """Number of the request's present life, None for a stranger."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.chain

    def open(self, request_id: RequestId, hashes: Sequence[bytes], *, may_save: bool) -> Entry:
        """A request begins; an entry of the same id is of another request, and is forgotten."""
        self._last_chain += 1
        entry = Entry(request_id=request_id, hashes=hashes, chain=self._last_chain, may_save=may_save)
        self._entries[request_id] = entry
        return entry

    def preempted(self, request_id: RequestId) -> None:
        """Another life begins, with nothing computed. It may save again: what its gap was is a matter of the past."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._last_chain += 1
            entry.chain, entry.saved_tokens = self._last_chain, 0

    def reset(self) -> None:
        """What live requests have computed is of the past."""
        for entry in self._entries.values():
            entry.is_past = True
            self.preempted(entry.request_id)

    def close(self, request_id: RequestId) -> None:
        self._entries.pop(request_id, None)

    def broken(self, request_id: RequestId, chain: int) -> None:
        """A save of this chain failed: what would follow it is behind a gap."""
        entry = self._entries.get(request_id)
        if entry is not None and entry.chain == chain:
            entry.may_save = False
