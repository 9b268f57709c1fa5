"""PoolDriver: runs one machine of the pool, one event at a time, whoever brings it.

Any thread feeds events; a lock makes them take turns, first come first served, and what the machine asks for is handed on in
its order before the next event is taken. Where an action belongs:

    Count, Note    statistics, log
    ProbeStore     the control thread, which asks the store for its health, and makes a client where there is none
    all others     `carry_out`

The control thread also fires timers. While it is in a probe they wait for it, or for the next event, with which a machine does
what is due as well.

When a machine raises, it is a bug of ours, and nothing it says can be trusted any more: it hears of no further event, and the
owner is told, once. A store that cannot be reached is no bug: the machine is told, and asks for probes until it can be.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from vllm_mooncake_ascend.engines.base import KVStore, StoreHealth
from vllm_mooncake_ascend.errors import EngineError, LocalProtocolError
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.metrics.stats import Stats
from vllm_mooncake_ascend.pool import actions, events
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.control_thread import ControlThread
from vllm_mooncake_ascend.runtime.flight_recorder import line

logger = logging.getLogger(__name__)

Event = TypeVar("Event", bound=msgspec.Struct)
Event_contra = TypeVar("Event_contra", bound=msgspec.Struct, contravariant=True)
Action = TypeVar("Action")
OfAll = events.ProbeEnded | events.TimerFired | events.StoreLost

_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class PoolMachine(Protocol[Event_contra, Action]):
    """What is needed of `PoolScheduler` and `PoolWorker`."""

    def handle(self, event: Event_contra | OfAll, now: float) -> list[Action]: ...

    def next_timer(self) -> float | None: ...


class PoolDriver(Generic[Event, Action]):
    """`start` once, `stop` and `join` once; the rest from any thread in between.

    Args:
        store: asked for its health and connected by the control thread; not closed here.
        carry_out: takes actions in order, under the lock, so it must not wait.
        changed: told, under the lock, that a timer has fired, or that the machine has failed (`has_failed`; once).
        bind: first thing the control thread does.
        where: value of the label of `broken_invariants_total`, and for names in the log.
    """

    def __init__(
        self,
        machine: PoolMachine[Event, Action],
        store: KVStore,
        *,
        carry_out: Callable[[Action], None],
        changed: Callable[[], None],
        bind: Callable[[], None] = lambda: None,
        where: str,
    ) -> None:
        self._machine = machine
        self._store = store
        self._carry_out = carry_out
        self._told = changed
        self._where = where
        self.lock = threading.RLock()
        """Held while the machine runs; whoever asks it something holds it too."""
        self._control = ControlThread(
            where.replace("_", "-"),
            self.lock,
            next_timer=self._next_timer_s,
            fire_timer=self._fire_timer,
            bind=bind,
            failed=self.fail,
        )
        self._came_in: collections.deque[Event | OfAll] = collections.deque()
        self._is_halted = False
        self._failure: Exception | None = None
        self._stats = Stats()
        self._has_news = False

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Become a client of the pool, if that can be done now, and start the control thread."""
        try:
            self._store.connect()
        except EngineError as error:
            logger.warning("the pool cannot be used yet, and is joined as soon as it can be: %s", error)
            self.feed(events.StoreLost())
        self._control.start()

    def stop(self) -> None:
        """No timer fires and no probe starts any more."""
        self._control.stop()

    def join(self, timeout_s: float) -> bool:
        """Whether the control thread has ended within this, after `stop`."""
        return self._control.join(timeout_s)

    # --- events -------------------------------------------------------------------------------------------------------

    def feed(self, event: Event | OfAll) -> None:
        """Let the machine take all events that came before this one, and this one."""
        self._came_in.append(event)
        with self.lock:
            self._take_in()
            self._control.mind_timer()

    def later(self, call: Callable[[], None]) -> None:
        """Let the control thread make this call, which may block."""
        self._control.later(call)

    def halt(self) -> None:
        """The machine hears of nothing any more."""
        with self.lock:
            self._is_halted = True

    def fail(self, error: Exception) -> None:
        """Something without which the machine is of no use has failed, and the log says what: halt, and tell the owner."""
        with self.lock:
            if self._failure is None:
                self._is_halted = True
                self._failure = error
                self._told()

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def raise_failure(self) -> None:
        """For strict mode: end whoever asks, once the machine has failed.

        Raises:
            LocalProtocolError: it has.
        """
        if self._failure is not None:
            raise LocalProtocolError(f"the state machine of the {self._where} has failed, see the log") from self._failure

    # --- statistics ---------------------------------------------------------------------------------------------------

    def count(self, name: str, label: str = "", amount: float = 1.0) -> None:
        with self.lock:
            self._stats.count(name, label, amount)
            self._has_news = True

    def observe(self, name: str, value: float) -> None:
        with self.lock:
            self._stats.observe(name, value)
            self._has_news = True

    def take_stats(self, gauges: Callable[[], dict[str, float]]) -> dict[str, Any]:
        """What happened since the last call, as `metrics.stats` has it; empty when nothing did."""
        if not self._has_news:
            return {}
        with self.lock:
            self._has_news = False
            for name, value in gauges().items():
                self._stats.set_gauge(name, value)
            return self._stats.take()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        while self._came_in:
            self._handle(self._came_in.popleft())

    def _handle(self, event: Event | OfAll) -> None:
        if self._is_halted:
            return
        try:
            for action in self._machine.handle(event, boot_s()):
                self._do(action)
        except Exception as error:  # a bug of ours; the rest of the engine goes on
            self._broke(event, error)

    def _broke(self, event: Event | OfAll, error: Exception) -> None:
        logger.error(
            "the state machine of the %s broke; the pool is off here until the next start; please report this: event=%s",
            self._where,
            line(event),
            exc_info=error,
        )
        self.count(names.INVARIANTS_BROKEN, self._where)
        self.fail(error)

    def _do(self, action: Action) -> None:
        self._has_news = True
        match action:
            case actions.Count():
                self._stats.count(action.name, action.reason, action.amount)
            case actions.Note():
                logger.log(_LEVELS[action.level], "%s: %s", self._where, action.text)
            case actions.ProbeStore():
                self.later(self._probe)
            case _:
                self._carry_out(action)

    def _next_timer_s(self) -> float:
        next_s = None if self._is_halted else self._machine.next_timer()
        return math.inf if next_s is None else next_s

    # --- the control thread -------------------------------------------------------------------------------------------

    def _fire_timer(self) -> None:
        due_s = self._next_timer_s()
        self._take_in()
        fired = events.TimerFired()
        self._handle(fired)
        self._told()
        if self._next_timer_s() <= due_s:
            self._broke(fired, LocalProtocolError("a timer stays due however often it fires"))

    def _probe(self) -> None:
        is_healthy = False
        try:
            is_healthy = self._is_healthy()
        except Exception:
            logger.exception("the store raised while it was asked for its health; please report this")
        self.feed(events.ProbeEnded(is_healthy=is_healthy))

    def _is_healthy(self) -> bool:
        health = self._store.health()
        if health is StoreHealth.CLOSED:
            with contextlib.suppress(EngineError):  # said at the start, or by the fence; asked again every second
                self._store.connect()
                health = self._store.health()
        return health is StoreHealth.CONNECTED
