"""Puts: which call of which save a worker runs next. A part of the worker's machine.

Saves are put one after the other in the order they came, so that no block of a prompt is in the pool before those ahead of
it. The first key that was not taken ends its save and all others of its chain: they are behind a gap. The queue is bounded;
the oldest save makes room. A full store evicts in the background, so a put without room is tried once more a moment later;
if that fails too, saves are dropped for a while, longer each time. States of a save at a worker:

    UNKNOWN    not in the table
    QUEUED     waits for its turn
    PUTTING    a call of it is under way
    RETRYING   the store was full; its call is repeated in a moment
    STOPPING   a call of it is under way, and no other will start

Each order is ended exactly once, and not before its call under way has ended.
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
from vllm_mooncake_ascend.wire.pool_steps import SaveEnded


class PutState(enum.Enum):
    """See the module's table."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    PUTTING = "putting"
    RETRYING = "retrying"
    STOPPING = "stopping"


class PutInput(enum.Enum):
    """What can happen to a save at a worker."""

    PLANNED = "save planned"
    REFUSED = "save cannot be planned"
    TURN = "its turn"
    ALL_TAKEN = "call ended: all keys taken"
    NOT_ALL_TAKEN = "call ended: some key not taken"
    FULL_ONCE = "call ended: no room, the first time"
    STOP = "dropped, late, behind a gap, or store lost"


_S, _I = PutState, PutInput
_WORST = Cell("EndSave with the worst outcome of a key; the chain is broken", (_S.UNKNOWN,))

PUT_LAW: Law[PutState, PutInput] = Law(
    {
        _S.UNKNOWN: {
            _I.PLANNED: Cell(
                "queue it; EndSave(done) without calls, (refused) behind a gap, while the store is full or lost",
                (_S.QUEUED, _S.UNKNOWN),
            ),
            _I.REFUSED: Cell("EndSave(refused); the chain is broken", (_S.UNKNOWN,)),
        },
        _S.QUEUED: {
            _I.TURN: Cell("StartPut", (_S.PUTTING,)),
            _I.STOP: Cell("EndSave(refused); the chain is broken", (_S.UNKNOWN,)),
        },
        _S.PUTTING: {
            _I.ALL_TAKEN: Cell("StartPut of the next call; EndSave(done) after the last", (_S.PUTTING, _S.UNKNOWN)),
            _I.NOT_ALL_TAKEN: _WORST,
            _I.FULL_ONCE: Cell("wait a moment", (_S.RETRYING,)),
            _I.STOP: Cell("nothing yet: the call is under way", (_S.STOPPING,)),
        },
        _S.RETRYING: {
            _I.TURN: Cell("StartPut of the same call", (_S.PUTTING,)),
            _I.STOP: Cell("EndSave(failed); the chain is broken", (_S.UNKNOWN,)),
        },
        _S.STOPPING: {
            _I.ALL_TAKEN: Cell("EndSave(done if it was the last, else failed)", (_S.UNKNOWN,)),
            _I.NOT_ALL_TAKEN: _WORST,
            _I.STOP: Cell("nothing yet: the call is under way", (_S.STOPPING,)),
        },
    }
)
"""Law of a save at a worker."""

_REASONS = {Outcome.REFUSED: counters.REFUSED, Outcome.FAILED: counters.FAILED, Outcome.UNKNOWN: counters.UNKNOWN}


@dataclasses.dataclass(slots=True)
class WorkerSave:
    """One order of one worker."""

    save_id: int
    chain: int
    calls: tuple[int, ...]
    """Keys of each call."""
    state: PutState = PutState.UNKNOWN
    num_done: int = 0
    num_bytes: int = 0
    was_full: bool = False
    """Its present call has been repeated."""
    started_at_s: float | None = None
    stop_reason: str = ""


class Puts:
    """One put is under way at a time. `is_shut` is the breaker's."""

    def __init__(
        self,
        rank: int,
        settings: WorkerSettings,
        do: Callable[[actions.WorkerAction], None],
        is_shut: Callable[[], bool],
        law: Law[PutState, PutInput],
    ) -> None:
        self._rank = rank
        self._settings = settings
        self._do = do
        self._is_shut = is_shut
        self._law = law
        self._saves: dict[int, WorkerSave] = {}
        """In the order they came; only the first is not QUEUED."""
        self._broken: dict[int, None] = {}
        """Chains with a gap, oldest first."""
        self._timers: Timers[int] = Timers()
        self._pause_s = limits.FULL_PAUSE_MIN_S
        self._paused_until_s = 0.0

    def __len__(self) -> int:
        return len(self._saves)

    @property
    def num_queued_blocks(self) -> int:
        """Counted at each call."""
        return sum(sum(save.calls) for save in self._saves.values() if save.state is PutState.QUEUED)

    def next_timer(self) -> float | None:
        return self._timers.next_s()

    # --- orders -------------------------------------------------------------------------------------------------------

    def planned(self, event: events.SavePlanned, now: float) -> None:
        if event.save_id in self._saves:
            self._do(actions.Count(name=counters.EVENTS_IGNORED))
            return
        save = WorkerSave(save_id=event.save_id, chain=event.chain, calls=event.calls)
        reason = self._why_not(save, now)
        if reason:
            self._end(save, PutInput.PLANNED, Outcome.REFUSED, reason, now)
        elif not save.calls:
            self._end(save, PutInput.PLANNED, Outcome.DONE, counters.NO_REASON, now)
        else:
            self._saves[save.save_id] = save
            self._timers.set(save.save_id, now + self._settings.save_wait_s)
            self._move(save, PutInput.PLANNED, PutState.QUEUED)
            self._make_room(now)

    def refused(self, event: events.SaveRefused, now: float) -> None:
        save = WorkerSave(save_id=event.save_id, chain=event.chain, calls=())
        self._end(save, PutInput.REFUSED, Outcome.REFUSED, counters.REFUSED, now)

    def shut(self, now: float) -> None:
        """The store is lost: nothing that waits will be put."""
        for save in list(self._saves.values()):
            self._stop(save, counters.STORE_LOST, now)

    def lapse(self, now: float) -> None:
        while (save_id := self._timers.take_due(now)) is not None:
            save = self._saves[save_id]
            if save.state is PutState.RETRYING:
                self._do(actions.Count(name=counters.PUTS_REPEATED))
                self._start(save)
            else:
                self._stop(save, counters.TOO_LATE, now)

    def _why_not(self, save: WorkerSave, now: float) -> str:
        if save.chain in self._broken:
            return counters.GAP
        if self._is_shut():
            return counters.STORE_LOST
        return counters.FULL if now < self._paused_until_s else ""

    def _make_room(self, now: float) -> None:
        """Of those that wait behind another the oldest go first. One whose turn is next waits for nothing, however large."""
        behind = list(self._saves.values())[1:]
        while sum(sum(save.calls) for save in behind) > self._settings.max_queued_blocks:
            self._stop(behind[0], counters.DROPPED, now)
            behind = list(self._saves.values())[1:]

    # --- calls --------------------------------------------------------------------------------------------------------

    def start_call(self, now: float) -> None:
        """Start a call of the save whose turn it is, unless one is under way or to be repeated."""
        save = next(iter(self._saves.values()), None)
        if save is not None and save.state is PutState.QUEUED:
            save.started_at_s = now
            self._start(save)

    def call_ended(self, event: events.PutEnded, now: float) -> None:
        save = self._saves.get(event.save_id)
        is_under_way = save is not None and save.state in (PutState.PUTTING, PutState.STOPPING)
        if save is None or not is_under_way or event.call_index != save.num_done:
            self._do(actions.Count(name=counters.EVENTS_IGNORED))
            return
        assert len(event.outcomes) == save.calls[save.num_done], "a put has one outcome a key"
        save.num_bytes += event.num_bytes
        self._do(actions.Count(name=counters.PUT_BYTES, amount=event.num_bytes))
        for outcome in set(event.outcomes):
            num_keys = event.outcomes.count(outcome)
            self._do(actions.Count(name=counters.PUTS_ENDED, reason=outcome.value, amount=num_keys))
        outcome = worst(list(event.outcomes))
        if outcome is Outcome.DONE:
            self._all_taken(save, now)
        elif event.is_full and outcome is not Outcome.UNKNOWN and not save.was_full and save.state is PutState.PUTTING:
            save.was_full = True
            self._timers.set(save.save_id, now + limits.FULL_RETRY_S)
            self._move(save, PutInput.FULL_ONCE, PutState.RETRYING)
        else:
            self._not_all_taken(save, event, outcome, now)

    def _all_taken(self, save: WorkerSave, now: float) -> None:
        self._pause_s = limits.FULL_PAUSE_MIN_S
        save.num_done += 1
        save.was_full = False
        if save.num_done == len(save.calls):
            self._end(save, PutInput.ALL_TAKEN, Outcome.DONE, counters.NO_REASON, now)
        elif save.state is PutState.STOPPING:
            self._end(save, PutInput.ALL_TAKEN, Outcome.FAILED, save.stop_reason, now)
        else:
            self._move(save, PutInput.ALL_TAKEN, PutState.PUTTING)
            self._do(actions.StartPut(save_id=save.save_id, call_index=save.num_done))

    def _not_all_taken(self, save: WorkerSave, event: events.PutEnded, outcome: Outcome, now: float) -> None:
        reason = _REASONS[outcome]
        if event.is_lost:
            reason = counters.STORE_LOST
        elif event.is_full:
            reason = counters.FULL
            self._paused_until_s = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, limits.FULL_PAUSE_MAX_S)
        self._end(save, PutInput.NOT_ALL_TAKEN, outcome, reason, now)
        if reason == counters.FULL:
            for waiting in list(self._saves.values()):
                self._stop(waiting, counters.FULL, now)

    def _start(self, save: WorkerSave) -> None:
        self._timers.drop(save.save_id)
        self._move(save, PutInput.TURN, PutState.PUTTING)
        self._do(actions.StartPut(save_id=save.save_id, call_index=save.num_done))

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _stop(self, save: WorkerSave, reason: str, now: float) -> None:
        if save.state is PutState.UNKNOWN:
            return
        if save.state in (PutState.PUTTING, PutState.STOPPING):
            save.stop_reason = save.stop_reason or reason
            self._move(save, PutInput.STOP, PutState.STOPPING)
        else:
            outcome = Outcome.FAILED if save.state is PutState.RETRYING else Outcome.REFUSED
            self._end(save, PutInput.STOP, outcome, reason, now)

    def _end(self, save: WorkerSave, what: PutInput, outcome: Outcome, reason: str, now: float) -> None:
        """The one end of a save at this worker; unless it is done, its chain ends with it."""
        self._saves.pop(save.save_id, None)
        self._timers.drop(save.save_id)
        self._move(save, what, PutState.UNKNOWN)
        ended = SaveEnded(
            save_id=save.save_id,
            rank=self._rank,
            outcome=outcome,
            reason=reason,
            num_bytes=save.num_bytes,
            seconds=0.0 if save.started_at_s is None else now - save.started_at_s,
        )
        self._do(actions.EndSave(ended=ended))
        if outcome is not Outcome.DONE and save.chain not in self._broken:
            self._broken[save.chain] = None
            if len(self._broken) > limits.MAX_REMEMBERED_READS:
                del self._broken[next(iter(self._broken))]
            for behind in [one for one in self._saves.values() if one.chain == save.chain]:
                self._stop(behind, counters.GAP, now)

    def _move(self, save: WorkerSave, what: PutInput, after: PutState) -> None:
        before, save.state = save.state, after
        self._law.check(before, what, after)
