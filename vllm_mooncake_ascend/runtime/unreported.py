"""Unreported: the receives vLLM waits for, so that a broken state machine cannot leave a request waiting for ever.

vLLM is owed exactly one report from the moment it allocates blocks for remote tokens. While all is well the machine gives
it and this book only watches; once a request's machine is broken the book gives the report, and lets no other through.
"""

from __future__ import annotations

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.steps import Report


class Unreported:
    """Of one machine; bounded by the requests vLLM has blocks for. Whoever owns it serialises the calls."""

    def __init__(self) -> None:
        self._loaded_block_ids: dict[RequestId, tuple[int, ...]] = {}
        self._broken: dict[RequestId, None] = {}
        """Oldest first; an ended request may stay until there is no room, for its id is not asked about again."""

    def owe(self, request_id: RequestId, loaded_block_ids: tuple[int, ...]) -> None:
        """vLLM has allocated these blocks for remote tokens. Noted before the machine hears of it."""
        self._loaded_block_ids[request_id] = loaded_block_ids

    @property
    def owed(self) -> tuple[RequestId, ...]:
        """Requests whose report is due."""
        return tuple(self._loaded_block_ids)

    def may_report(self, request_id: RequestId) -> bool:
        """Whether the machine's report may go to vLLM: once for each allocation."""
        return self._loaded_block_ids.pop(request_id, None) is not None

    def break_off(self, request_id: RequestId) -> Report | None:
        """The request's machine is broken: its failure, if vLLM waits for one. Its blocks stay pinned."""
        self._broken[request_id] = None
        if len(self._broken) > limits.MAX_WAITING_REQUESTS:
            del self._broken[next(iter(self._broken))]
        block_ids = self._loaded_block_ids.pop(request_id, None)
        return None if block_ids is None else Report(request_id=request_id, ok=False, block_ids=block_ids)

    def is_broken(self, request_id: RequestId) -> bool:
        """Nothing remote is to be had for this request any more."""
        return request_id in self._broken
