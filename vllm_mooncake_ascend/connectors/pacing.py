"""Pacer: lets an engine that only waits sleep, where vLLM would step as fast as it can.

A request that waits for remote KV makes vLLM's engine loop spin (one core and more for as long as it waits). The scheduler-role
connector sleeps in such a step, until there is news for it or for a few milliseconds: a new request cannot end the sleep.
"""

from __future__ import annotations

import collections
import threading
from typing import Protocol


class Waits(Protocol):
    """What is asked of the scheduler-role side."""

    def has_pending(self) -> bool:
        """There is something for the workers in this step."""

    @property
    def is_waiting(self) -> bool:
        """vLLM steps for requests that cannot run until something of ours ends."""


class Pacer:
    """Of one engine; used by its scheduler thread, `wake` from any.

    Args:
        wait_s: longest sleep of one step; 0: never.
        may_sleep: False on one rank of several that step together: the others would wait with it.
    """

    def __init__(self, *, wait_s: float, may_sleep: bool) -> None:
        self._wait_s = wait_s if may_sleep else 0.0
        self._news = threading.Event()
        self._in_flight: collections.deque[bool] = collections.deque(maxlen=64)
        """One entry a step whose output has not come back: whether it had anything to run."""

    def wake(self) -> None:
        """There is news for the scheduler thread."""
        self._news.set()

    def step(self, side: Waits, *, runs_something: bool) -> None:
        """A step is being built: sleep a moment if it would be for nothing."""
        if self._wait_s and not runs_something and not any(self._in_flight) and not side.has_pending() and side.is_waiting:
            self._news.wait(self._wait_s)
            self._news.clear()
        self._in_flight.append(runs_something)

    def came_back(self) -> None:
        """The output of the oldest step in flight has come back."""
        if self._in_flight:
            self._in_flight.popleft()
