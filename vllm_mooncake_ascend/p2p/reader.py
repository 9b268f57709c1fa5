"""Reader: which engine call a decode worker runs next. Sans-I/O: events in, actions out, `now` is handed in.

It owns the reads of one worker. One engine call is under way at a time; reads take turns call by call, so that no read
waits behind the whole of another. It must not know engines, plans, threads or clocks. States of a read:

    UNKNOWN    not in the table
    QUEUED     no call of it is under way; waits for its turn
    CALLING    a call of it is under way
    WAITING    all that was ordered is done; a further part will come
    STOPPING   a call of it is under way, and no other will start

A read comes in one part or several, in order. Parts of a newer generation make those before them void: their calls that have
not begun never do.

Each read is answered by exactly one EndRead, and none before its call under way has ended: only then is it certain that
no further byte is asked for. A read that was cancelled before it came is refused; one that comes again is ignored: the same
transfer for the same request. A request id alone may come again, for another transfer, once its first request has ended.
"""

from __future__ import annotations

import dataclasses
import enum

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.p2p import actions, counters, events
from vllm_mooncake_ascend.p2p.settings import ReaderSettings
from vllm_mooncake_ascend.timers import Timers
from vllm_mooncake_ascend.types import Outcome, RequestId, TransferId
from vllm_mooncake_ascend.wire.steps import ReadEnded


class ReadState(enum.Enum):
    """See the module's table."""

    UNKNOWN = "unknown"
    QUEUED = "queued"
    CALLING = "calling"
    WAITING = "waiting"
    STOPPING = "stopping"


class ReadInput(enum.Enum):
    """What can happen to a read."""

    PLANNED = "read planned"
    REFUSED = "read cannot be planned"
    TURN = "its turn"
    CALL_DONE = "call done"
    CALL_NOT_DONE = "call refused, failed or unknown"
    CANCELLED = "read cancelled"
    LATE = "time is over"


@dataclasses.dataclass(slots=True)
class Read:
    """One read of one worker."""

    transfer_id: TransferId
    request_id: RequestId
    state: ReadState = ReadState.UNKNOWN
    num_parts: int = 0
    generation: int = 0
    is_whole: bool = False
    """The last part of this generation has come."""
    num_calls: int = 0
    """Of all parts."""
    next_call: int = 0
    num_done: int = 0
    num_bytes: int = 0
    num_descriptors: int = 0
    started_at_s: float | None = None
    """Start of the first call."""
    waits_since_s: float = 0.0
    waited_s: float = 0.0
    """Since the first call, for parts to come."""
    stop_reason: str = ""


_S, _I = ReadState, ReadInput

READ_LAW: Law[ReadState, ReadInput] = Law(
    {
        _S.UNKNOWN: {
            _I.PLANNED: Cell(
                "queue it, or wait if it has no calls and is not whole; EndRead(done) if it is, (refused) if cancelled before",
                (_S.QUEUED, _S.WAITING, _S.UNKNOWN),
            ),
            _I.REFUSED: Cell("EndRead(refused)", (_S.UNKNOWN,)),
        },
        _S.QUEUED: {
            _I.PLANNED: Cell("add its calls, drop those of an older generation", (_S.QUEUED, _S.WAITING, _S.UNKNOWN)),
            _I.REFUSED: Cell("EndRead(refused before its first call, else failed)", (_S.UNKNOWN,)),
            _I.TURN: Cell("StartCall", (_S.CALLING,)),
            _I.CANCELLED: Cell("EndRead(refused before its first call, else failed)", (_S.UNKNOWN,)),
            _I.LATE: Cell("EndRead(refused before its first call, else failed)", (_S.UNKNOWN,)),
        },
        _S.WAITING: {
            _I.PLANNED: Cell("queue it if there are calls; EndRead(done) when whole", (_S.QUEUED, _S.WAITING, _S.UNKNOWN)),
            _I.REFUSED: Cell("EndRead(refused before its first call, else failed)", (_S.UNKNOWN,)),
            _I.CANCELLED: Cell("EndRead(refused before its first call, else failed)", (_S.UNKNOWN,)),
        },
        _S.CALLING: {
            _I.PLANNED: Cell("add its calls, drop those of an older generation", (_S.CALLING,)),
            _I.REFUSED: Cell("nothing yet: the call is under way", (_S.STOPPING,)),
            _I.CALL_DONE: Cell(
                "to the end of the queue, or wait for the next part; EndRead(done) when whole and done",
                (_S.QUEUED, _S.WAITING, _S.UNKNOWN),
            ),
            _I.CALL_NOT_DONE: Cell("EndRead with that outcome (failed for refused after a call that was done)", (_S.UNKNOWN,)),
            _I.CANCELLED: Cell("nothing yet: the call is under way", (_S.STOPPING,)),
            _I.LATE: Cell("nothing yet: the call is under way", (_S.STOPPING,)),
        },
        _S.STOPPING: {
            _I.PLANNED: Cell("nothing: none of it will start", (_S.STOPPING,)),
            _I.REFUSED: Cell("nothing yet: the call is under way", (_S.STOPPING,)),
            _I.CALL_DONE: Cell("EndRead(done if it was the last of all, else failed)", (_S.UNKNOWN,)),
            _I.CALL_NOT_DONE: Cell("EndRead with that outcome (failed for refused after a call that was done)", (_S.UNKNOWN,)),
            _I.CANCELLED: Cell("nothing yet: the call is under way", (_S.STOPPING,)),
            _I.LATE: Cell("nothing yet: the call is under way", (_S.STOPPING,)),
        },
    }
)
"""Law of a read at the worker."""


class Reader:
    """Machine of one decode worker; all calls from one thread at a time.

    Args:
        rank: this worker's number, as ReadEnded names it.
    """

    def __init__(self, rank: int, settings: ReaderSettings, law: Law[ReadState, ReadInput] = READ_LAW) -> None:
        self._rank = rank
        self._settings = settings
        self._law = law
        self._reads: dict[RequestId, Read] = {}
        self._queue: dict[RequestId, Read] = {}
        """QUEUED reads, in order of turns: to find the next one must not cost a look at all that wait."""
        self._calling: Read | None = None
        self._call_index = 0
        """Of the call under way."""
        self._memory: dict[RequestId, TransferId | None] = {}
        """The transfer of each request's read that has ended, None: cancelled before it was known; oldest first."""
        self._timers: Timers[RequestId] = Timers()
        self._actions: list[actions.ReaderAction] = []

    def handle(self, event: events.ReaderEvent, now: float) -> list[actions.ReaderAction]:
        """Take one event and say what is to be done, in this order. Events that came late or twice do no harm."""
        match event:
            case events.CallEnded():
                self._call_ended(event, now)
            case events.ReadPlanned():
                self._planned(event, now)
            case events.ReadRefused():
                self._refused(event, now)
            case events.ReadCancelled():
                self._cancelled(event.request_id, now)
            case events.TimerFired():
                pass
        while (request_id := self._timers.take_due(now)) is not None:
            self._stop(self._reads[request_id], ReadInput.LATE, "it took longer than read_wait_s", now)
        self._next_call(now)
        done, self._actions = self._actions, []
        return done

    def next_timer(self) -> float | None:
        """When TimerFired is due, None: never."""
        return self._timers.next_s()

    @property
    def num_reads(self) -> int:
        """Reads that have not ended."""
        return len(self._reads)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _planned(self, event: events.ReadPlanned, now: float) -> None:
        read = self._read_of(event)
        if read is None:
            return
        if read.state is ReadState.UNKNOWN and self._memory.get(event.request_id, event.transfer_id) is None:
            self._end(read, ReadInput.PLANNED, Outcome.REFUSED, "it was cancelled before it began", now)
            return
        if event.generation != read.generation:
            read.generation, read.next_call = event.generation, read.num_calls
        read.num_parts += 1
        read.num_calls += event.num_calls
        read.is_whole = event.is_last
        self._timers.set(read.request_id, now + self._settings.read_wait_s)
        if read.state in (ReadState.CALLING, ReadState.STOPPING):
            self._move(read, ReadInput.PLANNED, read.state)
        else:
            self._reads[event.request_id] = read
            self._go_on(read, ReadInput.PLANNED, now)

    def _refused(self, event: events.ReadRefused, now: float) -> None:
        read = self._read_of(event)
        if read is not None and read.state is ReadState.UNKNOWN:
            self._end(read, ReadInput.REFUSED, Outcome.REFUSED, event.reason, now)
        elif read is not None:
            self._stop(read, ReadInput.REFUSED, event.reason, now)

    def _read_of(self, event: events.ReadPlanned | events.ReadRefused) -> Read | None:
        """The read whose next part this is, new for the first one; None for a part that came before, or too late."""
        read = self._reads.get(event.request_id)
        if read is not None and (read.transfer_id, read.num_parts) == (event.transfer_id, event.part):
            return read
        if read is None and event.part == 0 and self._memory.get(event.request_id) != event.transfer_id:
            return Read(transfer_id=event.transfer_id, request_id=event.request_id)
        self._count(counters.ORDERS_IGNORED)
        return None

    def _cancelled(self, request_id: RequestId, now: float) -> None:
        read = self._reads.get(request_id)
        if read is not None:
            self._stop(read, ReadInput.CANCELLED, "it was cancelled", now)
        elif request_id not in self._memory:
            self._remember(request_id, None)

    # --- calls --------------------------------------------------------------------------------------------------------

    def _go_on(self, read: Read, what: ReadInput, now: float) -> None:
        """No call of the read is under way: another one, its end, or wait for the next part."""
        if read.next_call < read.num_calls:
            read.waited_s += self._waits_for_s(read, now)
            self._move(read, what, ReadState.QUEUED)
        elif read.is_whole:
            self._end(read, what, Outcome.DONE, "", now)
        else:
            if read.state is not ReadState.WAITING:
                read.waits_since_s = now
            self._timers.drop(read.request_id)
            self._move(read, what, ReadState.WAITING)

    def _next_call(self, now: float) -> None:
        """Start a call of the read whose turn it is, unless one is under way."""
        if self._calling is not None or not self._queue:
            return
        read = self._calling = next(iter(self._queue.values()))
        if read.started_at_s is None:
            read.started_at_s = now
        self._move(read, ReadInput.TURN, ReadState.CALLING)
        self._call_index = read.next_call
        read.next_call += 1
        self._actions.append(
            actions.StartCall(transfer_id=read.transfer_id, request_id=read.request_id, call_index=self._call_index)
        )

    def _call_ended(self, event: events.CallEnded, now: float) -> None:
        read = self._calling
        if read is None or (read.request_id, self._call_index) != (event.request_id, event.call_index):
            self._count(counters.MESSAGES_IGNORED, counters.NOBODY_ASKED)
            return
        self._calling = None
        self._count(counters.CALLS_ENDED, event.outcome.value)
        read.num_bytes += event.num_bytes
        read.num_descriptors += event.num_descriptors
        if event.outcome is not Outcome.DONE:
            is_untouched = event.outcome is Outcome.REFUSED and read.num_done == 0
            outcome = event.outcome if is_untouched or event.outcome is Outcome.UNKNOWN else Outcome.FAILED
            self._end(read, ReadInput.CALL_NOT_DONE, outcome, event.reason, now)
            return
        read.num_done += 1
        if read.state is ReadState.STOPPING and not (read.is_whole and read.next_call == read.num_calls):
            self._end(read, ReadInput.CALL_DONE, Outcome.FAILED, read.stop_reason, now)
        else:
            self._go_on(read, ReadInput.CALL_DONE, now)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _stop(self, read: Read, what: ReadInput, reason: str, now: float) -> None:
        if read.state in (ReadState.QUEUED, ReadState.WAITING):
            self._end(read, what, Outcome.FAILED if read.num_done else Outcome.REFUSED, reason, now)
        else:
            read.stop_reason = reason
            self._move(read, what, ReadState.STOPPING)

    def _end(self, read: Read, what: ReadInput, outcome: Outcome, reason: str, now: float) -> None:
        """The one end of a read: no call of it is under way, and none will start."""
        assert self._calling is not read, "a read does not end while its call is under way"
        waited_s = read.waited_s + self._waits_for_s(read, now)
        seconds = 0.0 if read.started_at_s is None else now - read.started_at_s - waited_s
        self._reads.pop(read.request_id, None)
        self._timers.drop(read.request_id)
        self._remember(read.request_id, read.transfer_id)
        self._move(read, what, ReadState.UNKNOWN)
        self._actions.append(
            actions.EndRead(
                ended=ReadEnded(
                    transfer_id=read.transfer_id,
                    request_id=read.request_id,
                    rank=self._rank,
                    outcome=outcome,
                    reason=reason,
                    num_bytes=read.num_bytes,
                    num_descriptors=read.num_descriptors,
                    seconds=seconds,
                )
            )
        )

    @staticmethod
    def _waits_for_s(read: Read, now: float) -> float:
        """How long it has been waiting for a part; before its first call that is no time of the read."""
        return now - read.waits_since_s if read.state is ReadState.WAITING and read.started_at_s is not None else 0.0

    def _remember(self, request_id: RequestId, transfer_id: TransferId | None) -> None:
        self._memory.pop(request_id, None)
        self._memory[request_id] = transfer_id
        if len(self._memory) > limits.MAX_REMEMBERED_READS:
            del self._memory[next(iter(self._memory))]

    def _move(self, read: Read, what: ReadInput, after: ReadState) -> None:
        before, read.state = read.state, after
        self._law.check(before, what, after)
        if before is ReadState.QUEUED and after is not ReadState.QUEUED:
            del self._queue[read.request_id]
        elif after is ReadState.QUEUED and before is not ReadState.QUEUED:
            self._queue[read.request_id] = read

    def _count(self, name: str, reason: str = counters.NO_REASON) -> None:
        self._actions.append(actions.Count(name=name, reason=reason))
