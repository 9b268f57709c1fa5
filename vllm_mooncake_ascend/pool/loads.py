"""Loads: from the allocation of blocks for pool tokens to the one report. A part of the scheduler's machine.

All ranks load, each its own shards, and each ends the load once, when nothing of it can land any more: a rank with a get of
unknown outcome fences its store first (`fence`). The blocks are pinned until all have ended, however long that takes. A load
that takes too long, or that one rank could not do, is given up: where a failed receive gives the
request other blocks, it is reported at once and computes while some call may still hang; elsewhere the report waits for the
ranks. States of a load:

    UNKNOWN   not in the table
    LOADING   the ranks load
    STOPPING  nothing will come of it; waits until every rank has ended it, as bytes may land until then

vLLM is owed exactly one report for each order, also for a request it has aborted. Loads have numbers of their own, because a
request whose load was reported may end, and its id come again, while the old load still holds its blocks.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.pool import actions, counters
from vllm_mooncake_ascend.pool.settings import PoolSettings
from vllm_mooncake_ascend.timers import Timers
from vllm_mooncake_ascend.types import Outcome, RequestId, worst
from vllm_mooncake_ascend.wire.pool_steps import GroupBlocks, LoadEnded, LoadOrder
from vllm_mooncake_ascend.wire.steps import Report


class LoadState(enum.Enum):
    """See the module's table."""

    UNKNOWN = "unknown"
    LOADING = "loading"
    STOPPING = "stopping"


class LoadInput(enum.Enum):
    """What can happen to a load."""

    ORDERED = "blocks allocated"
    RANK_FAILED = "a rank failed, others still load"
    ALL_DONE = "all ranks: done"
    ALL_FAILED = "all ranks: worst refused or failed"
    ENDED = "request ended"
    RESET = "pool reset"
    LATE = "time is over"


_S, _I = LoadState, LoadInput
_STOP = Cell("CancelLoad; report failed if pins suffice", (_S.STOPPING,))
_KEEP = Cell("nothing yet: the ranks have not ended", (_S.STOPPING,))
_FAIL = Cell("unpin, report failed if not yet done", (_S.UNKNOWN,))

LOAD_LAW: Law[LoadState, LoadInput] = Law(
    {
        _S.UNKNOWN: {_I.ORDERED: Cell("pin, OrderLoad", (_S.LOADING,))},
        _S.LOADING: {
            _I.RANK_FAILED: _STOP,
            _I.ALL_DONE: Cell("unpin, report received", (_S.UNKNOWN,)),
            _I.ALL_FAILED: _FAIL,
            _I.ENDED: _STOP,
            _I.RESET: _STOP,
            _I.LATE: _STOP,
        },
        _S.STOPPING: {
            _I.RANK_FAILED: _KEEP,
            _I.ALL_DONE: _FAIL,
            _I.ALL_FAILED: _FAIL,
            _I.ENDED: _KEEP,
            _I.RESET: _KEEP,
            _I.LATE: Cell("a rank is overdue: keep the blocks", (_S.STOPPING,)),
        },
    }
)
"""Law of a load."""


@dataclasses.dataclass(slots=True)
class Load:
    """One order to all ranks."""

    load_id: int
    request_id: RequestId
    chain: int
    num_tokens: int
    groups: tuple[GroupBlocks, ...]
    namespace: str
    block_ids: tuple[int, ...]
    """The blocks that are written to, and pinned."""
    state: LoadState = LoadState.UNKNOWN
    outcomes: dict[int, Outcome] = dataclasses.field(default_factory=dict)
    """How the load of each rank ended."""
    failed_block_ids: set[int] = dataclasses.field(default_factory=set)
    """Blocks that some rank did not fill."""
    owes_report: bool = True
    """vLLM waits for the one report of this load."""


class Loads:
    """`let_down` is called once for each load that failed, before its report; `came` for one that is in place."""

    def __init__(
        self,
        settings: PoolSettings,
        do: Callable[[actions.SchedulerAction], None],
        let_down: Callable[[RequestId], None],
        came: Callable[[Load, float], None],
        law: Law[LoadState, LoadInput],
    ) -> None:
        self._settings = settings
        self._do = do
        self._let_down = let_down
        self._came = came
        self._law = law
        self._loads: dict[int, Load] = {}
        self._by_request: dict[RequestId, Load] = {}
        """The load whose report each request waits for."""
        self._timers: Timers[int] = Timers()
        self._last_id = 0
        self.num_pinned_blocks = 0

    def next_timer(self) -> float | None:
        return self._timers.next_s()

    @property
    def num_owed(self) -> int:
        """Requests that vLLM holds back until their load has been reported."""
        return len(self._by_request)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of loads given up in which bytes may still land; counted at each call."""
        return sum(len(load.block_ids) for load in self._loads.values() if load.state is LoadState.STOPPING)

    # --- starting and stopping ----------------------------------------------------------------------------------------

    def get(self, load_id: int) -> Load | None:
        return self._loads.get(load_id)

    def start(self, load: Load, now: float) -> None:
        """vLLM gave the blocks and fixed the range: load it. `load.load_id` is given here."""
        assert load.request_id not in self._by_request, "vLLM waits for one report of a request at a time"
        self._last_id += 1
        load.load_id = self._last_id
        self._loads[load.load_id] = load
        self._by_request[load.request_id] = load
        self.num_pinned_blocks += len(load.block_ids)
        self._do(actions.PinBlocks(request_id=load.request_id, block_ids=load.block_ids))
        order = LoadOrder(load_id=load.load_id, request_id=load.request_id, namespace=load.namespace, groups=load.groups)
        self._do(actions.OrderLoad(order=order))
        self._count(counters.HIT_TOKENS, amount=load.num_tokens)
        self._move(load, LoadInput.ORDERED, LoadState.LOADING, now + self._settings.load_wait_s)

    def refuse(self, request_id: RequestId, block_ids: tuple[int, ...]) -> None:
        """vLLM allocated for tokens that cannot be loaded, and waits: say so."""
        self._count(counters.LOADS_ENDED, counters.CHANGED_MEANWHILE)
        self._let_down(request_id)
        self._do(actions.ReportReceive(report=Report(request_id=request_id, ok=False, block_ids=block_ids)))

    def ended(self, request_id: RequestId, now: float) -> None:
        """vLLM ended the request; if it waits for a report it gets one all the same."""
        load = self._by_request.get(request_id)
        if load is None:
            return
        if load.state is LoadState.LOADING:
            self._count(counters.LOADS_ABORTED)
        self._stop(load, LoadInput.ENDED, now)

    def reset(self, now: float) -> None:
        """What is being loaded is of the past."""
        for load in list(self._loads.values()):
            if load.state is LoadState.LOADING:
                self._fail(load, counters.STOPPED)
            self._stop(load, LoadInput.RESET, now)

    # --- the workers' ends --------------------------------------------------------------------------------------------

    def rank_ended(self, ended: LoadEnded, now: float) -> None:
        """One rank's load has ended; the last one decides what the load has come to. UNKNOWN is no end."""
        load = self._loads.get(ended.load_id)
        if load is None or ended.rank in load.outcomes or ended.outcome is Outcome.UNKNOWN:
            self._count(counters.EVENTS_IGNORED)
            return
        load.outcomes[ended.rank] = ended.outcome
        load.failed_block_ids.update(ended.failed_block_ids)
        is_done = ended.outcome is Outcome.DONE
        if len(load.outcomes) < self._settings.num_ranks:
            if not is_done:
                self._rank_failed(load, ended.reason, now)
            return
        outcome = worst(list(load.outcomes.values()))
        if load.state is LoadState.LOADING and outcome is Outcome.DONE:
            self._count(counters.LOADS_ENDED, counters.DONE)
            self._count(counters.LOADED_TOKENS, amount=load.num_tokens)
            self._came(load, now)
            self._settle(load, LoadInput.ALL_DONE, ok=True)
            return
        if load.state is LoadState.LOADING:
            self._fail(load, ended.reason)
        self._settle(load, LoadInput.ALL_DONE if outcome is Outcome.DONE else LoadInput.ALL_FAILED, ok=False)

    def _rank_failed(self, load: Load, reason: str, now: float) -> None:
        if load.state is LoadState.LOADING:
            self._fail(load, reason)
        self._stop(load, LoadInput.RANK_FAILED, now)

    # --- time ---------------------------------------------------------------------------------------------------------

    def lapse(self, now: float) -> None:
        """Bounds of some loads are over."""
        while (load_id := self._timers.take_due(now)) is not None:
            load = self._loads[load_id]
            if load.state is LoadState.LOADING:
                self._fail(load, counters.TOO_LATE)
                self._stop(load, LoadInput.LATE, now)
            else:
                self._overdue(load)

    def _overdue(self, load: Load) -> None:
        """A rank has not ended within every bound it has; no waiting turns its silence into an end."""
        self._count(counters.LOADS_OVERDUE)
        num_missing = self._settings.num_ranks - len(load.outcomes)
        text = f"{num_missing} of {self._settings.num_ranks} ranks have not ended a pool load; its blocks stay reserved"
        self._do(actions.Note(level="error", text=f"{text}: request_id={load.request_id} load_id={load.load_id}"))
        self._move(load, LoadInput.LATE, LoadState.STOPPING)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _stop(self, load: Load, what: LoadInput, now: float) -> None:
        """Nothing will come of it: no further call, and wait for the ranks."""
        if load.state is LoadState.LOADING:
            self._do(actions.CancelLoad(load_id=load.load_id))
            self._report_if_pins_suffice(load)
            self._move(load, what, LoadState.STOPPING, now + limits.LOAD_END_S)
        else:
            self._move(load, what, load.state)

    def _fail(self, load: Load, reason: str) -> None:
        self._count(counters.LOADS_ENDED, reason)
        self._let_down(load.request_id)

    def _report_if_pins_suffice(self, load: Load) -> None:
        if self._settings.can_report_unknown_at_once:
            self._report(load, ok=False)

    def _report(self, load: Load, *, ok: bool) -> None:
        """Tell vLLM how the receive ended, if it still waits for that. The one way to do so for an ordered load."""
        if not load.owes_report:
            return
        load.owes_report = False
        del self._by_request[load.request_id]
        is_known = len(load.outcomes) == self._settings.num_ranks
        bad = tuple(one for one in load.block_ids if not is_known or one in load.failed_block_ids)
        report = Report(request_id=load.request_id, ok=ok, block_ids=() if ok else bad or load.block_ids)
        self._do(actions.ReportReceive(report=report))

    def _settle(self, load: Load, what: LoadInput, *, ok: bool) -> None:
        """The one end of a load: nothing can land in its blocks any more."""
        self.num_pinned_blocks -= len(load.block_ids)
        self._do(actions.UnpinBlocks(request_id=load.request_id, block_ids=load.block_ids))
        self._report(load, ok=ok)
        self._move(load, what, LoadState.UNKNOWN)

    def _move(self, load: Load, what: LoadInput, after: LoadState, deadline_s: float | None = None) -> None:
        """Change or keep the state. A new state has a new alarm; a kept one keeps what alarm it has."""
        before, load.state = load.state, after
        self._law.check(before, what, after)
        if after is LoadState.UNKNOWN:
            self._timers.drop(load.load_id)
            del self._loads[load.load_id]
        elif deadline_s is not None:
            self._timers.set(load.load_id, deadline_s)

    def _count(self, name: str, reason: str = counters.NO_REASON, *, amount: float = 1.0) -> None:
        self._do(actions.Count(name=name, reason=reason, amount=amount))
