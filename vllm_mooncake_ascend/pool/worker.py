"""The pool's machine of one worker. Sans-I/O: events in, actions out, `now` is handed in.

It puts the parts together: `gets` for loads, `puts` for saves, on threads of their own so that no load waits behind a save,
one `breaker` for both, and the `fence` that holds back both until no byte of an UNKNOWN get can land any more. It must not know
stores, keys, memory, threads or clocks. Orders come planned: the shell cuts each into calls (`planner.store_batch`) and keeps
the plan until the order's end.
"""

from __future__ import annotations

import dataclasses

from vllm_mooncake_ascend.law import Law
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.pool.breaker import BREAKER_LAW, Breaker, BreakerInput, BreakerState
from vllm_mooncake_ascend.pool.fence import FENCE_LAW, Fence, FenceInput, FenceState
from vllm_mooncake_ascend.pool.gets import GET_LAW, GetInput, Gets, GetState
from vllm_mooncake_ascend.pool.puts import PUT_LAW, PutInput, Puts, PutState
from vllm_mooncake_ascend.pool.settings import WorkerSettings


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerLaws:
    """The tables of all parts. The simulator puts ones that also count in their place."""

    breaker: Law[BreakerState, BreakerInput] = BREAKER_LAW
    fence: Law[FenceState, FenceInput] = FENCE_LAW
    get: Law[GetState, GetInput] = GET_LAW
    put: Law[PutState, PutInput] = PUT_LAW


class PoolWorker:
    """Machine of one worker; all calls from one thread at a time.

    Args:
        rank: this worker's number, as LoadEnded and SaveEnded name it.
    """

    def __init__(self, rank: int, settings: WorkerSettings, laws: WorkerLaws | None = None) -> None:
        laws = laws or WorkerLaws()
        self._actions: list[actions.WorkerAction] = []
        self._breaker = Breaker(self._do, laws.breaker)
        self._fence = Fence(self._do, laws.fence)
        self._gets = Gets(rank, settings, self._do, lambda: self._breaker.is_open, self._fence.want, laws.get)
        self._puts = Puts(rank, settings, self._do, lambda: self._breaker.is_open, laws.put)

    def handle(self, event: events.WorkerEvent, now: float) -> list[actions.WorkerAction]:
        """Take one event and say what is to be done, in this order. Events that came late or twice do no harm."""
        match event:
            case events.GetEnded():
                self._gets.call_ended(event, now)
                self._heed(now, is_lost=event.is_lost)
            case events.PutEnded():
                self._puts.call_ended(event, now)
                self._heed(now, is_lost=event.is_lost)
            case events.FenceEnded():
                if self._fence.ended(now, holds=event.holds):
                    self._gets.fenced(now)
            case events.ProbeEnded():
                if not self._breaker.probed(now, is_healthy=event.is_healthy):
                    self._do(actions.Count(name=counters.EVENTS_IGNORED))
            case events.StoreLost():
                self._heed(now, is_lost=True)
            case events.TimerFired():
                pass
            case _:
                self._take_order(event, now)
        self._breaker.lapse(now)
        self._gets.lapse(now)
        self._puts.lapse(now)
        self._start_calls(now)
        done = self._actions.copy()
        self._actions.clear()
        return done

    def next_timer(self) -> float | None:
        """When TimerFired is due, None: never."""
        timers = (part.next_timer() for part in (self._breaker, self._fence, self._gets, self._puts))
        return min((at_s for at_s in timers if at_s is not None), default=None)

    @property
    def num_loads(self) -> int:
        """Loads that have not ended here."""
        return len(self._gets)

    @property
    def num_saves(self) -> int:
        """Saves that have not ended here."""
        return len(self._puts)

    @property
    def num_queued_save_blocks(self) -> int:
        return self._puts.num_queued_blocks

    @property
    def is_breaker_open(self) -> bool:
        return self._breaker.is_open

    def _start_calls(self, now: float) -> None:
        """A wanted fence comes first: it cannot hold while calls are under way."""
        if self._fence.is_wanted:
            if self._gets.num_calls == 0:
                self._fence.start(now)
            return
        self._gets.start_calls(now)
        self._puts.start_call(now)

    def _take_order(
        self,
        event: events.LoadPlanned | events.LoadRefused | events.LoadCancelled | events.SavePlanned | events.SaveRefused,
        now: float,
    ) -> None:
        match event:
            case events.LoadPlanned():
                self._gets.planned(event, now)
            case events.LoadRefused():
                self._gets.refused(event, now)
            case events.LoadCancelled():
                self._gets.cancelled(event.load_id, now)
            case events.SavePlanned():
                self._puts.planned(event, now)
            case events.SaveRefused():
                self._puts.refused(event, now)

    def _heed(self, now: float, *, is_lost: bool) -> None:
        """The store is dead: nothing more waits for it."""
        if is_lost and self._breaker.lost(now):
            self._gets.shut(now)
            self._puts.shut(now)

    def _do(self, action: actions.WorkerAction) -> None:
        self._actions.append(action)
