"""PoolSchedulerShell: the shell around the pool's machine of one engine's scheduler.

vLLM's scheduler thread feeds events, asks for hits and drains what is its own to do (pins, orders, reports, KV events); it
never waits for the store. Lookup threads ask the store and feed what they found; the control thread fires timers and probes
(`pool_driver`). Each action goes where it belongs:

    StartLookup    to the lookup threads
    all others     to the inbox of the scheduler thread, in order, waking it (those of the driver's own apart)

A bug in the machine turns the pool off here until the next start: no hits, nothing is loaded or saved, blocks that are pinned
stay pinned, and each receive that vLLM waits for is reported failed, once. Where a failed receive does not give the request
other blocks, its report waits until every rank has ended its load.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import KVStore, StoreAnswer
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.planner.pool_keys import Shard
from vllm_mooncake_ascend.pool import actions, events
from vllm_mooncake_ascend.pool.scheduler import PoolScheduler
from vllm_mooncake_ascend.pool.settings import PoolSettings
from vllm_mooncake_ascend.runtime.call_threads import CallThreads
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.inbox import Inbox
from vllm_mooncake_ascend.runtime.pool_driver import PoolDriver
from vllm_mooncake_ascend.runtime.pool_lookups import PoolLookups
from vllm_mooncake_ascend.runtime.store_errors import StoreErrors
from vllm_mooncake_ascend.runtime.unreported import Unreported
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.pool_steps import LoadEnded

logger = logging.getLogger(__name__)

JOIN_S = 5.0
"""When the store is closed no call is under way, or it hangs: threads end within this, or not at all."""

Action = (
    actions.PinBlocks
    | actions.UnpinBlocks
    | actions.OrderLoad
    | actions.CancelLoad
    | actions.OrderSave
    | actions.Stored
    | actions.NotStored
    | actions.Gone
    | actions.ReportReceive
)
"""What is the scheduler thread's to do."""


class PoolSchedulerShell:
    """One per engine (DP rank). `start` once, `close` once; all else from the scheduler thread in between.

    Args:
        shards: of all ranks (`planner.pool_keys.shards`).
        store: a client that lends no memory and has none registered. Owned from now on: `close` closes it.
        is_strict: a bug in the machine is raised in the scheduler thread's next call: for tests.
        wake: called whenever there is news for the scheduler thread: something to drain, a lookup that has ended or is
            waited for no longer. From any thread, perhaps under a lock, so it must not wait, nor call anything here.
    """

    def __init__(
        self,
        *,
        settings: PoolSettings,
        shards: tuple[Shard, ...],
        store: KVStore,
        is_strict: bool,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._is_strict = is_strict
        self._wake = wake
        self._machine = PoolScheduler(settings)
        self._driver: PoolDriver[events.SchedulerEvent, actions.SchedulerAction] = PoolDriver(
            self._machine, store, carry_out=self._carry_out, changed=wake, where="pool_scheduler"
        )
        self._errors = StoreErrors(self._driver.count)
        self._lookups = PoolLookups(store, settings, shards, answered=self._store_answered, clock=boot_s)
        self._lookup_threads: CallThreads | None = None
        self._inbox: Inbox[Action] = Inbox(capacity=limits.MAX_INBOX, wake=wake)
        self._unreported = Unreported()
        self._loads_out: dict[int, _LoadOut] = {}

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads and join the pool; when that cannot be done now it is done later, and is no error."""
        assert self._lookup_threads is None, "started twice"
        self._lookup_threads = CallThreads("pool-lookup", limits.MAX_LOOKUPS_AT_ONCE, failed=self._driver.fail)
        self._driver.start()

    def close(self) -> None:
        """End the threads and close the store, which waits for calls under way. A second call does nothing new."""
        if self._lookup_threads is None:
            return
        self._driver.halt()
        self._driver.stop()
        self._lookup_threads.stop()
        self._store.close()
        have_ended = [self._lookup_threads.join(JOIN_S), self._driver.join(JOIN_S)]
        if not all(have_ended):
            logger.error("a call to the pool does not end; its thread is left behind")

    # --- for the scheduler thread -------------------------------------------------------------------------------------

    def feed(self, event: events.SchedulerEvent) -> None:
        """Let the machine take an event, after all that has come in before; `drain` what it asks for.

        Raises:
            LocalProtocolError: in strict mode, when the machine has failed.
        """
        with self._driver.lock:
            if isinstance(event, events.BlocksAllocated) and event.num_remote_tokens > 0:
                self._unreported.owe(event.request_id, event.loaded_block_ids)
            elif isinstance(event, events.RankLoadEnded):
                self._rank_ended(event.ended)
            self._driver.feed(event)
        self._heed_failure()

    def hit_tokens(self, request_id: RequestId, num_local_tokens: int) -> int | None:
        """Tokens that the pool brings beyond `num_local_tokens`; None: not known yet, ask again. Feeds `AdmissionTried`.

        Raises:
            LocalProtocolError: in strict mode, when the machine has failed.
        """
        with self._driver.lock:
            self._driver.feed(events.AdmissionTried(request_id=request_id, num_local_tokens=num_local_tokens))
            self._heed_failure()
            return 0 if self._driver.has_failed else self._machine.hit_tokens(request_id, num_local_tokens)

    def chain(self, request_id: RequestId) -> int | None:
        """What a ChunkComputed of a step that is scheduled now must carry; None: nothing is to be saved.

        Without the lock: nothing that another thread brings changes it.
        """
        return None if self._driver.has_failed else self._machine.chain(request_id)

    def drain(self) -> list[Action]:
        """What the machine wants done by the scheduler thread, in order.

        Raises:
            LocalProtocolError: in strict mode, when the machine has failed.
        """
        self._heed_failure()
        if not self._driver.has_failed:
            return self._inbox.drain()
        with self._driver.lock:
            reports = [self._unreported.break_off(request_id) for request_id in self._due_after_failure()]
            failed = [actions.ReportReceive(report=report) for report in reports if report is not None]
            return [*self._inbox.drain(), *failed]

    @property
    def has_pending(self) -> bool:
        """`drain` has something."""
        if not self._driver.has_failed:
            return self._inbox.has_values
        with self._driver.lock:
            return self._inbox.has_values or bool(self._due_after_failure())

    @property
    def num_waiting(self) -> int:
        """Requests that vLLM holds back for us: for a lookup, or for a report."""
        with self._driver.lock:
            return len(self._unreported.owed) if self._driver.has_failed else self._machine.num_waiting

    @property
    def num_loading(self) -> int:
        """Requests that wait for the end of a load."""
        with self._driver.lock:
            return 0 if self._driver.has_failed else self._machine.num_loading

    @property
    def is_usable(self) -> bool:
        """The store is asked: it is not taken for dead, and nothing here has failed."""
        with self._driver.lock:
            return not (self._driver.has_failed or self._machine.is_breaker_open)

    @property
    def has_failed(self) -> bool:
        """The pool is off here: blocks that are pinned stay pinned."""
        return self._driver.has_failed

    def count(self, name: str, reason: str = "") -> None:
        """Add one to a counter."""
        self._driver.count(name, reason)

    def take_stats(self) -> dict[str, Any]:
        """What happened since the last call, as `metrics.stats` has it; empty when nothing did."""
        return self._driver.take_stats(self._gauges)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _gauges(self) -> dict[str, float]:
        if self._driver.has_failed:
            return {}
        return {
            names.POOL_REQUESTS_WAITING: self._machine.num_waiting,
            names.POOL_SAVES_IN_FLIGHT: self._machine.num_saves,
            names.POOL_BLOCKS_PINNED: self._machine.num_pinned_blocks,
            names.POOL_BLOCKS_QUARANTINED: self._machine.num_quarantined_blocks,
            names.POOL_BREAKER_OPEN: int(self._machine.is_breaker_open),
        }

    def _heed_failure(self) -> None:
        if self._is_strict:
            self._driver.raise_failure()

    def _carry_out(self, action: actions.SchedulerAction) -> None:
        match action:
            case actions.StartLookup():
                assert self._lookup_threads is not None, "not started"
                self._lookup_threads.submit(functools.partial(self._look_up, action))
            case actions.ReportReceive():
                if self._unreported.may_report(action.report.request_id):
                    self._put(action)
            case actions.OrderLoad():
                self._loads_out[action.order.load_id] = _LoadOut(action.order.request_id)
                self._put(action)
            case actions.ProbeStore() | actions.Count() | actions.Note():
                raise LocalProtocolError(f"{type(action).__name__} is the driver's")
            case _:
                self._put(action)

    def _put(self, action: Action) -> None:
        if not self._inbox.put(action):
            raise LocalProtocolError(f"{limits.MAX_INBOX} actions wait for vLLM's scheduler thread, which does not take them")

    def _due_after_failure(self) -> list[RequestId]:
        """Requests whose failure can be reported: of a load under way only where that gives them other blocks."""
        if self._settings.can_report_unknown_at_once:
            return list(self._unreported.owed)
        loading = {load.request_id for load in self._loads_out.values()}
        return [request_id for request_id in self._unreported.owed if request_id not in loading]

    def _rank_ended(self, ended: LoadEnded) -> None:
        load = self._loads_out.get(ended.load_id)
        if load is not None:
            load.ranks.add(ended.rank)
            if len(load.ranks) == self._settings.num_ranks:
                del self._loads_out[ended.load_id]

    # --- the lookup threads -------------------------------------------------------------------------------------------

    def _look_up(self, wanted: actions.StartLookup) -> None:
        self._driver.feed(self._lookups.run(wanted))
        self._wake()

    def _store_answered(self, answer: StoreAnswer, seconds: float) -> None:
        self._driver.observe(names.POOL_LOOKUP_DURATION, seconds)
        self._errors.note("lookup", answer)


class _LoadOut:
    """A load that was ordered, and the ranks that have ended it."""

    def __init__(self, request_id: RequestId) -> None:
        self.request_id = request_id
        self.ranks: set[int] = set()
