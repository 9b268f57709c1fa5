"""Fence: makes certain that no byte of an UNKNOWN get can land any more. A part of the worker's machine.

Bytes of a get whose outcome is unknown may land at any later time: most of what a stopped owner held back arrived when it went
on, 100 s after the get had failed. So no waiting resolves it; the store's fence does. It cannot hold while a get is under way,
and perhaps not while a put is: hence no get and no save starts from the first UNKNOWN get on until it holds. States:

    CLEAR     nothing is unknown
    DUE       a fence is wanted; waits for gets under way, or until it is worth trying again
    FENCING   one is under way

No get runs while one is FENCING, so a fence that holds is one for every get that was UNKNOWN before.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.pool import actions, counters


class FenceState(enum.Enum):
    """See the module's table."""

    CLEAR = "clear"
    DUE = "due"
    FENCING = "fencing"


class FenceInput(enum.Enum):
    """What can happen to a fence."""

    WANTED = "a get ended unknown"
    TURN = "no get is under way, and it is time"
    HOLDS = "fence ended: nothing moves any more"
    NOT_YET = "fence ended: not certain"


_S, _I = FenceState, FenceInput

FENCE_LAW: Law[FenceState, FenceInput] = Law(
    {
        _S.CLEAR: {_I.WANTED: Cell("start no get and no save", (_S.DUE,))},
        _S.DUE: {
            _I.WANTED: Cell("the same fence will do", (_S.DUE,)),
            _I.TURN: Cell("FenceStore", (_S.FENCING,)),
        },
        _S.FENCING: {
            _I.HOLDS: Cell("end the loads that wait for it; gets and saves may start", (_S.CLEAR,)),
            _I.NOT_YET: Cell("try again later, each time after twice as long", (_S.DUE,)),
        },
    }
)
"""Law of a fence."""


class Fence:
    """`is_wanted` says that no get and no save may start."""

    def __init__(self, do: Callable[[actions.WorkerAction], None], law: Law[FenceState, FenceInput]) -> None:
        self._do = do
        self._law = law
        self._state = FenceState.CLEAR
        self._try_at_s = 0.0
        self._pause_s = limits.FENCE_RETRY_MIN_S

    @property
    def is_wanted(self) -> bool:
        return self._state is not FenceState.CLEAR

    def next_timer(self) -> float | None:
        """When to try again; None when that waits for the end of a call."""
        is_waiting = self._state is FenceState.DUE and self._pause_s > limits.FENCE_RETRY_MIN_S
        return self._try_at_s if is_waiting else None

    def want(self, now: float) -> None:
        """A get ended UNKNOWN."""
        if not self.is_wanted:
            self._try_at_s = now
            self._pause_s = limits.FENCE_RETRY_MIN_S
        self._move(FenceInput.WANTED, FenceState.DUE)

    def start(self, now: float) -> None:
        """No get is under way: fence, if one is due."""
        if self._state is FenceState.DUE and now >= self._try_at_s:
            self._move(FenceInput.TURN, FenceState.FENCING)
            self._do(actions.FenceStore())

    def ended(self, now: float, *, holds: bool) -> bool:
        """A fence has ended. True: it holds, and was asked for."""
        if self._state is not FenceState.FENCING:
            self._do(actions.Count(name=counters.EVENTS_IGNORED))
            return False
        self._do(actions.Count(name=counters.FENCES, reason=counters.FENCED if holds else counters.NOT_FENCED))
        if holds:
            self._move(FenceInput.HOLDS, FenceState.CLEAR)
            return True
        self._try_at_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, limits.FENCE_RETRY_MAX_S)
        self._move(FenceInput.NOT_YET, FenceState.DUE)
        return False

    def _move(self, what: FenceInput, after: FenceState) -> None:
        before, self._state = self._state, after
        self._law.check(before, what, after)
