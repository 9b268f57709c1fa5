"""The pool's machine of one engine's scheduler. Sans-I/O: events in, actions out, `now` is handed in.

It puts the parts together: `lookups` finds what is in the pool, `loads` brings it, `saves` adds to it, `breaker` keeps a dead
store from costing time, `book` knows the live requests. It must not know stores, keys, threads, vLLM or clocks. The rules:

- The pool is an optimisation: whatever it does, a request is held back for no longer than the lookup's and the load's bound.
- vLLM gets exactly one report for each allocation with pool tokens, and none for any other.
- A request that was let down by a load is not offered pool tokens again.
- Blocks are pinned while anything may write to them (loads) or read from them (saves), and unpinned exactly once.
- Progress of a life that is over (preemption, reset, another request of the same id) is not saved.
"""

from __future__ import annotations

import dataclasses

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Law
from vllm_mooncake_ascend.layout.blocks import NULL_BLOCK, loaded_positions
from vllm_mooncake_ascend.planner.pool_keys import group_hashes
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.pool.book import Book, Entry
from vllm_mooncake_ascend.pool.breaker import BREAKER_LAW, Breaker, BreakerInput, BreakerState
from vllm_mooncake_ascend.pool.loads import LOAD_LAW, Load, LoadInput, Loads, LoadState
from vllm_mooncake_ascend.pool.lookups import LOOKUP_LAW, LookupInput, Lookups, LookupState
from vllm_mooncake_ascend.pool.saves import SAVE_LAW, SaveInput, Saves, SaveState
from vllm_mooncake_ascend.pool.settings import PoolSettings
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.pool_steps import GroupBlocks, LoadEnded


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerLaws:
    """The tables of all parts. The simulator puts ones that also count in their place."""

    breaker: Law[BreakerState, BreakerInput] = BREAKER_LAW
    lookup: Law[LookupState, LookupInput] = LOOKUP_LAW
    load: Law[LoadState, LoadInput] = LOAD_LAW
    save: Law[SaveState, SaveInput] = SAVE_LAW


class PoolScheduler:
    """Machine of one engine's scheduler; all calls from one thread at a time."""

    def __init__(self, settings: PoolSettings, laws: SchedulerLaws | None = None) -> None:
        laws = laws or SchedulerLaws()
        self._settings = settings
        self._namespace = settings.namespace
        self._actions: list[actions.SchedulerAction] = []
        self._book = Book()
        self._breaker = Breaker(self._do, laws.breaker)
        self._lookups = Lookups(settings, self._do, lambda: self._breaker.is_open, self._lost, laws.lookup)
        self._saves = Saves(settings, self._do, self._book.broken, laws.save)
        self._loads = Loads(settings, self._do, self._let_down, self._came, laws.load)

    # --- what the shell calls -----------------------------------------------------------------------------------------

    def handle(self, event: events.SchedulerEvent, now: float) -> list[actions.SchedulerAction]:
        """Take one event and say what is to be done, in this order. Events that came late or twice do no harm."""
        match event:
            case events.LookupEnded():
                self._lookups.answered(event, now)
            case events.RankLoadEnded():
                self._missed(event.ended)
                self._loads.rank_ended(event.ended, now)
            case events.RankSaveEnded():
                self._saves.rank_ended(event.ended, now)
            case events.ProbeEnded():
                if not self._breaker.probed(now, is_healthy=event.is_healthy):
                    self._do(actions.Count(name=counters.EVENTS_IGNORED))
            case events.StoreLost():
                self._lost(now)
            case events.PoolReset():
                self._reset(event.namespace, now)
            case events.TimerFired():
                pass
            case _:
                self._follow_request(event, now)
        self._breaker.lapse(now)
        self._lookups.lapse(now)
        self._loads.lapse(now)
        self._saves.lapse(now)
        self._lookups.start_calls(now)
        done = self._actions.copy()
        self._actions.clear()
        return done

    def next_timer(self) -> float | None:
        """When TimerFired is due, None: never."""
        timers = (part.next_timer() for part in (self._breaker, self._lookups, self._loads, self._saves))
        return min((at_s for at_s in timers if at_s is not None), default=None)

    def hit_tokens(self, request_id: RequestId, num_local_tokens: int) -> int | None:
        """Tokens to be loaded beyond `num_local_tokens`; None: not known yet, ask again. Changes nothing."""
        if self._loads.num_owed >= limits.MAX_LOADS:
            return 0
        end_token = self._lookups.hit_end(request_id)
        if end_token is None:
            return None
        num_tokens = end_token - num_local_tokens
        return num_tokens if num_tokens >= self._settings.min_hit_tokens else 0

    def chain(self, request_id: RequestId) -> int | None:
        """What a ChunkComputed of a step that is scheduled now must carry; None: a stranger, nothing to be saved."""
        return self._book.chain(request_id)

    @property
    def num_waiting(self) -> int:
        """Requests that vLLM holds back for us: for a lookup, or for a report."""
        return self._lookups.num_awaited + self._loads.num_owed

    @property
    def num_loading(self) -> int:
        """Requests that wait for the end of a load."""
        return self._loads.num_owed

    @property
    def num_saves(self) -> int:
        """Saves that hold blocks."""
        return len(self._saves)

    @property
    def num_pinned_blocks(self) -> int:
        return self._loads.num_pinned_blocks + self._saves.num_pinned_blocks

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks of loads given up in which bytes may still land; counted at each call, for gauges."""
        return self._loads.num_quarantined_blocks

    @property
    def is_breaker_open(self) -> bool:
        return self._breaker.is_open

    @property
    def num_requests(self) -> int:
        return len(self._book)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _follow_request(
        self,
        event: events.RequestArrived
        | events.AdmissionTried
        | events.BlocksAllocated
        | events.ChunkComputed
        | events.RequestPreempted
        | events.RequestEnded,
        now: float,
    ) -> None:
        match event:
            case events.RequestArrived():
                self._arrived(event, now)
            case events.AdmissionTried():
                self._lookups.tried(event.request_id, event.num_local_tokens, now)
            case events.BlocksAllocated():
                self._allocated(event, now)
            case events.ChunkComputed():
                self._computed(event, now)
            case events.RequestPreempted():
                self._book.preempted(event.request_id)
            case events.RequestEnded():
                self._lookups.left(event.request_id)
                self._loads.ended(event.request_id, now)
                self._book.close(event.request_id)

    def _arrived(self, event: events.RequestArrived, now: float) -> None:
        """A request id that is in the book already is of another request, whose end was not told."""
        self._lookups.left(event.request_id)
        self._book.open(event.request_id, event.hashes, may_save=event.may_save)
        if event.may_load:
            self._lookups.arrived(event, now)

    def _allocated(self, event: events.BlocksAllocated, now: float) -> None:
        if event.num_remote_tokens <= 0:
            self._lookups.admitted(event.request_id)
            return
        entry = self._book.get(event.request_id)
        end_token = event.num_local_tokens + event.num_remote_tokens
        if entry is None or not self._lookups.covers(event.request_id, event.num_local_tokens, end_token, now):
            self._loads.refuse(event.request_id, event.loaded_block_ids)
            return
        groups = self._wanted(entry, event.block_ids, event.num_local_tokens, end_token)
        load = Load(
            load_id=0,
            request_id=event.request_id,
            chain=entry.chain,
            num_tokens=event.num_remote_tokens,
            groups=groups,
            namespace=self._namespace,
            block_ids=event.loaded_block_ids,
        )
        self._loads.start(load, now)

    def _wanted(self, entry: Entry, block_ids: events.BlockTable, first_token: int, end_token: int) -> tuple[GroupBlocks, ...]:
        """What a load of tokens [first_token, end_token) reads, and where to."""
        wanted = []
        for group_index, group in enumerate(self._settings.groups):
            ratio = group.tokens_per_block // self._settings.hash_tokens
            span = loaded_positions(group, first_token, end_token)
            hashes = tuple(group_hashes(entry.hashes[span.start * ratio : span.stop * ratio], ratio))
            ids = block_ids[group_index][span.start : span.stop]
            assert len(ids) == len(hashes), "vLLM has a hash and a block for each position that was offered"
            if NULL_BLOCK in ids:  # seldom, and long prompts have thousands of blocks
                needed = [one for one in zip(ids, hashes, strict=True) if one[0] != NULL_BLOCK]
                ids, hashes = tuple(one[0] for one in needed), tuple(one[1] for one in needed)
            if ids:
                wanted.append(GroupBlocks(group_index=group_index, block_ids=ids, hashes=hashes))
        return tuple(wanted)

    def _computed(self, event: events.ChunkComputed, now: float) -> None:
        entry = self._book.get(event.request_id)
        if entry is None or entry.chain != event.chain or entry.is_past:
            self._do(actions.Count(name=counters.STALE_PROGRESS))
        elif entry.may_save and not self._breaker.is_open:
            self._saves.chunk(entry, event, self._namespace, now)

    # --- what parts tell each other -----------------------------------------------------------------------------------

    def _lost(self, now: float) -> None:
        """The store is dead, or there is no client of it."""
        if self._breaker.lost(now):
            self._lookups.shut()
            self._saves.forget()

    def _let_down(self, request_id: RequestId) -> None:
        self._lookups.failed(request_id)

    def _came(self, load: Load, now: float) -> None:
        entry = self._book.get(load.request_id)
        if entry is not None and entry.chain == load.chain and not entry.is_past:
            self._saves.came(load.groups, now)

    def _missed(self, ended: LoadEnded) -> None:
        """A rank did not find some keys. Of another namespace that says nothing."""
        load = self._loads.get(ended.load_id)
        if load is not None and ended.missing_block_ids and load.namespace == self._namespace:
            self._saves.missed(load.groups, ended.missing_block_ids)

    def _reset(self, namespace: str, now: float) -> None:
        self._namespace = namespace
        self._book.reset()
        self._lookups.reset(namespace)
        self._loads.reset(now)
        self._saves.reset()

    def _do(self, action: actions.SchedulerAction) -> None:
        self._actions.append(action)
