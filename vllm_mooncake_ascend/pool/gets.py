"""Gets: which call of which load a worker runs next. A part of the worker's machine.

Loads take turns call by call, one call of each at a time, so that none waits behind the whole of another; a few calls may be
under way at once, so that one that hangs does not hold up all. States of a load at a worker:

    UNKNOWN    not in the table
    QUEUED     no call of it is under way; waits for its turn
    GETTING    a call of it is under way
    STOPPING   a call of it is under way, and no other will start
    UNFENCED   no call of it is under way or will start; bytes of its last one may land until the store's fence holds

Each order is ended exactly once, and not before its call under way has ended and nothing of it can land any more: after an
UNKNOWN get only a fence says so, never a time (`fence`). Hence no load ends UNKNOWN. The first key that did not come ends the
load: the request will compute its block, and all behind it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.pool.settings import WorkerSettings
from vllm_mooncake_ascend.timers import Timers
from vllm_mooncake_ascend.types import Outcome, worst
from vllm_mooncake_ascend.wire.pool_steps import LoadEnded


class GetState(enum.Enum):
    """See the module's table."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    GETTING = "getting"
    STOPPING = "stopping"
    UNFENCED = "unfenced"


class GetInput(enum.Enum):
    """What can happen to a load at a worker."""

    PLANNED = "load planned"
    REFUSED = "load cannot be planned"
    TURN = "its turn"
    ALL_CAME = "call ended: all keys came"
    NOT_ALL_CAME = "call ended: some key did not come"
    UNKNOWN_CAME = "call ended: some key unknown"
    FENCED = "the fence holds"
    STOP = "cancelled, late, or store lost"


_S, _I = GetState, GetInput
_WORST = Cell("EndLoad with the worst outcome of a key", (_S.UNKNOWN,))
_FENCE = Cell("wait for the fence", (_S.UNFENCED,))
_WAIT = Cell("nothing yet: the call is under way", (_S.STOPPING,))

GET_LAW: Law[GetState, GetInput] = Law(
    {
        _S.UNKNOWN: {
            _I.PLANNED: Cell(
                "queue it; EndLoad(done) without calls, (refused) if cancelled before or the store is lost",
                (_S.QUEUED, _S.UNKNOWN),
            ),
            _I.REFUSED: Cell("EndLoad(refused)", (_S.UNKNOWN,)),
        },
        _S.QUEUED: {
            _I.TURN: Cell("StartGet", (_S.GETTING,)),
            _I.STOP: Cell("EndLoad(refused before its first call, else failed)", (_S.UNKNOWN,)),
        },
        _S.GETTING: {
            _I.ALL_CAME: Cell("to the end of the queue; EndLoad(done) after the last", (_S.QUEUED, _S.UNKNOWN)),
            _I.NOT_ALL_CAME: _WORST,
            _I.UNKNOWN_CAME: _FENCE,
            _I.STOP: _WAIT,
        },
        _S.STOPPING: {
            _I.ALL_CAME: Cell("EndLoad(done if it was the last, else failed)", (_S.UNKNOWN,)),
            _I.NOT_ALL_CAME: _WORST,
            _I.UNKNOWN_CAME: _FENCE,
            _I.STOP: _WAIT,
        },
        _S.UNFENCED: {
            _I.FENCED: Cell("EndLoad(failed)", (_S.UNKNOWN,)),
            _I.STOP: Cell("nothing: no call will start", (_S.UNFENCED,)),
        },
    }
)
"""Law of a load at a worker."""

_REASONS = {Outcome.REFUSED: counters.REFUSED, Outcome.FAILED: counters.FAILED, Outcome.UNKNOWN: counters.UNKNOWN}


@dataclasses.dataclass(slots=True)
class WorkerLoad:
    """One order of one worker."""

    load_id: int
    calls: tuple[tuple[int, ...], ...]
    """The block of each key of each call."""
    state: GetState = GetState.UNKNOWN
    num_done: int = 0
    num_bytes: int = 0
    started_at_s: float | None = None
    stop_reason: str = ""
    failed_block_ids: tuple[int, ...] = ()
    """Of a load that waits for the fence."""
    missing_block_ids: tuple[int, ...] = ()

    def blocks_from(self, call_index: int) -> tuple[int, ...]:
        """Blocks of this call and all behind it."""
        return tuple(block_id for call in self.calls[call_index:] for block_id in call)


class Gets:
    """`is_shut` is the breaker's; `want_fence` is told of each call that ended UNKNOWN."""

    def __init__(
        self,
        rank: int,
        settings: WorkerSettings,
        do: Callable[[actions.WorkerAction], None],
        is_shut: Callable[[], bool],
        want_fence: Callable[[float], None],
        law: Law[GetState, GetInput],
    ) -> None:
        self._rank = rank
        self._settings = settings
        self._do = do
        self._is_shut = is_shut
        self._want_fence = want_fence
        self._law = law
        self._loads: dict[int, WorkerLoad] = {}
        """In order of turns."""
        self._num_calls = 0
        self._memory: dict[int, None] = {}
        """Loads that have ended, or were cancelled before they were known; oldest first."""
        self._timers: Timers[int] = Timers()

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_calls(self) -> int:
        """Gets under way."""
        return self._num_calls

    def next_timer(self) -> float | None:
        return self._timers.next_s()

    # --- orders -------------------------------------------------------------------------------------------------------

    def planned(self, event: events.LoadPlanned, now: float) -> None:
        if event.load_id in self._loads:
            self._do(actions.Count(name=counters.EVENTS_IGNORED))
            return
        load = WorkerLoad(load_id=event.load_id, calls=event.calls)
        if event.load_id in self._memory:
            self._end(load, GetInput.PLANNED, Outcome.REFUSED, counters.STOPPED, load.blocks_from(0), now)
        elif not event.calls:
            self._end(load, GetInput.PLANNED, Outcome.DONE, counters.NO_REASON, (), now)
        elif self._is_shut():
            self._end(load, GetInput.PLANNED, Outcome.REFUSED, counters.STORE_LOST, load.blocks_from(0), now)
        else:
            self._loads[load.load_id] = load
            self._timers.set(load.load_id, now + self._settings.load_wait_s)
            self._move(load, GetInput.PLANNED, GetState.QUEUED)

    def refused(self, event: events.LoadRefused, now: float) -> None:
        if event.load_id in self._loads:
            self._do(actions.Count(name=counters.EVENTS_IGNORED))
            return
        load = WorkerLoad(load_id=event.load_id, calls=())
        self._end(load, GetInput.REFUSED, Outcome.REFUSED, counters.REFUSED, event.block_ids, now)

    def cancelled(self, load_id: int, now: float) -> None:
        load = self._loads.get(load_id)
        if load is not None:
            self._stop(load, counters.STOPPED, now)
        elif load_id not in self._memory:
            self._remember(load_id)

    def shut(self, now: float) -> None:
        """The store is lost: no further call."""
        for load in list(self._loads.values()):
            self._stop(load, counters.STORE_LOST, now)

    def lapse(self, now: float) -> None:
        while (load_id := self._timers.take_due(now)) is not None:
            self._stop(self._loads[load_id], counters.TOO_LATE, now)

    # --- calls --------------------------------------------------------------------------------------------------------

    def start_calls(self, now: float) -> None:
        """Start calls of the loads whose turn it is."""
        for load in list(self._loads.values()):
            if self._num_calls >= self._settings.max_gets_at_once:
                return
            if load.state is not GetState.QUEUED:
                continue
            self._num_calls += 1
            if load.started_at_s is None:
                load.started_at_s = now
            self._move(load, GetInput.TURN, GetState.GETTING)
            self._do(actions.StartGet(load_id=load.load_id, call_index=load.num_done))

    def call_ended(self, event: events.GetEnded, now: float) -> None:
        load = self._loads.get(event.load_id)
        is_under_way = load is not None and load.state in (GetState.GETTING, GetState.STOPPING)
        if load is None or not is_under_way or event.call_index != load.num_done:
            self._do(actions.Count(name=counters.EVENTS_IGNORED))
            return
        assert len(event.outcomes) == len(load.calls[load.num_done]), "a get has one outcome a key"
        self._num_calls -= 1
        load.num_bytes += event.num_bytes
        self._do(actions.Count(name=counters.GET_BYTES, amount=event.num_bytes))
        for outcome in set(event.outcomes):
            num_keys = event.outcomes.count(outcome)
            self._do(actions.Count(name=counters.GETS_ENDED, reason=outcome.value, amount=num_keys))
        if event.num_missing:
            self._do(actions.Count(name=counters.GETS_MISSING, amount=event.num_missing))
        outcome = worst(list(event.outcomes))
        if outcome is not Outcome.DONE:
            self._not_all_came(load, event, outcome, now)
            return
        load.num_done += 1
        if load.num_done == len(load.calls):
            self._end(load, GetInput.ALL_CAME, Outcome.DONE, counters.NO_REASON, (), now)
        elif load.state is GetState.STOPPING:
            failed = load.blocks_from(load.num_done)
            self._end(load, GetInput.ALL_CAME, Outcome.FAILED, load.stop_reason, failed, now)
        else:
            self._loads[load.load_id] = self._loads.pop(load.load_id)
            self._move(load, GetInput.ALL_CAME, GetState.QUEUED)

    def _not_all_came(self, load: WorkerLoad, event: events.GetEnded, outcome: Outcome, now: float) -> None:
        keys = zip(load.calls[load.num_done], event.outcomes, strict=True)
        failed = tuple(block_id for block_id, came in keys if came is not Outcome.DONE)
        reason = _REASONS[outcome]
        if event.is_lost:
            reason = counters.STORE_LOST
        elif event.num_missing == len(failed):
            reason = counters.MISSING
            load.missing_block_ids = failed
        failed += load.blocks_from(load.num_done + 1)
        if outcome is Outcome.UNKNOWN:
            load.stop_reason, load.failed_block_ids = reason, failed
            self._await_fence(load, now)
            return
        if outcome is Outcome.REFUSED and (load.num_done or Outcome.DONE in event.outcomes):
            outcome = Outcome.FAILED
        self._end(load, GetInput.NOT_ALL_CAME, outcome, reason, failed, now)

    def _await_fence(self, load: WorkerLoad, now: float) -> None:
        self._do(actions.Count(name=counters.QUARANTINES, reason=counters.GET))
        self._timers.drop(load.load_id)
        self._move(load, GetInput.UNKNOWN_CAME, GetState.UNFENCED)
        self._want_fence(now)

    def fenced(self, now: float) -> None:
        """Nothing of any earlier get can land any more."""
        for load in list(self._loads.values()):
            if load.state is GetState.UNFENCED:
                self._end(load, GetInput.FENCED, Outcome.FAILED, load.stop_reason, load.failed_block_ids, now)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _stop(self, load: WorkerLoad, reason: str, now: float) -> None:
        if load.state is GetState.QUEUED:
            outcome = Outcome.FAILED if load.num_done else Outcome.REFUSED
            self._end(load, GetInput.STOP, outcome, reason, load.blocks_from(load.num_done), now)
        elif load.state is GetState.UNFENCED:
            self._move(load, GetInput.STOP, GetState.UNFENCED)
        else:
            load.stop_reason = load.stop_reason or reason
            self._move(load, GetInput.STOP, GetState.STOPPING)

    def _end(
        self, load: WorkerLoad, what: GetInput, outcome: Outcome, reason: str, failed_block_ids: tuple[int, ...], now: float
    ) -> None:
        """The one end of a load at this worker: no call of it is under way, none will start, and nothing of it can land."""
        self._loads.pop(load.load_id, None)
        self._timers.drop(load.load_id)
        self._remember(load.load_id)
        self._move(load, what, GetState.UNKNOWN)
        ended = LoadEnded(
            load_id=load.load_id,
            rank=self._rank,
            outcome=outcome,
            failed_block_ids=failed_block_ids,
            missing_block_ids=load.missing_block_ids,
            reason=reason,
            num_bytes=load.num_bytes,
            seconds=0.0 if load.started_at_s is None else now - load.started_at_s,
        )
        self._do(actions.EndLoad(ended=ended))

    def _remember(self, load_id: int) -> None:
        self._memory[load_id] = None
        if len(self._memory) > limits.MAX_REMEMBERED_READS:
            del self._memory[next(iter(self._memory))]

    def _move(self, load: WorkerLoad, what: GetInput, after: GetState) -> None:
        before, load.state = load.state, after
        self._law.check(before, what, after)
