"""Pacer: lets an engine that only waits sleep, where vLLM would step as fast as it can.

A request that waits for remote KV makes vLLM's engine loop spin (one core and more for as long as it waits). Such a step sleeps
where the next news will be, until they are there or for a few milliseconds: a new request cannot end the sleep.

    at the workers             while some read or load of theirs has all it needs and has not ended; other news may be as late
    in the scheduler's thread  else: a lookup, a message of a peer, a lease

An engine that steps for nobody's sake but ours (for the end of a save that hangs, say) sleeps longer after a while.

Steps have numbers, which workers send back when they have something to tell. A step that ran nothing, and of which they have
nothing to tell, never comes back: vLLM drops its output.
"""

from __future__ import annotations

import collections
import threading
from typing import Protocol

PATIENT_STEPS = 200
"""So many steps in a row, a second, for nobody's sake are no passing matter any more."""
PATIENT_WAIT_S = 0.05
"""How long each of them sleeps from then on, and what a request may be late by that arrives just then. 20 steps a second cost
3 % of a core, 200 cost 28 %."""


class Waits(Protocol):
    """What is asked of the scheduler-role side."""

    def has_pending(self) -> bool:
        """There is something for the workers in this step."""

    @property
    def is_waiting(self) -> bool:
        """vLLM steps for requests that cannot run until something of ours ends, or for our sake alone."""

    @property
    def awaits_workers(self) -> bool:
        """Some read or load has all it needs: the next news of it is its end, which the workers have."""

    @property
    def is_patient(self) -> bool:
        """No request waits for it."""


class Pacer:
    """Of one engine; used by its scheduler thread, `wake` from any.

    Args:
        wait_s: longest sleep of one step; 0: never.
        may_sleep: False on one rank of several that step together: the others would wait with it.
        workers_may_wait: False where vLLM has several steps under way: a new request's would stand behind all that wait.
    """

    def __init__(self, *, wait_s: float, may_sleep: bool, workers_may_wait: bool) -> None:
        self._wait_s = wait_s if may_sleep else 0.0
        self._workers_may_wait = workers_may_wait
        self._news = threading.Event()
        self._last_step = 0
        self._running: collections.deque[int] = collections.deque(maxlen=64)
        """Numbers of steps that run something and whose output has not come back, oldest first."""
        self._num_patient = 0

    def wake(self) -> None:
        """There is news for the scheduler thread."""
        self._news.set()

    def step(self, side: Waits, *, runs_something: bool) -> int:
        """A step is being built: sleep a moment if it would be for nothing. Returns its number."""
        if runs_something:
            self._num_patient = 0
        elif self._is_idle and not side.has_pending() and side.is_waiting and not self._is_turn_of_workers(side):
            self._num_patient = self._num_patient + 1 if side.is_patient else 0
            self._news.wait(max(self._wait_s, PATIENT_WAIT_S) if self._num_patient > PATIENT_STEPS else self._wait_s)
            self._news.clear()
        self._last_step += 1
        if runs_something:
            self._running.append(self._last_step)
        return self._last_step

    def workers_wait_s(self, side: Waits, *, runs_something: bool, has_reports: bool) -> float:
        """How long the workers may wait in this step for an end of theirs."""
        if runs_something or has_reports or not self._is_idle or not self._is_turn_of_workers(side):
            return 0.0
        return self._wait_s

    @property
    def _is_idle(self) -> bool:
        return self._wait_s > 0 and not self._running

    def _is_turn_of_workers(self, side: Waits) -> bool:
        return self._workers_may_wait and side.awaits_workers

    def came_back(self, step: int) -> None:
        """The output of a step has come back; 0: one of which the workers had nothing to tell, so it ran something."""
        while self._running and self._running[0] <= (step or self._running[0]):
            self._running.popleft()
            if not step:
                return
