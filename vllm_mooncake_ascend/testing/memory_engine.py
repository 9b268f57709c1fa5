"""In-memory transfer engines: `engines.base.TransferEngine` inside one process, on real addresses, with faults to order.

A `MemoryNetwork` stands for the wires between engines; `network.engine()` adds one. Everything is deterministic: no thread,
no random number, no clock but `network.advance(seconds)`.

Stricter than Mooncake, never kinder:
- remote memory must be registered, too, run by run; runs are copied last to first, so that no code can count on an order;
- a batch with one bad run lands in part, and is UNKNOWN;
- bytes of an UNKNOWN read land as late as `limits.QUARANTINE_S` allows, unless the reader fences;
- what would be *our* bug raises LocalProtocolError instead of working by luck: two reads at once on one engine, target
  runs that overlap, a target that an unresolved read may still write to.

| what a peer does                 | a read from it                       | later                                              |
|----------------------------------|--------------------------------------|----------------------------------------------------|
| runs                             | DONE                                 |                                                    |
| never was, died, closed; unknown to the reader | FAILED                 | nothing lands                                      |
| died or closed; known to the reader | UNKNOWN                           | nothing lands                                      |
| died and came back; known        | UNKNOWN until the reader fences      | nothing lands                                      |
| is stopped; unknown to the reader | FAILED                              | nothing lands                                      |
| is stopped; known                | UNKNOWN, first run written           | the rest lands when it resumes                     |
| has a fault ordered (`inject`)   | as the fault says                    | as the fault says                                  |
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections import deque
from collections.abc import Sequence
from typing import Union

import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import ReadResult
from vllm_mooncake_ascend.engines.refusal import refusal
from vllm_mooncake_ascend.engines.register import MemoryRegister
from vllm_mooncake_ascend.errors import EngineError, LocalProtocolError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.types import Outcome, Session

LATE_WINDOW_S = limits.QUARANTINE_S - 1.0
"""How long after an UNKNOWN read its bytes may land: just what the product promises to endure."""
GATE_S = 30.0
"""No test keeps a gate closed longer; a read that waited this long fails the test instead of hanging it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fails:
    """The read ends with `outcome` after `num_landed` of its runs were written. Nothing lands later."""

    outcome: Outcome
    num_landed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LandsLate:
    """The read ends UNKNOWN after `num_landed` runs; the others are written `after_s` later, unless fenced."""

    after_s: float
    num_landed: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.after_s < LATE_WINDOW_S, "no engine is later than that"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WaitsFor:
    """The read blocks until `gate` is set, then goes on as if nothing had been; `entered` is set when it starts to wait."""

    gate: threading.Event
    entered: threading.Event


Fault = Union[Fails, LandsLate, WaitsFor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Late:
    """Runs of an UNKNOWN read that are still to land, `due_s` None: when `source` resumes."""

    source: _Endpoint
    runs: CopyBatch
    due_s: float | None
    expires_s: float


@dataclasses.dataclass(eq=False, kw_only=True)
class _Endpoint:
    """One life of an engine under a session. A restarted engine is another endpoint under the same session."""

    register: MemoryRegister
    is_stopped: bool = False
    is_gone: bool = False
    faults: deque[Fault] = dataclasses.field(default_factory=deque)


class MemoryNetwork:
    """Sessions, faults and time of the engines of one test."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by engines for every step but waiting at a gate."""
        self.now_s = 0.0
        self._endpoints: dict[Session, _Endpoint] = {}
        self._engines: list[MemoryTransferEngine] = []

    def engine(self, *, session: str = "", has_fence: bool = True, alignment_bytes: int = 1) -> MemoryTransferEngine:
        """A new engine. `session` of one that is gone: its restart under the same address. `has_fence`: as off Ascend."""
        with self.lock:
            name = Session(session or f"memory:{len(self._engines) + 1}")
            previous = self._endpoints.get(name)
            if previous is not None and not previous.is_gone:
                raise LocalProtocolError(f"session {name} is taken by a living engine")
            endpoint = _Endpoint(register=MemoryRegister(alignment_bytes=alignment_bytes))
            self._endpoints[name] = endpoint
            engine = MemoryTransferEngine(network=self, endpoint=endpoint, session=name, has_fence=has_fence)
            self._engines.append(engine)
            return engine

    def inject(self, session: str, *faults: Fault) -> None:
        """Order faults for the next reads *from* this session, one each, first come first served."""
        with self.lock:
            self._living(session).faults.extend(faults)

    def stop(self, session: str) -> None:
        """The process of this engine is stopped (SIGSTOP): reads from it end UNKNOWN."""
        with self.lock:
            self._living(session).is_stopped = True

    def resume(self, session: str) -> None:
        """It goes on, and serves what it had been asked for."""
        with self.lock:
            endpoint = self._living(session)
            endpoint.is_stopped = False
            for engine in self._engines:
                engine.land(endpoint)

    def kill(self, session: str) -> None:
        """The process of this engine is gone at once; what it had been asked for never lands."""
        with self.lock:
            self.end(self._living(session))

    def advance(self, seconds: float) -> None:
        """Let time pass; late bytes that come due land."""
        with self.lock:
            self.now_s += seconds
            for engine in self._engines:
                engine.land(None)

    def find(self, session: Session) -> _Endpoint | None:
        """Who answers at this session now."""
        endpoint = self._endpoints.get(session)
        return None if endpoint is None or endpoint.is_gone else endpoint

    def end(self, endpoint: _Endpoint) -> None:
        """An endpoint dies: it serves nothing any more, and what it read lands nowhere."""
        endpoint.is_gone = True
        for engine in self._engines:
            engine.forget(endpoint)

    def _living(self, session: str) -> _Endpoint:
        endpoint = self.find(Session(session))
        if endpoint is None:
            raise LocalProtocolError(f"no living engine has session {session!r}")
        return endpoint


class MemoryTransferEngine:
    """One engine of a `MemoryNetwork`. Make it with `network.engine()`."""

    def __init__(self, *, network: MemoryNetwork, endpoint: _Endpoint, session: Session, has_fence: bool) -> None:
        self._network = network
        self._endpoint = endpoint
        self._session = session
        self._has_fence = has_fence
        self._reading = threading.Lock()
        self._known: dict[Session, _Endpoint] = {}
        """Peers read from before, as they were then."""
        self._late: list[_Late] = []
        self._is_unresolved = False
        """Some read was UNKNOWN and has not been fenced. Without a fence it stays so: engines read no clock."""

    @property
    def session(self) -> Session:
        return self._session

    def register(self, regions: Sequence[Region]) -> None:
        with self._network.lock:
            if self._endpoint.is_gone:
                raise EngineError("registering memory: the transfer engine is closed", outcome=Outcome.REFUSED)
            self._endpoint.register.add(self._endpoint.register.missing(regions))

    def read(self, session: Session, batch: CopyBatch) -> ReadResult:
        if not self._reading.acquire(blocking=False):
            raise LocalProtocolError("two reads at once on one engine: one transfer thread owns it")
        try:
            with self._network.lock:
                is_closed = self._endpoint.is_gone
                reason = "the transfer engine is closed" if is_closed else refusal(session, batch, self._endpoint.register)
                if reason is not None:
                    return _ended(Outcome.REFUSED, session, reason)
                self._check_targets(batch)
                if len(batch) == 0:
                    return ReadResult(outcome=Outcome.DONE, reason="")
                failure, fault = self._meet(session)
                if failure is not None:
                    return self._noted(failure)
            if isinstance(fault, WaitsFor):
                fault.entered.set()
                if not fault.gate.wait(GATE_S):
                    raise LocalProtocolError(f"the gate of a read from {session} stayed closed for {GATE_S} s")
                fault = None
            with self._network.lock:
                return self._noted(self._read(session, batch, fault))
        finally:
            self._reading.release()

    def fence(self) -> bool:
        with self._reading, self._network.lock:
            if self._has_fence and self._is_unresolved:
                self._drop_late()
            return not self._is_unresolved

    def close(self) -> None:
        with self._reading, self._network.lock:
            if not self._endpoint.is_gone:
                self._network.end(self._endpoint)
            if self._has_fence:
                self._drop_late()

    def land(self, resumed: _Endpoint | None) -> None:
        """For the network: write what is due now, or due from `resumed`; drop what came too late."""
        waiting = []
        for late in self._late:
            if late.expires_s <= self._network.now_s:
                continue
            is_due = late.source is resumed if late.due_s is None else late.due_s <= self._network.now_s
            if is_due and not late.source.is_stopped:
                _copy(late.runs, len(late.runs))
            else:
                waiting.append(late)
        self._late = waiting

    def forget(self, endpoint: _Endpoint) -> None:
        """For the network: this endpoint is gone; nothing of it lands, and if it is ours, nothing lands here."""
        is_ours = endpoint is self._endpoint
        self._late = [late for late in self._late if not is_ours and late.source is not endpoint]

    def _check_targets(self, batch: CopyBatch) -> None:
        """Our own bugs: they raise."""
        order = np.argsort(batch.local_addresses)
        starts = batch.local_addresses[order]
        ends = starts + batch.lengths_bytes[order]
        if np.any(starts[1:] < ends[:-1]):
            raise LocalProtocolError("target runs of one batch overlap")
        for late in self._late:
            if _touch(batch, late.runs):
                raise LocalProtocolError("a target of this read may still be written by an earlier one that is UNKNOWN")

    def _meet(self, session: Session) -> tuple[ReadResult | None, Fault | None]:
        """First half of a read: is the peer there? Returns how the read failed, or the fault it will meet."""
        present = self._network.find(session)
        known = self._known.get(session)
        if known is None:
            if present is None or present.is_stopped:
                return _ended(Outcome.FAILED, session, "the peer did not answer"), None
            self._known[session] = known = present
        if present is not known:
            return _ended(Outcome.UNKNOWN, session, "the peer was lost"), None
        return None, known.faults.popleft() if known.faults else None

    def _read(self, session: Session, batch: CopyBatch, fault: Fault | None) -> ReadResult:
        """Second half: the bytes."""
        peer = self._known[session]
        if peer.is_gone:
            return _ended(Outcome.UNKNOWN, session, "the peer was lost")
        num_good = _leading_good_runs(peer.register, batch)
        if isinstance(fault, Fails):
            _copy(batch, min(fault.num_landed, num_good))
            return _ended(fault.outcome, session, "a fault was ordered")
        if isinstance(fault, LandsLate):
            return self._read_late(session, batch, fault.num_landed, self._network.now_s + fault.after_s)
        if peer.is_stopped:
            return self._read_late(session, batch, 1, None)
        _copy(batch, num_good)
        if num_good < len(batch):
            return _ended(Outcome.UNKNOWN, session, "a run is outside the peer's registered memory")
        return ReadResult(outcome=Outcome.DONE, reason="")

    def _noted(self, result: ReadResult) -> ReadResult:
        self._is_unresolved = self._is_unresolved or result.outcome is Outcome.UNKNOWN
        return result

    def _drop_late(self) -> None:
        self._late.clear()
        self._known.clear()
        self._is_unresolved = False

    def _read_late(self, session: Session, batch: CopyBatch, num_landed: int, due_s: float | None) -> ReadResult:
        peer = self._known[session]
        num_good = _leading_good_runs(peer.register, batch)
        _copy(batch, min(num_landed, num_good))
        rest = batch.part(len(batch) - num_good, len(batch) - min(num_landed, num_good))
        if len(rest):
            expires_s = self._network.now_s + LATE_WINDOW_S
            self._late.append(_Late(source=peer, runs=rest, due_s=due_s, expires_s=expires_s))
        return _ended(Outcome.UNKNOWN, session, "the peer did not answer in time")


def _ended(outcome: Outcome, session: Session, why: str) -> ReadResult:
    return ReadResult(outcome=outcome, reason=f"reading from {session!r}: {why}")


def _leading_good_runs(register: MemoryRegister, batch: CopyBatch) -> int:
    """How many runs, counted from the last one, come before the first that is outside the peer's memory."""
    outside = register.first_outside(batch.remote_addresses[::-1], batch.lengths_bytes[::-1])
    return len(batch) if outside is None else outside


def _copy(batch: CopyBatch, num_runs: int) -> None:
    """Write the last `num_runs` runs, last to first."""
    for index in reversed(range(len(batch) - min(num_runs, len(batch)), len(batch))):
        ctypes.memmove(int(batch.local_addresses[index]), int(batch.remote_addresses[index]), int(batch.lengths_bytes[index]))


def _touch(left: CopyBatch, right: CopyBatch) -> bool:
    """Whether some target run of `left` overlaps one of `right`."""
    order = np.argsort(right.local_addresses)
    starts = right.local_addresses[order]
    ends = starts + right.lengths_bytes[order]
    index = np.searchsorted(ends, left.local_addresses, side="right")
    candidates = np.minimum(index, len(starts) - 1)
    overlaps = (index < len(starts)) & (starts[candidates] < left.local_addresses + left.lengths_bytes)
    return bool(overlaps.any())
