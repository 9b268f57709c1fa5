"""P2PWorker: the shell around one decode worker's reads.

vLLM's model-runner thread hands steps in and takes results out, and waits for neither. One transfer thread does the rest:
it runs the reads call by call, looks for new steps between two calls, and sleeps while there is nothing to do. One thread,
because one thread of Mooncake's moves the bytes of all calls: a second call would only wait, and busily where calls do.

Every read is answered by exactly one ReadEnded, also when the thread fails or the worker is closed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import TransferEngine
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.layout.ranks import rank_index
from vllm_mooncake_ascend.metrics.stats import Stats
from vllm_mooncake_ascend.p2p.reader import Reader
from vllm_mooncake_ascend.p2p.settings import ReaderSettings
from vllm_mooncake_ascend.runtime.inbox import Inbox
from vllm_mooncake_ascend.runtime.read_plans import ReadPlans
from vllm_mooncake_ascend.runtime.read_runner import ReadRunner, ended_as
from vllm_mooncake_ascend.types import Outcome
from vllm_mooncake_ascend.wire.steps import EMPTY_STEP, ReadEnded, WorkerStep

logger = logging.getLogger(__name__)

JOIN_S = limits.ENGINE_CALL_S + 5.0
"""Closing waits for the call under way; no other starts."""


class BindsThread(Protocol):
    """What is needed of `devices.base.Device`."""

    def bind_thread(self) -> None: ...


class P2PWorker:
    """One per worker process. Owns `engine` from now on: `close` closes it.

    Args:
        engine: serves this worker's registered memory, and reads.
        device: made current in the transfer thread before anything else.
        layout: this worker's own. Its place among the ranks of its engine is the number by which ReadEnded names it.
        read_wait_s: no engine call of a read starts later than this after its order.
        is_strict: a bug in the reader's machine is raised by `take_ended`: for tests.
        wake: called, from any thread, when `take_ended` has something new.
    """

    def __init__(
        self,
        *,
        engine: TransferEngine,
        device: BindsThread,
        layout: RankLayout,
        read_wait_s: float,
        is_strict: bool = False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank = rank_index(layout)
        self._engine = engine
        self._is_strict = is_strict
        self._lock = threading.Lock()
        """Of the statistics, and of the moment after which no step is taken."""
        self._stats = Stats()
        self._steps: Inbox[WorkerStep] = Inbox(capacity=limits.MAX_INBOX)
        self._ended: Inbox[ReadEnded] = Inbox(capacity=limits.MAX_INBOX, wake=wake)
        self._stopping = threading.Event()
        self._end_reason = ""
        """Why no step is taken any more."""
        self._failure: Exception | None = None
        self._runner = ReadRunner(
            engine,
            ReadPlans(layout),
            self,
            rank=self._rank,
            make_reader=lambda: Reader(self._rank, ReaderSettings(read_wait_s=read_wait_s)),
            is_strict=is_strict,
        )
        self._thread = threading.Thread(target=self._run, args=(device,), name="mooncake-ascend-transfer", daemon=True)
        self._thread.start()

    # --- for the model-runner thread ------------------------------------------------------------------------------

    def submit(self, step: WorkerStep) -> None:
        """Hand a step to the transfer thread; returns at once."""
        with self._lock:
            reason = self._end_reason or ("" if self._steps.put(step) else "the transfer thread takes no more steps")
        if reason:
            self._refuse(step, reason)

    def take_ended(self) -> tuple[ReadEnded, ...]:
        """Reads that have ended since the last call.

        Raises:
            LocalProtocolError: in strict mode, when the transfer thread has failed.
        """
        if self._is_strict and self._failure is not None:
            raise LocalProtocolError("the transfer thread has failed, see the log") from self._failure
        return tuple(self._ended.drain())

    def wait(self, timeout_s: float) -> bool:
        """Whether `take_ended` has something: now, or within `timeout_s`."""
        return self._ended.wait(timeout_s)

    def take_stats(self) -> dict[str, Any]:
        """What happened since the last call, as `metrics.stats` has it; empty when nothing did."""
        with self._lock:
            return self._stats.take()

    def close(self) -> None:
        """Let the call under way end, answer all orders, end the thread and close the engine. Twice is as good as once."""
        self._stopping.set()
        self._steps.put(EMPTY_STEP)  # wakes the thread
        self._thread.join(JOIN_S)
        if self._thread.is_alive():
            logger.error("an engine call did not end within %.0f s; the transfer engine stays open", JOIN_S)
            return
        self._engine.close()

    # --- for the transfer thread: read_runner.Audience ------------------------------------------------------------

    def read_ended(self, ended: ReadEnded) -> None:
        is_told = self._ended.put(ended)
        assert is_told, "the scheduler orders no more reads than it takes answers"

    def count(self, name: str, label: str = "", amount: float = 1.0) -> None:
        with self._lock:
            self._stats.count(name, label, amount)

    def observe(self, name: str, value: float) -> None:
        with self._lock:
            self._stats.observe(name, value)

    # --- the transfer thread ----------------------------------------------------------------------------------------

    def _run(self, device: BindsThread) -> None:
        try:
            device.bind_thread()
            while not self._stopping.is_set():
                self._turn()
            self._runner.end_all(Outcome.FAILED, "the worker shuts down")
            self._take_no_more("the worker shuts down")
        except Exception as error:  # the thread's outermost loop: it ends, and everybody hears of it
            logger.exception("the transfer thread has failed; this worker reads no KV until it is restarted")
            self._failure = error
            self._runner.end_all(Outcome.UNKNOWN, f"the transfer thread has failed: {error}")
            self._take_no_more(f"the transfer thread has failed: {error}")

    def _turn(self) -> None:
        ended = self._runner.run_call()
        if ended is None:
            self._steps.wait(self._runner.idle_wait_s())
            self._runner.fire_timer()
        self._runner.take(self._steps.drain())
        if self._stopping.is_set():
            self._runner.cancel_all()
        if ended is not None:
            self._runner.call_ended(ended)

    def _take_no_more(self, reason: str) -> None:
        with self._lock:
            self._end_reason = reason
        for step in self._steps.drain():
            self._refuse(step, reason)

    def _refuse(self, step: WorkerStep, reason: str) -> None:
        for order in step.reads:
            if order.part == 0:  # the read of a later part has had its answer
                self.read_ended(ended_as(order, self._rank, Outcome.REFUSED, reason))
