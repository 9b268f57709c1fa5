"""ControlThread: fires the timers of a machine, and makes calls that may block on its behalf.

It sleeps until the machine's next timer, or until somebody brings an earlier one or a call to make. While it is in a call,
timers wait for it.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
from collections.abc import Callable

from vllm_mooncake_ascend.runtime.clock import boot_s

logger = logging.getLogger(__name__)


class ControlThread:
    """`start` once, then `stop`, then `join`.

    Args:
        lock: of the machine.
        next_timer: when `fire_timer` is due, infinity: never. Called under the lock.
        fire_timer: called under the lock; `next_timer` must be later afterwards.
        bind: first thing the thread does.
        failed: told when `bind` has raised; the thread goes on, for the sake of calls.
    """

    def __init__(
        self,
        name: str,
        lock: threading.RLock,
        *,
        next_timer: Callable[[], float],
        fire_timer: Callable[[], None],
        bind: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._next_timer = next_timer
        self._fire_timer = fire_timer
        self._bind = bind
        self._failed = failed
        self._changed = threading.Condition(lock)
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._sleeps_until_s = -math.inf
        """In the past while it is awake."""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name=f"mooncake-ascend-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the call under way; no timer fires any more."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within this, after `stop`."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def later(self, call: Callable[[], None]) -> None:
        """Make this call, which may block but must not raise, after those that wait. Whoever brings them bounds them."""
        with self._changed:
            self._calls.append(call)
            self._changed.notify()

    def mind_timer(self) -> None:
        """The next timer may be another one now. Called under the lock."""
        next_s = self._next_timer()
        if next_s < self._sleeps_until_s:
            self._sleeps_until_s = next_s
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._bind()
        except Exception as error:
            logger.exception("a thread of the pool has failed: thread=%s", threading.current_thread().name)
            self._failed(error)
        while (call := self._next_call()) is not None:
            call()

    def _next_call(self) -> Callable[[], None] | None:
        """Fire timers until there is a call to make; None: end."""
        with self._changed:
            while not self._is_stopping:
                if self._next_timer() <= boot_s():
                    self._fire_timer()
                if self._calls:
                    return self._calls.popleft()
                self._sleep()
            return None

    def _sleep(self) -> None:
        self._sleeps_until_s = self._next_timer()
        wait_s = self._sleeps_until_s - boot_s()
        if wait_s > 0:
            self._changed.wait(None if math.isinf(wait_s) else wait_s)
        self._sleeps_until_s = -math.inf
