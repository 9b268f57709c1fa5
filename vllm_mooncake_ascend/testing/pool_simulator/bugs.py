"""Planted bugs of the pool: the real machines with one mistake each. The simulator must find every one, or it has no teeth.

The laws of the machines are off here: it is the world that has to notice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Law, State, What
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.pool.book import Book
from vllm_mooncake_ascend.pool.breaker import Breaker
from vllm_mooncake_ascend.pool.fence import Fence
from vllm_mooncake_ascend.pool.gets import GetInput, Gets, GetState, WorkerLoad
from vllm_mooncake_ascend.pool.loads import Load, LoadInput, Loads, LoadState
from vllm_mooncake_ascend.pool.lookups import Lookup, LookupInput, Lookups
from vllm_mooncake_ascend.pool.puts import PutInput, Puts, WorkerSave
from vllm_mooncake_ascend.pool.saves import Save, SaveInput, Saves
from vllm_mooncake_ascend.pool.scheduler import PoolScheduler, SchedulerLaws
from vllm_mooncake_ascend.pool.settings import PoolSettings, WorkerSettings
from vllm_mooncake_ascend.pool.told import Told
from vllm_mooncake_ascend.pool.worker import PoolWorker, WorkerLaws
from vllm_mooncake_ascend.testing.pool_simulator.world import Machines
from vllm_mooncake_ascend.types import Outcome, RequestId
from vllm_mooncake_ascend.wire.pool_steps import LoadEnded, SaveEnded


class NoLaw(Law[State, What]):
    """Allows every move."""

    def __init__(self) -> None:
        super().__init__({})

    def check(self, before: State, what: What, after: State) -> None:
        """Nothing is checked."""


SCHEDULER_WITHOUT_LAWS = SchedulerLaws(breaker=NoLaw(), lookup=NoLaw(), load=NoLaw(), save=NoLaw())
WORKER_WITHOUT_LAWS = WorkerLaws(breaker=NoLaw(), fence=NoLaw(), get=NoLaw(), put=NoLaw())


@dataclasses.dataclass(frozen=True, slots=True)
class PoolBug:
    """One mistake."""

    name: str
    machines: Machines
    theme: str
    """The theme whose seeds show it best."""
    max_seeds: int
    """It must be found within so many of them."""


def _with_part(attribute: str, bad_class: type[Any]) -> Machines:
    """The machines with one part of another class."""

    def scheduler(settings: PoolSettings) -> PoolScheduler:
        machine = PoolScheduler(settings, SCHEDULER_WITHOUT_LAWS)
        if hasattr(machine, attribute):
            getattr(machine, attribute).__class__ = bad_class
        return machine

    def worker(rank: int, settings: WorkerSettings) -> PoolWorker:
        machine = PoolWorker(rank, settings, WORKER_WITHOUT_LAWS)
        if hasattr(machine, attribute):
            getattr(machine, attribute).__class__ = bad_class
        return machine

    return Machines(scheduler=scheduler, worker=worker)


def _with_scheduler(bad_class: Callable[[PoolSettings, SchedulerLaws], PoolScheduler]) -> Machines:
    return Machines(scheduler=lambda settings: bad_class(settings, SCHEDULER_WITHOUT_LAWS))


# --- loads ---------------------------------------------------------------------------------------------------------------


class _PinLeakedAtAbort(Loads):
    def ended(self, request_id: RequestId, now: float) -> None:
        load = self._by_request.get(request_id)
        if load is not None:
            load.block_ids = ()
        super().ended(request_id, now)


class _AbortForgets(Loads):
    def ended(self, request_id: RequestId, _: float) -> None:
        load = self._by_request.get(request_id)
        if load is not None:
            self._settle(load, LoadInput.ENDED, ok=False)


class _FailedIsLoaded(Loads):
    def rank_ended(self, ended: LoadEnded, now: float) -> None:
        is_failed = ended.outcome is Outcome.FAILED
        super().rank_ended(msgspec.structs.replace(ended, outcome=Outcome.DONE) if is_failed else ended, now)


class _DoubleReport(Loads):
    def _report(self, load: Load, *, ok: bool) -> None:
        was_owed = load.owes_report
        super()._report(load, ok=ok)
        if was_owed and load.state is LoadState.STOPPING:
            load.owes_report = True
            self._by_request[load.request_id] = load


class _FirstRankDecides(Loads):
    def rank_ended(self, ended: LoadEnded, now: float) -> None:
        load = self._loads.get(ended.load_id)
        if load is not None:
            for rank in range(1 - ended.rank, self._settings.num_ranks):
                load.outcomes.setdefault(rank, Outcome.DONE)
            load.outcomes.pop(ended.rank, None)
        super().rank_ended(ended, now)


class _NoLoadDeadline(Loads):
    def lapse(self, now: float) -> None:
        for load in self._loads.values():
            if load.state is LoadState.LOADING:
                self._timers.drop(load.load_id)
        super().lapse(now)


# --- lookups -------------------------------------------------------------------------------------------------------------


class _NoTimeBox(Lookups):
    def lapse(self, now: float) -> None:
        for request_id in self._lookups:
            self._timers.drop(request_id)
        super().lapse(now)


class _OldAnswer(Lookups):
    def _is_fresh(self, lookup: Lookup, _: float) -> bool:
        return lookup.num_started > 0


class _LateAnswerOfAnother(Lookups):
    def answered(self, event: events.LookupEnded, now: float) -> None:
        lookup = self._calls.get(event.lookup_id)
        present = None if lookup is None else self._lookups.get(lookup.request_id)
        if present is not None and present is not lookup:
            present.lookup_id = event.lookup_id
            self._calls[event.lookup_id] = present
        super().answered(event, now)


class _MemoOutlivesReset(Lookups):
    def reset(self, namespace: str) -> None:
        self._namespace = namespace


class _LooksAgain(Lookups):
    def failed(self, request_id: RequestId) -> None:
        lookup = self._lookups[request_id]
        self._queue_or_miss(lookup, LookupInput.TRIED, 0.0)


# --- saves -----------------------------------------------------------------------------------------------------------------


class _UnknownPutUnpins(Saves):
    def rank_ended(self, ended: SaveEnded, now: float) -> None:
        is_unknown = ended.outcome is Outcome.UNKNOWN
        super().rank_ended(msgspec.structs.replace(ended, outcome=Outcome.FAILED) if is_unknown else ended, now)


class _SaveUnpinnedAtOrder(Saves):
    def _move(self, save: Save, what: SaveInput, after: Any, deadline_s: float | None = None) -> None:
        super()._move(save, what, after, deadline_s)
        if what is SaveInput.ORDERED:
            self._do(actions.UnpinBlocks(request_id=save.request_id, block_ids=save.block_ids))
            self.num_pinned_blocks -= len(save.block_ids)
            save.groups = ()


class _SavesPreempted(PoolScheduler):
    def _computed(self, event: events.ChunkComputed, now: float) -> None:
        chain = self._book.chain(event.request_id)
        super()._computed(event if chain is None else msgspec.structs.replace(event, chain=chain), now)


class _SkippedIsSaved(Saves):
    """Learns that blocks are in the pool when their save is ordered, and believes it whatever comes of it."""

    def chunk(self, entry: Any, event: events.ChunkComputed, namespace: str, now: float) -> None:
        self._known.learn(((0, one) for one in entry.hashes), now)
        super().chunk(entry, event, namespace, now)


class _BookIsNeverClosed(Book):
    def close(self, request_id: RequestId) -> None:
        """Forgotten."""


# --- workers ---------------------------------------------------------------------------------------------------------------


class _GetEndsEarly(Gets):
    def _stop(self, load: Any, reason: str, now: float) -> None:
        if load.load_id in self._loads:
            self._end(load, GetInput.STOP, Outcome.FAILED, reason, load.blocks_from(0), now)


class _UnknownIsLoaded(Gets):
    def call_ended(self, event: events.GetEnded, now: float) -> None:
        outcomes = tuple(Outcome.DONE if one is Outcome.UNKNOWN else one for one in event.outcomes)
        super().call_ended(msgspec.structs.replace(event, outcomes=outcomes), now)


class _UnknownIsFailed(Gets):
    def _await_fence(self, load: WorkerLoad, now: float) -> None:
        self._end(load, GetInput.NOT_ALL_CAME, Outcome.FAILED, load.stop_reason, load.failed_block_ids, now)


class _UnknownIsReleasedByTime(Gets):
    def _await_fence(self, load: WorkerLoad, now: float) -> None:
        self._timers.set(load.load_id, now + limits.QUARANTINE_S)
        self._move(load, GetInput.UNKNOWN_CAME, GetState.UNFENCED)

    def _stop(self, load: WorkerLoad, reason: str, now: float) -> None:
        if load.state is not GetState.UNFENCED:
            super()._stop(load, reason, now)
        elif reason == counters.TOO_LATE:
            self._end(load, GetInput.FENCED, Outcome.FAILED, load.stop_reason, load.failed_block_ids, now)


class _FenceNeedNotHold(Fence):
    def ended(self, now: float, *, holds: bool) -> bool:
        return super().ended(now, holds=holds or now >= 0)


class _FenceIsGivenUp(Fence):
    def next_timer(self) -> float | None:
        return None


class _MissingKeyIsFine(Gets):
    def call_ended(self, event: events.GetEnded, now: float) -> None:
        outcomes = tuple(Outcome.DONE if one is Outcome.FAILED else one for one in event.outcomes)
        super().call_ended(msgspec.structs.replace(event, outcomes=outcomes), now)


class _DroppedSilently(Puts):
    def _stop(self, save: WorkerSave, reason: str, now: float) -> None:
        if reason == counters.DROPPED:
            self._saves.pop(save.save_id, None)
            self._timers.drop(save.save_id)
        else:
            super()._stop(save, reason, now)


class _PutEndsEarly(Puts):
    def _stop(self, save: WorkerSave, reason: str, now: float) -> None:
        if save.save_id in self._saves:
            self._end(save, PutInput.STOP, Outcome.FAILED, reason, now)


class _NeverCloses(Breaker):
    def probed(self, now: float, *, is_healthy: bool) -> bool:
        return super().probed(now, is_healthy=is_healthy and now < 0)


# --- KV events -----------------------------------------------------------------------------------------------------------


class _FailedSaveIsTold(Told):
    def not_stored(self, save_id: int) -> None:
        self._do(actions.Stored(save_id=save_id))


class _FailedSaveIsUntold(Told):
    def not_stored(self, save_id: int) -> None:
        pass


class _NothingTakenBackAtReset(Told):
    def all_gone(self) -> None:
        pass


def _with_told(bad_class: type[Told]) -> Machines:
    def scheduler(settings: PoolSettings) -> PoolScheduler:
        machine = PoolScheduler(settings, SCHEDULER_WITHOUT_LAWS)
        machine._saves._told.__class__ = bad_class
        return machine

    return Machines(scheduler=scheduler)


POOL_BUGS = (
    PoolBug("pin leaked at abort", _with_part("_loads", _PinLeakedAtAbort), "wild", 300),
    PoolBug("abort forgets the load", _with_part("_loads", _AbortForgets), "slow", 300),
    PoolBug("failed get reported as loaded", _with_part("_loads", _FailedIsLoaded), "wild", 100),
    PoolBug("double report", _with_part("_loads", _DoubleReport), "slow", 300),
    PoolBug("first rank decides", _with_part("_loads", _FirstRankDecides), "wild", 300),
    PoolBug("load without deadline", _with_part("_loads", _NoLoadDeadline), "slow", 200),
    PoolBug("lookup without bound", _with_part("_lookups", _NoTimeBox), "slow", 200),
    PoolBug("load after lease", _with_part("_lookups", _OldAnswer), "gentle", 300),
    PoolBug("memo outlives a reset", _with_part("_lookups", _MemoOutlivesReset), "reset", 200),
    PoolBug("looks again after a failed load", _with_part("_lookups", _LooksAgain), "wild", 300),
    PoolBug("blocks reused after unknown put", _with_part("_saves", _UnknownPutUnpins), "slow", 300),
    PoolBug("save without pins", _with_part("_saves", _SaveUnpinnedAtOrder), "wild", 300),
    PoolBug("save of a preempted generation", _with_scheduler(_SavesPreempted), "wild", 300),
    PoolBug("save that is skipped counts as saved", _with_part("_saves", _SkippedIsSaved), "gentle", 100),
    PoolBug("book is never closed", _with_part("_book", _BookIsNeverClosed), "gentle", 10),
    PoolBug("get ends before its call", _with_part("_gets", _GetEndsEarly), "slow", 300),
    PoolBug("unknown get reported as loaded", _with_part("_gets", _UnknownIsLoaded), "wild", 100),
    PoolBug("unknown get released at once", _with_part("_gets", _UnknownIsFailed), "slow", 200),
    PoolBug("unknown get released by time", _with_part("_gets", _UnknownIsReleasedByTime), "slow", 300),
    PoolBug("fence that need not hold", _with_part("_fence", _FenceNeedNotHold), "slow", 300),
    PoolBug("fence is given up", _with_part("_fence", _FenceIsGivenUp), "slow", 300),
    PoolBug("missing key is fine", _with_part("_gets", _MissingKeyIsFine), "wild", 100),
    PoolBug("dropped save is not told", _with_part("_puts", _DroppedSilently), "slow", 300),
    PoolBug("put ends before its call", _with_part("_puts", _PutEndsEarly), "slow", 600),
    PoolBug("failed save is told as stored", _with_told(_FailedSaveIsTold), "slow", 300),
    PoolBug("failed save is waited for", _with_told(_FailedSaveIsUntold), "slow", 100),
    PoolBug("told blocks outlive a reset", _with_told(_NothingTakenBackAtReset), "reset", 100),
    PoolBug("breaker never closes", _with_part("_breaker", _NeverCloses), "dead", 100),
)
