"""PoolWorkerShell: the shell around the pool's machine of one worker.

vLLM's model-runner thread hands steps in and takes results out, and waits for neither. All else has threads of its own, each
with the device bound first:

    plan       cuts orders into store calls
    get        as many as gets may be under way at once; the fence, too, as no get is under way then
    put        one
    control    timers, probes, making a client of the pool (`pool_driver`)

Every order is answered once. When the machine breaks, or a thread cannot serve, the pool is off here until the next start: the
store is closed, which is a fence for all its calls, and then all open orders end FAILED. If it cannot be closed they never
end, so that their blocks stay pinned. The same happens at shutdown. Orders that come later are REFUSED at once.

This rank's number is its place in the engine's list of ranks, pipeline stages outermost (`layout.ranks.rank_index`). It loads
all that it holds anything of, and saves the blocks of which it is the writer; the scheduler sends the shards that say so in
`PoolStep.shards`, at the latest with the first save.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import KVStore, StoreAnswer
from vllm_mooncake_ascend.errors import LocalProtocolError, MooncakeAscendError
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.pool.settings import WorkerSettings
from vllm_mooncake_ascend.pool.worker import PoolWorker
from vllm_mooncake_ascend.runtime import pool_calls
from vllm_mooncake_ascend.runtime.call_threads import CallThreads
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.inbox import Inbox
from vllm_mooncake_ascend.runtime.pool_driver import PoolDriver
from vllm_mooncake_ascend.runtime.pool_orders import PlannedCall, PoolOrders
from vllm_mooncake_ascend.runtime.store_errors import StoreErrors
from vllm_mooncake_ascend.types import Outcome
from vllm_mooncake_ascend.wire.pool_steps import (
    EMPTY_POOL_STEP,
    LoadEnded,
    LoadOrder,
    PoolResults,
    PoolStep,
    SaveEnded,
    SaveOrder,
)

logger = logging.getLogger(__name__)

JOIN_S = 5.0
"""When the store is closed no call is under way, or it hangs: threads end within this, or not at all."""


class BindsThread(Protocol):
    """What is needed of `devices.base.Device`."""

    def bind_thread(self) -> None: ...


class PoolWorkerShell:
    """One per worker process. Registers the layout's memory with `store` and joins the pool; when that cannot be done now it
    is done later, and is no error.

    Args:
        store: owned from now on: `close` closes it.
        device: made current in each thread before anything else.
        layout: this worker's own.
        is_strict: a bug in the machine is raised by `take_results`: for tests.
        wake: called, from any thread, when `take_results` has something new.
    Raises:
        ConfigError: an object would be too long for the store.
        EngineError: the store does not take this memory.
    """

    def __init__(
        self,
        *,
        settings: WorkerSettings,
        store: KVStore,
        device: BindsThread,
        layout: RankLayout,
        is_strict: bool = False,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._is_strict = is_strict
        self._orders = PoolOrders(layout)
        self._machine = PoolWorker(self._orders.rank, settings)
        self._driver: PoolDriver[events.WorkerEvent, actions.WorkerAction] = PoolDriver(
            self._machine,
            store,
            carry_out=self._carry_out,
            changed=self._heed_failure,
            bind=device.bind_thread,
            where="pool_worker",
        )
        self._errors = StoreErrors(self._driver.count)
        self._open = _OpenOrders()
        self._ended: Inbox[LoadEnded | SaveEnded] = Inbox(capacity=limits.MAX_INBOX, wake=wake)
        self._end_reason = ""
        """Why no order is taken any more."""
        self._retiring = threading.Lock()
        store.register(layout.regions)
        self._threads = _Threads(device.bind_thread, self._driver.fail, num_gets=settings.max_gets_at_once)
        self._driver.start()

    # --- for the model-runner thread ----------------------------------------------------------------------------------

    def submit(self, step: PoolStep) -> None:
        """Hand a step to the threads; returns at once."""
        if step is EMPTY_POOL_STEP or step == EMPTY_POOL_STEP:
            return
        with self._driver.lock:
            self._open.add(step)
            if self._end_reason:
                self._end_orders(step.loads, step.saves, Outcome.REFUSED, counters.REFUSED)
                return
        self._threads.plan.submit(functools.partial(self._take, step))

    def take_results(self) -> PoolResults | None:
        """Loads and saves that have ended since the last call, None when there are none.

        Raises:
            LocalProtocolError: in strict mode, when the machine has failed.
        """
        if self._is_strict:
            self._driver.raise_failure()
        ended = self._ended.drain()
        if not ended:
            return None
        return PoolResults(
            loads=tuple(one for one in ended if isinstance(one, LoadEnded)),
            saves=tuple(one for one in ended if isinstance(one, SaveEnded)),
        )

    def wait(self, timeout_s: float) -> bool:
        """Whether `take_results` has something: now, or within `timeout_s`."""
        return self._ended.wait(timeout_s)

    @property
    def is_usable(self) -> bool:
        """Calls are made: the store is not taken for dead, and nothing here has failed."""
        with self._driver.lock:
            return not (self._end_reason or self._machine.is_breaker_open)

    def take_stats(self) -> dict[str, Any]:
        """What happened since the last call, as `metrics.stats` has it; empty when nothing did."""
        return self._driver.take_stats(self._gauges)

    def close(self) -> None:
        """Start no further call, let those under way end, close the store, answer all orders, end the threads.

        Waits for calls under way, at most `limits.STORE_CALL_S`. Twice is as good as once.
        """
        with self._driver.lock:
            self._end_reason = self._end_reason or "the worker shuts down"
        self._retire()
        self._driver.stop()
        have_ended = [self._threads.join(JOIN_S), self._driver.join(JOIN_S)]
        if not all(have_ended):
            logger.error("a call to the pool does not end; its thread is left behind")

    # --- the plan thread ----------------------------------------------------------------------------------------------

    def _take(self, step: PoolStep) -> None:
        if step.shards:
            self._orders.learn(step.shards)
        for load_id in step.cancels:
            self._driver.feed(events.LoadCancelled(load_id=load_id))
        for load in step.loads:
            self._driver.feed(self._planned_load(load))
        for save in step.saves:
            self._driver.feed(self._planned_save(save))

    def _planned_load(self, order: LoadOrder) -> events.WorkerEvent:
        try:
            calls = self._orders.load(order)
        except Exception as error:
            self._not_planned(f"load_id={order.load_id} request_id={order.request_id}", error)
            return events.LoadRefused(load_id=order.load_id, block_ids=_blocks_of(order))
        self._open.load_calls[order.load_id] = calls
        return events.LoadPlanned(load_id=order.load_id, calls=tuple(call.block_ids for call in calls))

    def _planned_save(self, order: SaveOrder) -> events.WorkerEvent:
        try:
            calls = self._orders.save(order)
        except Exception as error:
            self._not_planned(f"save_id={order.save_id} request_id={order.request_id}", error)
            return events.SaveRefused(save_id=order.save_id, chain=order.chain)
        self._open.save_calls[order.save_id] = calls
        return events.SavePlanned(save_id=order.save_id, chain=order.chain, calls=tuple(len(call.block_ids) for call in calls))

    def _not_planned(self, what: str, error: Exception) -> None:
        """Whatever the planner says or raises, no call was made yet."""
        if isinstance(error, MooncakeAscendError):
            logger.warning("an order of the pool cannot be planned: %s: %s", what, error)
            return
        logger.error("an order of the pool could not be planned; please report this: %s", what, exc_info=error)
        self._driver.count(names.INVARIANTS_BROKEN, "pool_worker")

    # --- the threads of calls -----------------------------------------------------------------------------------------

    def _get(self, action: actions.StartGet, call: PlannedCall) -> None:
        answer = self._timed("get", names.POOL_GET_DURATION, lambda: pool_calls.answer_of("get", self._store.get, call))
        pool_calls.drop_broken(self._store, call, answer)
        self._driver.feed(pool_calls.get_ended(action.load_id, action.call_index, call, answer))

    def _put(self, action: actions.StartPut, call: PlannedCall) -> None:
        answer = self._timed("put", names.POOL_PUT_DURATION, lambda: pool_calls.answer_of("put", self._store.put, call))
        self._driver.feed(pool_calls.put_ended(action.save_id, action.call_index, call, answer))

    def _fence(self) -> None:
        self._driver.feed(events.FenceEnded(holds=pool_calls.fence_holds(self._store)))

    def _timed(self, what: str, histogram: str, ask: Callable[[], StoreAnswer]) -> StoreAnswer:
        started_s = boot_s()
        answer = ask()
        self._driver.observe(histogram, boot_s() - started_s)
        self._errors.note(what, answer)
        return answer

    # --- inside, under the driver's lock ------------------------------------------------------------------------------

    def _carry_out(self, action: actions.WorkerAction) -> None:
        match action:
            case actions.StartGet():
                call = self._open.load_calls[action.load_id][action.call_index]
                self._threads.get.submit(functools.partial(self._get, action, call))
            case actions.StartPut():
                call = self._open.save_calls[action.save_id][action.call_index]
                self._threads.put.submit(functools.partial(self._put, action, call))
            case actions.FenceStore():
                self._threads.get.submit(self._fence)
            case actions.EndLoad() | actions.EndSave():
                self._answer(action.ended)
            case actions.ProbeStore() | actions.Count() | actions.Note():
                raise LocalProtocolError(f"{type(action).__name__} is the driver's")

    def _answer(self, ended: LoadEnded | SaveEnded) -> None:
        """The one place that answers an order, once."""
        if self._open.end(ended):
            is_told = self._ended.put(ended)
            assert is_told, "the scheduler orders no more than it takes answers"

    def _gauges(self) -> dict[str, float]:
        if self._driver.has_failed:
            return {}
        return {
            names.POOL_LOADS_IN_FLIGHT: self._machine.num_loads,
            names.POOL_QUEUE_DEPTH: self._machine.num_queued_save_blocks,
        }

    def _heed_failure(self) -> None:
        if self._driver.has_failed and not self._end_reason:
            self._end_reason = "the worker has failed"
            self._driver.later(self._retire)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _retire(self) -> None:
        """No call starts any more. Close the store; when nothing can move any more, all open orders end."""
        with self._retiring:
            self._driver.halt()
            self._threads.stop()
            is_closed = False
            try:
                is_closed = self._store.close()
            except Exception:
                logger.exception("the store raised while it was closed; please report this")
            with self._driver.lock:
                if is_closed:
                    loads, saves = tuple(self._open.loads.values()), tuple(self._open.saves.values())
                    self._end_orders(loads, saves, Outcome.FAILED, counters.FAILED)
                elif len(self._open):
                    logger.error(
                        "%d orders of the pool do not end (%s); their blocks stay reserved", len(self._open), self._end_reason
                    )

    def _end_orders(self, loads: tuple[LoadOrder, ...], saves: tuple[SaveOrder, ...], outcome: Outcome, reason: str) -> None:
        """Answer past the machine."""
        rank = self._orders.rank
        for load in loads:
            self._answer(
                LoadEnded(
                    load_id=load.load_id,
                    rank=rank,
                    outcome=outcome,
                    failed_block_ids=_blocks_of(load),
                    reason=reason,
                    num_bytes=0,
                    seconds=0.0,
                )
            )
        for save in saves:
            self._answer(SaveEnded(save_id=save.save_id, rank=rank, outcome=outcome, reason=reason, num_bytes=0, seconds=0.0))


class _Threads:
    """Those that may block."""

    def __init__(self, bind: Callable[[], None], failed: Callable[[Exception], None], *, num_gets: int) -> None:
        self.plan = CallThreads("pool-plan", 1, bind=bind, failed=failed)
        self.get = CallThreads("pool-get", num_gets, bind=bind, failed=failed)
        self.put = CallThreads("pool-put", 1, bind=bind, failed=failed)
        self._all = (self.plan, self.get, self.put)

    def stop(self) -> None:
        for threads in self._all:
            threads.stop()

    def join(self, timeout_s: float) -> bool:
        """Whether all have ended, each kind within this."""
        return all([threads.join(timeout_s) for threads in self._all])


@dataclasses.dataclass(frozen=True, slots=True)
class _OpenOrders:
    """Orders without an answer, and the calls of those that were planned; by number."""

    loads: dict[int, LoadOrder] = dataclasses.field(default_factory=dict)
    saves: dict[int, SaveOrder] = dataclasses.field(default_factory=dict)
    load_calls: dict[int, list[PlannedCall]] = dataclasses.field(default_factory=dict)
    save_calls: dict[int, list[PlannedCall]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.loads) + len(self.saves)

    def add(self, step: PoolStep) -> None:
        self.loads.update({order.load_id: order for order in step.loads})
        self.saves.update({order.save_id: order for order in step.saves})

    def end(self, ended: LoadEnded | SaveEnded) -> bool:
        """Forget an order; False when it has its answer already."""
        if isinstance(ended, LoadEnded):
            self.load_calls.pop(ended.load_id, None)
            return self.loads.pop(ended.load_id, None) is not None
        self.save_calls.pop(ended.save_id, None)
        return self.saves.pop(ended.save_id, None) is not None


def _blocks_of(order: LoadOrder) -> tuple[int, ...]:
    return tuple(block_id for group in order.groups for block_id in group.block_ids)
