"""Lookups: how much of each request's prompt is in the pool. A part of the scheduler's machine.

A lookup starts when its request arrives, so that most are over before vLLM asks. vLLM is held back for a bounded time,
counted from its first question. Then it may admit the request without us; if it does not, as when many requests came at
once and most wait their turn anyway, the answer is taken when it comes. An answer is kept until the request is admitted, but
only as long as the store's object lease makes it true; an older one is asked for anew.
States of a lookup:

    UNKNOWN   not in the table
    QUEUED    waits for a call
    RUNNING   its call is under way
    KNOWN     answered
    MISSED    nothing will come of the pool for this request

Calls and wishes are told apart by number: a call may outlive the request that wanted it, and keeps its place until it ends.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.planner import hits
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.pool.settings import PoolSettings
from vllm_mooncake_ascend.timers import Timers
from vllm_mooncake_ascend.types import RequestId


class LookupState(enum.Enum):
    """See the module's table."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    RUNNING = "running"
    KNOWN = "known"
    MISSED = "missed"


class LookupInput(enum.Enum):
    """What can happen to a lookup."""

    ARRIVED = "request arrived"
    TRIED = "vLLM asks"
    TURN = "its turn"
    ANSWERED = "answered"
    LATE = "time is over"
    ADMITTED = "admitted without pool tokens"
    SHUT = "store lost, or pool reset"
    FAILED = "its load failed"
    ENDED = "request ended"


_S, _I = LookupState, LookupInput
_END = Cell("forget it", (_S.UNKNOWN,))
_MISS = Cell("a miss from now on", (_S.MISSED,))
_LATE = "vLLM is held back no longer; others go first"

LOOKUP_LAW: Law[LookupState, LookupInput] = Law(
    {
        _S.UNKNOWN: {
            _I.ARRIVED: Cell("queue it; a miss where there is nothing to ask, or nobody to ask it", (_S.QUEUED, _S.MISSED))
        },
        _S.QUEUED: {
            _I.TRIED: Cell("the first time: start waiting", (_S.QUEUED,)),
            _I.TURN: Cell("StartLookup", (_S.RUNNING,)),
            _I.LATE: Cell(_LATE, (_S.QUEUED,)),
            _I.ADMITTED: _MISS,
            _I.SHUT: _MISS,
            _I.ENDED: _END,
        },
        _S.RUNNING: {
            _I.TRIED: Cell("the first time: start waiting", (_S.RUNNING,)),
            _I.ANSWERED: Cell("keep the answer", (_S.KNOWN,)),
            _I.LATE: Cell(_LATE, (_S.RUNNING,)),
            _I.ADMITTED: _MISS,
            _I.SHUT: _MISS,
            _I.ENDED: _END,
        },
        _S.KNOWN: {
            _I.TRIED: Cell(
                "nothing; ask anew if it is old, or the local cache has less than was thought", (_S.KNOWN, _S.QUEUED, _S.MISSED)
            ),
            _I.SHUT: _MISS,
            _I.FAILED: Cell("a miss for good: a request looks once where it was let down", (_S.MISSED,)),
            _I.ENDED: _END,
        },
        _S.MISSED: {
            _I.TRIED: Cell("nothing", (_S.MISSED,)),
            _I.FAILED: Cell("nothing", (_S.MISSED,)),
            _I.ENDED: _END,
        },
    }
)
"""Law of a lookup."""


@dataclasses.dataclass(slots=True)
class Lookup:
    """One request's wish to know."""

    request_id: RequestId
    hashes: Sequence[bytes]
    limit_token: int
    """No prefix longer than this can be used."""
    first_token: int
    end_token: int = 0
    """End of the longest usable prefix, when KNOWN."""
    state: LookupState = LookupState.UNKNOWN
    lookup_id: int = 0
    num_started: int = 0
    is_late: bool = False
    """vLLM has waited for it as long as it may."""
    started_at_s: float = 0.0
    """When the call began that the answer is of: object leases are as old as that."""


class Lookups:
    """Works with the scheduler machine's breaker, through `is_shut`. `lost` is called for a sign of a dead store."""

    def __init__(
        self,
        settings: PoolSettings,
        do: Callable[[actions.SchedulerAction], None],
        is_shut: Callable[[], bool],
        lost: Callable[[float], None],
        law: Law[LookupState, LookupInput],
    ) -> None:
        self._settings = settings
        self._namespace = settings.namespace
        self._do = do
        self._is_shut = is_shut
        self._lost = lost
        self._law = law
        self._lookups: dict[RequestId, Lookup] = {}
        self._queues: tuple[dict[RequestId, Lookup], dict[RequestId, Lookup]] = ({}, {})
        """QUEUED ones, oldest first: those that are not late, and those that are."""
        self._calls: dict[int, Lookup] = {}
        """Calls under way by number; their wish may have gone."""
        self._awaited: set[RequestId] = set()
        """QUEUED and RUNNING ones that vLLM waits for."""
        self._timers: Timers[RequestId | int] = Timers()
        """Waiting ends, by request; calls are overdue, by number."""
        self._last_id = 0

    def next_timer(self) -> float | None:
        return self._timers.next_s()

    @property
    def num_awaited(self) -> int:
        """Requests that vLLM holds back for their lookup."""
        return len(self._awaited)

    @property
    def num_calls(self) -> int:
        """Calls under way."""
        return len(self._calls)

    def hit_end(self, request_id: RequestId) -> int | None:
        """End of the prefix that can be loaded, 0 for none; None: not known yet. Changes nothing."""
        lookup = self._lookups.get(request_id)
        if lookup is None or lookup.state is LookupState.MISSED:
            return 0
        if lookup.state is LookupState.KNOWN:
            return lookup.end_token
        return 0 if lookup.is_late else None

    def covers(self, request_id: RequestId, first_token: int, end_token: int, now: float) -> bool:
        """Whether the answer, still true, says that these tokens can be loaded."""
        lookup = self._lookups.get(request_id)
        return (
            lookup is not None
            and lookup.state is LookupState.KNOWN
            and lookup.first_token <= first_token < end_token <= lookup.end_token
            and self._is_fresh(lookup, now)
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def arrived(self, event: events.RequestArrived, now: float) -> None:
        """Start to find out, unless it is known that nothing can come of it."""
        lookup = Lookup(
            request_id=event.request_id,
            hashes=event.hashes,
            limit_token=hits.longest_possible(self._settings.groups, event.num_prompt_tokens),
            first_token=event.num_local_tokens,
        )
        self._queue_or_miss(lookup, LookupInput.ARRIVED, now)

    def tried(self, request_id: RequestId, num_local_tokens: int, now: float) -> None:
        """vLLM asks for a request's tokens, and may be told to wait."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return
        if lookup.state is LookupState.KNOWN and not (self._is_fresh(lookup, now) and lookup.first_token <= num_local_tokens):
            lookup.first_token, lookup.is_late = num_local_tokens, False
            self._queue_or_miss(lookup, LookupInput.TRIED, now)
        else:
            self._move(lookup, LookupInput.TRIED, lookup.state)
        is_under_way = lookup.state in (LookupState.QUEUED, LookupState.RUNNING)
        if is_under_way and not lookup.is_late and request_id not in self._awaited:
            self._awaited.add(request_id)
            bound_s = self._settings.lookup_bound_s(lookup.limit_token - lookup.first_token)
            self._timers.set(request_id, now + bound_s)

    def admitted(self, request_id: RequestId) -> None:
        """vLLM has admitted the request without pool tokens."""
        lookup = self._lookups.get(request_id)
        if lookup is not None and lookup.state in (LookupState.QUEUED, LookupState.RUNNING):
            self._miss(lookup, LookupInput.ADMITTED, counters.TOO_LATE)

    def failed(self, request_id: RequestId) -> None:
        """A load of this request failed, or was not what vLLM allocated."""
        lookup = self._lookups.get(request_id)
        if lookup is not None:
            self._move(lookup, LookupInput.FAILED, LookupState.MISSED)

    def left(self, request_id: RequestId) -> None:
        """The request has ended."""
        lookup = self._lookups.get(request_id)
        if lookup is not None:
            self._move(lookup, LookupInput.ENDED, LookupState.UNKNOWN)

    # --- calls --------------------------------------------------------------------------------------------------------

    def answered(self, event: events.LookupEnded, now: float) -> None:
        """A call has ended."""
        lookup = self._calls.pop(event.lookup_id, None)
        if lookup is None:
            self._do(actions.Count(name=counters.EVENTS_IGNORED))
            return
        self._timers.drop(event.lookup_id)
        if event.is_lost:
            self._lost(now)
        if lookup.state is not LookupState.RUNNING or lookup.lookup_id != event.lookup_id:
            self._do(actions.Count(name=counters.LOOKUPS_TOO_LATE))
            return
        lookup.end_token = min(event.end_token, lookup.limit_token)
        self._count(counters.HIT if lookup.end_token > lookup.first_token else counters.MISS)
        self._move(lookup, LookupInput.ANSWERED, LookupState.KNOWN)

    def lapse(self, now: float) -> None:
        """Waiting is over for some; a call that is overdue is a sign of a dead store."""
        while (key := self._timers.take_due(now)) is not None:
            if isinstance(key, int):
                self._lost(now)
            else:
                self._stop_waiting(self._lookups[key])

    def _stop_waiting(self, lookup: Lookup) -> None:
        lookup.is_late = True
        self._awaited.discard(lookup.request_id)
        in_time, late = self._queues
        if in_time.pop(lookup.request_id, None) is not None:
            late[lookup.request_id] = lookup
        self._move(lookup, LookupInput.LATE, lookup.state)

    def shut(self) -> None:
        """The store is lost: nothing that was asked, or is known, is of use."""
        for lookup in list(self._lookups.values()):
            if lookup.state is not LookupState.MISSED:
                self._miss(lookup, LookupInput.SHUT, counters.STORE_LOST)

    def reset(self, namespace: str) -> None:
        """What was found is of the past; requests to come look elsewhere."""
        self.shut()
        self._namespace = namespace

    def start_calls(self, now: float) -> None:
        """Start as many calls as may be under way."""
        in_time, late = self._queues
        while (in_time or late) and len(self._calls) < limits.MAX_LOOKUPS_AT_ONCE:
            lookup = next(iter((in_time or late).values()))
            self._last_id += 1
            lookup.lookup_id, lookup.started_at_s = self._last_id, now
            lookup.num_started += 1
            self._move(lookup, LookupInput.TURN, LookupState.RUNNING)
            self._calls[lookup.lookup_id] = lookup
            self._timers.set(lookup.lookup_id, now + limits.LOOKUP_OVERDUE_S)
            self._do(
                actions.StartLookup(
                    lookup_id=lookup.lookup_id,
                    request_id=lookup.request_id,
                    namespace=self._namespace,
                    hashes=lookup.hashes,
                    first_token=lookup.first_token,
                    end_token=lookup.limit_token,
                )
            )

    # --- inside -------------------------------------------------------------------------------------------------------

    def _is_fresh(self, lookup: Lookup, now: float) -> bool:
        return now <= lookup.started_at_s + self._settings.memo_s

    def _queue_or_miss(self, lookup: Lookup, what: LookupInput, now: float) -> None:
        reason = self._why_not(lookup)
        if reason:
            self._miss(lookup, what, reason)
        else:
            self._move(lookup, what, LookupState.QUEUED)
            self.start_calls(now)

    def _why_not(self, lookup: Lookup) -> str:
        """Why nobody is asked, "" when somebody is."""
        if lookup.limit_token - lookup.first_token < self._settings.min_hit_tokens:
            return counters.NOTHING_TO_ASK
        if self._is_shut():
            return counters.STORE_LOST
        num_queued = sum(map(len, self._queues))
        is_too_much = num_queued >= limits.MAX_QUEUED_LOOKUPS or lookup.num_started >= limits.MAX_LOOKUPS_PER_REQUEST
        return counters.TOO_MANY if is_too_much else ""

    def _miss(self, lookup: Lookup, what: LookupInput, reason: str) -> None:
        self._count(reason)
        self._move(lookup, what, LookupState.MISSED)

    def _move(self, lookup: Lookup, what: LookupInput, after: LookupState) -> None:
        before, lookup.state = lookup.state, after
        self._law.check(before, what, after)
        if before is after:
            return
        for queue in self._queues:
            queue.pop(lookup.request_id, None)
        if after is LookupState.QUEUED:
            self._queues[lookup.is_late][lookup.request_id] = lookup
        elif after is not LookupState.RUNNING:
            self._timers.drop(lookup.request_id)
            self._awaited.discard(lookup.request_id)
        if after is LookupState.UNKNOWN:
            del self._lookups[lookup.request_id]
        elif before is LookupState.UNKNOWN:
            self._lookups[lookup.request_id] = lookup

    def _count(self, reason: str) -> None:
        self._do(actions.Count(name=counters.LOOKUPS_ENDED, reason=reason))
