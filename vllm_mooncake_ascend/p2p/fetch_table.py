"""The consumer's table of fetches: states, alarms, pins, and the one gate through which vLLM is told anything.

It keeps the law and the accounts; what an event means is the business of `consumer` and `reads`.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_mooncake_ascend.law import Law
from vllm_mooncake_ascend.p2p import actions
from vllm_mooncake_ascend.p2p.fetches import UNALLOCATED, Fetch, FetchInput, FetchState, PeerKey
from vllm_mooncake_ascend.timers import Timers
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.steps import Report


class FetchTable:
    """Fetches by request. `move` is the one way to change a state, `report` the one way to tell vLLM."""

    def __init__(
        self,
        law: Law[FetchState, FetchInput],
        do: Callable[[actions.ConsumerAction], None],
        timers: Timers[RequestId | PeerKey],
    ) -> None:
        self._law = law
        self._do = do
        self._timers = timers
        self._fetches: dict[RequestId, Fetch] = {}
        self._num_unallocated = 0
        self._num_owed = 0
        self.num_pinned_blocks = 0

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def num_waiting(self) -> int:
        """Requests that vLLM holds back for us: it asks again and again, or waits for a report."""
        return self._num_unallocated + self._num_owed

    def get(self, request_id: RequestId) -> Fetch | None:
        return self._fetches.get(request_id)

    def num_quarantined_blocks(self) -> int:
        """Blocks in which bytes may still land; counted at each call."""
        quarantined = (fetch for fetch in self._fetches.values() if fetch.state is FetchState.QUARANTINED)
        return sum(len(fetch.loaded_block_ids) for fetch in quarantined)

    def awaits_ranks(self) -> bool:
        """Some read has all it needs; looked up at each call."""
        reading = (fetch.offer for fetch in self._fetches.values() if fetch.state is FetchState.READING)
        return any(offer is not None and offer.state == "ready" for offer in reading)

    def move(self, fetch: Fetch, what: FetchInput, after: FetchState, deadline_s: float | None = None) -> None:
        """Change or keep the state. A new state has the alarm `deadline_s` or none; a kept one keeps its own if it is None."""
        before, fetch.state = fetch.state, after
        self._law.check(before, what, after)
        if before is after and deadline_s is None:
            return
        self._num_unallocated += (after in UNALLOCATED) - (before in UNALLOCATED)
        if before is FetchState.UNKNOWN:
            self._fetches[fetch.request_id] = fetch
        elif after is FetchState.UNKNOWN:
            del self._fetches[fetch.request_id]
        if deadline_s is None:
            self._timers.drop(fetch.request_id)
        else:
            self._timers.set(fetch.request_id, deadline_s)

    def owe(self, fetch: Fetch, loaded_block_ids: tuple[int, ...]) -> None:
        """vLLM allocated blocks for remote KV, and waits from now on for one report."""
        assert not fetch.owes_report, "vLLM waits for one report at a time"
        fetch.owes_report = True
        fetch.loaded_block_ids = loaded_block_ids
        self._num_owed += 1

    def pin(self, fetch: Fetch) -> None:
        """Keep the blocks that remote KV is written to out of circulation."""
        assert not fetch.is_pinned, "blocks of a fetch are pinned once"
        fetch.is_pinned = True
        self.num_pinned_blocks += len(fetch.loaded_block_ids)
        self._do(actions.PinBlocks(transfer_id=fetch.transfer.transfer_id, block_ids=fetch.loaded_block_ids))

    def report(self, fetch: Fetch, *, ok: bool) -> None:
        """Tell vLLM how the receive ended, if it still waits for that."""
        if fetch.owes_report:
            fetch.owes_report = False
            self._num_owed -= 1
            report = Report(request_id=fetch.request_id, ok=ok, block_ids=fetch.loaded_block_ids)
            self._do(actions.ReportReceive(report=report))

    def report_stranger(self, request_id: RequestId, num_remote_tokens: int, block_ids: tuple[int, ...]) -> None:
        """vLLM allocated blocks for a request we know nothing of: if it waits for KV, none will come."""
        if num_remote_tokens > 0:
            self._do(actions.ReportReceive(report=Report(request_id=request_id, ok=False, block_ids=block_ids)))

    def settle(self, fetch: Fetch, what: FetchInput, *, ok: bool) -> None:
        """The one end of a fetch that vLLM allocated blocks for: nothing can land in them any more."""
        if fetch.is_pinned:
            fetch.is_pinned = False
            self.num_pinned_blocks -= len(fetch.loaded_block_ids)
            self._do(actions.UnpinBlocks(transfer_id=fetch.transfer.transfer_id, block_ids=fetch.loaded_block_ids))
        self.report(fetch, ok=ok)
        fetch.offer = None
        self.move(fetch, what, FetchState.UNKNOWN if fetch.is_over else FetchState.SPENT)
