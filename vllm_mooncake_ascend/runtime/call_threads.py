"""CallThreads: threads for calls that may block for a minute, so that nobody else has to.

Calls are carried out first come first served, as many at once as there are threads. The threads are daemons: a call that
never returns does not keep the process from ending.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from vllm_mooncake_ascend.runtime.clock import boot_s

logger = logging.getLogger(__name__)

Call = Callable[[], None]


class CallThreads:
    """Whoever submits bounds how many calls wait.

    Args:
        name: of the threads, which get a number behind it.
        bind: first thing that each thread does.
        failed: told when `bind`, or a call, which must not, has raised; that thread ends.
    """

    def __init__(
        self, name: str, num_threads: int, *, bind: Call = lambda: None, failed: Callable[[Exception], None] = lambda _: None
    ) -> None:
        self._bind = bind
        self._failed = failed
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._is_stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"mooncake-ascend-{name}-{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Call) -> None:
        """From any thread; returns at once. Does nothing once stopped."""
        self._calls.put(call)

    def stop(self) -> None:
        """No call starts any more; those under way go on."""
        self._is_stopping = True
        for _ in self._threads:
            self._calls.put(None)

    def join(self, timeout_s: float) -> bool:
        """Whether all threads have ended within this, after `stop`."""
        deadline_s = boot_s() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - boot_s()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        try:
            self._bind()
            while (call := self._calls.get()) is not None and not self._is_stopping:
                call()
        except Exception as error:  # the thread's outermost loop: it ends, and everybody hears of it
            logger.exception("a thread of the pool has failed: thread=%s", threading.current_thread().name)
            self._failed(error)
