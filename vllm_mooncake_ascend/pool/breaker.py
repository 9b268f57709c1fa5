"""Breaker: keeps a dead store from costing time. A part of the scheduler's and of each worker's machine.

With the master dead every call to the store costs 4 to 30 seconds. So the first sign of it stops all calls; the client's
health, which costs no call, is probed until it is well again, several times in a row. States:

    CLOSED    calls are made
    OPEN      no call is made; the next probe has its time
    PROBING   no call is made; a probe is under way

A sign that comes while it is open says nothing new: such a call began before.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.pool import actions, counters


class BreakerState(enum.Enum):
    """See the module's table."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class BreakerInput(enum.Enum):
    """What can happen to a breaker."""

    LOST = "sign of a dead store"
    DUE = "time for a probe"
    HEALTHY = "probe: healthy"
    SICK = "probe: not healthy"


_S, _I = BreakerState, BreakerInput

BREAKER_LAW: Law[BreakerState, BreakerInput] = Law(
    {
        _S.CLOSED: {_I.LOST: Cell("drop what waits, tell the operator", (_S.OPEN,))},
        _S.OPEN: {
            _I.LOST: Cell("nothing new", (_S.OPEN,)),
            _I.DUE: Cell("ProbeStore", (_S.PROBING,)),
        },
        _S.PROBING: {
            _I.LOST: Cell("nothing new", (_S.PROBING,)),
            _I.HEALTHY: Cell("closed after several in a row", (_S.OPEN, _S.CLOSED)),
            _I.SICK: Cell("count anew", (_S.OPEN,)),
        },
    }
)
"""Law of a breaker."""


class Breaker:
    """`is_open` says whether calls may be made; `lost` tells it of a call that found the store dead."""

    def __init__(
        self, do: Callable[[actions.Count | actions.Note | actions.ProbeStore], None], law: Law[BreakerState, BreakerInput]
    ) -> None:
        self._do = do
        self._law = law
        self._state = BreakerState.CLOSED
        self._probe_at_s: float | None = None
        self._num_healthy = 0
        self._quiet_until_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._state is not BreakerState.CLOSED

    def next_timer(self) -> float | None:
        """When the next probe is due."""
        return self._probe_at_s

    def lost(self, now: float) -> bool:
        """A call found the store dead. True: this is news, drop what waits for it."""
        was_open = self.is_open
        if was_open:
            self._move(BreakerInput.LOST, self._state)
            return False
        self._num_healthy = 0
        self._move(BreakerInput.LOST, BreakerState.OPEN, now + limits.STORE_PROBE_S)
        self._do(actions.Count(name=counters.BREAKER_OPENED))
        self._note(now, "warning", "the pool's store does not answer; going on without it until it is healthy again")
        return True

    def probed(self, now: float, *, is_healthy: bool) -> bool:
        """A probe was answered; False for an answer to no probe."""
        if self._state is not BreakerState.PROBING:
            return False
        self._num_healthy = self._num_healthy + 1 if is_healthy else 0
        if self._num_healthy >= limits.PROBES_TO_CLOSE:
            self._move(BreakerInput.HEALTHY, BreakerState.CLOSED)
            self._do(actions.Count(name=counters.BREAKER_CLOSED))
            self._note(now, "info", "the pool's store is healthy again")
        else:
            what = BreakerInput.HEALTHY if is_healthy else BreakerInput.SICK
            self._move(what, BreakerState.OPEN, now + limits.STORE_PROBE_S)
        return True

    def lapse(self, now: float) -> None:
        """Ask for a probe if its time has come."""
        if self._probe_at_s is not None and now >= self._probe_at_s:
            self._move(BreakerInput.DUE, BreakerState.PROBING)
            self._do(actions.ProbeStore())

    def _move(self, what: BreakerInput, after: BreakerState, probe_at_s: float | None = None) -> None:
        before, self._state = self._state, after
        self._law.check(before, what, after)
        if before is not after:
            self._probe_at_s = probe_at_s

    def _note(self, now: float, level: str, text: str) -> None:
        """Both ends of an outage, but not those of every flap."""
        if level != "info":
            if now < self._quiet_until_s:
                return
            self._quiet_until_s = now + limits.BREAKER_NOTE_S
        self._do(actions.Note(level=level, text=text))
