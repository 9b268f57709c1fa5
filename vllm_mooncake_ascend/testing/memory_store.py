"""In-memory stores: `engines.base.KVStore` inside one process, on real addresses, with faults to order.

A `MemoryPool` stands for the master, the memory that clients lend and the wires; `pool.client()` adds a client. Everything is
deterministic: no thread, no random number, no clock but `pool.advance(seconds)`.

Stricter than Mooncake, never kinder:
- buffers are written last to first, so that no code can count on an order;
- late bytes land whenever the owner goes on, however late, unless the client was fenced or closed;
- an object without object lease goes with the first allocation that fails, and the put that failed is FULL;
- what would be *our* bug raises LocalProtocolError: buffers of a get that overlap, a target that an unresolved get may
  still write to.

| what happened                       | get of a key in that memory                | later                                    |
|-------------------------------------|--------------------------------------------|------------------------------------------|
| the owner closed                    | MISSING                                    |                                          |
| the owner was killed                | UNKNOWN; MISSING after `CLIENT_TTL_S`      | nothing lands                            |
| the owner is stopped                | UNKNOWN, two buffers written               | the rest lands when it goes on           |
| the master is dead or stopped       | the first call UNKNOWN, then REFUSED       | all keys are gone when it was dead       |
| a fault was ordered                 | as the fault says                          | as the fault says                        |
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines import store_codes
from vllm_mooncake_ascend.engines.base import KeyOutcome, KeyResult, StoreAnswer, StoreHealth, StoreKey
from vllm_mooncake_ascend.engines.register import MemoryRegister
from vllm_mooncake_ascend.engines.store_refusal import data_refusal, lookup_refusal, removal_refusal
from vllm_mooncake_ascend.errors import EngineError, LocalProtocolError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.testing.store_buffers import Write, carry_out, cut_to, spans_of, writes_of
from vllm_mooncake_ascend.types import Outcome

CLIENT_TTL_S = limits.MASTER_CLIENT_TTL_S
_RPC_FAIL, _RPC_TIMEOUT, _TRANSFER_FAIL = -900, -901, -800
_MISSING, _LEASED, _LEASE_EXPIRED, _FULL, _TOO_SHORT = -704, -706, -707, -200, -600


@dataclasses.dataclass(frozen=True, kw_only=True)
class GetFault:
    """The next get of a key answers `code` after `num_landed` of its buffers were written.

    `lands_late`: the others are written at the next `pool.deliver()`, unless fenced.
    """

    code: int
    num_landed: int = 0
    lands_late: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PutFault:
    """The next put of a key answers `code` and stores nothing. 0: as when another client died in the midst of putting it."""

    code: int


@dataclasses.dataclass(eq=False, kw_only=True)
class StoredObject:
    """One object in the memory of `owner`."""

    value: bytes
    owner: MemoryStore
    lease_until_s: float
    """Neither evicted nor removed before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Late:
    """Writes of an UNKNOWN get that wait for `owner` to go on; None: for `deliver`."""

    owner: MemoryStore | None
    writes: tuple[Write, ...]


class MemoryPool:
    """Master, objects, faults and time of the clients of one test."""

    def __init__(self, *, object_lease_s: float = limits.OBJECT_LEASE_S) -> None:
        self.lock = threading.RLock()
        self.now_s = 0.0
        self.object_lease_s = object_lease_s
        self.objects: dict[StoreKey, StoredObject] = {}
        self.master_code = 0
        """What the master's silence looks like to a call; 0: it answers."""
        self.clients: list[MemoryStore] = []
        self._get_faults: dict[StoreKey, deque[GetFault]] = {}
        self._put_faults: dict[StoreKey, deque[PutFault]] = {}

    def client(self, *, segment_bytes: int = 0) -> MemoryStore:
        """A client that lends so much memory; not connected yet."""
        client = MemoryStore(self, segment_bytes=segment_bytes)
        self.clients.append(client)
        return client

    def inject_get(self, key: StoreKey, *faults: GetFault) -> None:
        """Order faults for the next gets of this key, one each, first come first served. The key need not exist."""
        self._get_faults.setdefault(key, deque()).extend(faults)

    def inject_put(self, key: StoreKey, *faults: PutFault) -> None:
        self._put_faults.setdefault(key, deque()).extend(faults)

    def evict(self, *keys: StoreKey) -> None:
        """The master throws these out, whatever their object leases."""
        for key in keys:
            self.objects.pop(key, None)

    def kill_master(self) -> None:
        self.master_code = _RPC_FAIL

    def stop_master(self) -> None:
        self.master_code = _RPC_TIMEOUT

    def start_master(self) -> None:
        """It answers again; one that was dead has forgotten all keys."""
        if self.master_code == _RPC_FAIL:
            self.objects.clear()
        self.master_code = 0
        for client in self.clients:
            client.knows_master_is_lost = False

    def advance(self, seconds: float) -> None:
        """Time passes: dead owners are forgotten."""
        self.now_s += seconds
        dead = [client for client in self.clients if client.killed_at_s is not None]
        forgotten = [client for client in dead if self.now_s >= (client.killed_at_s or 0.0) + CLIENT_TTL_S]
        self.objects = {key: held for key, held in self.objects.items() if held.owner not in forgotten}

    def deliver(self) -> None:
        """Late bytes of injected faults land."""
        for client in self.clients:
            client.land(None)

    def get_fault(self, key: StoreKey) -> GetFault | None:
        """Taken out: it strikes once."""
        faults = self._get_faults.get(key)
        return faults.popleft() if faults else None

    def put_fault(self, key: StoreKey) -> PutFault | None:
        faults = self._put_faults.get(key)
        return faults.popleft() if faults else None

    def place(self, num_bytes: int, preferred: MemoryStore) -> MemoryStore | None:
        """Whose memory takes an object of this size: the preferred one's if it can, else the first that has room."""
        candidates = [preferred, *(client for client in self.clients if client is not preferred)]
        for client in candidates:
            if client.lends and self._used_bytes(client) + num_bytes <= client.segment_bytes:
                return client
        self.objects = {key: held for key, held in self.objects.items() if held.lease_until_s > self.now_s}
        return None

    def forget(self, owner: MemoryStore) -> None:
        """Its memory is gone in good order, and what was asked of it will not come."""
        self.objects = {key: held for key, held in self.objects.items() if held.owner is not owner}
        for client in self.clients:
            client.drop_late_of(owner)

    def _used_bytes(self, client: MemoryStore) -> int:
        return sum(len(held.value) for held in self.objects.values() if held.owner is client)


class MemoryStore:
    """One client."""

    def __init__(self, pool: MemoryPool, *, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.knows_master_is_lost = False
        self.killed_at_s: float | None = None
        self.is_stopped = False
        self._pool = pool
        self._register = MemoryRegister(alignment_bytes=1)
        self._is_connected = False
        self._is_closed = False
        self._late: list[_Late] = []
        self._unresolved: list[tuple[int, int]] = []
        """Start and end of the targets of UNKNOWN gets."""

    @property
    def lends(self) -> bool:
        """The master may place objects here (a killed or stopped one too: the master does not know yet)."""
        return self._is_connected and self.segment_bytes > 0

    # --- what tests do to it --------------------------------------------------------

    def kill(self) -> None:
        """Its process dies."""
        self.killed_at_s = self._pool.now_s
        self.fence()
        for client in self._pool.clients:
            client.drop_late_of(self)

    def overwrite(self, key: StoreKey, by: StoreKey, num_bytes: int | None) -> None:
        """So many bytes of one object become those of another one, or all."""
        held, other = self._pool.objects[key], self._pool.objects[by].value
        end = len(other) if num_bytes is None else num_bytes
        held.value = other[:end] + held.value[end:]

    def stop(self) -> None:
        """Its process is stopped: gets from its memory hang, and end UNKNOWN."""
        self.is_stopped = True

    def resume(self) -> None:
        """It goes on, and serves what it had been asked for."""
        self.is_stopped = False
        for client in self._pool.clients:
            client.land(self)

    def land(self, owner: MemoryStore | None) -> None:
        """Write what waits for `owner`."""
        for late in self._late:
            if late.owner is owner:
                carry_out(late.writes)
        self._late = [late for late in self._late if late.owner is not owner]

    def drop_late_of(self, owner: MemoryStore) -> None:
        """What `owner` was asked for will not come."""
        self._late = [late for late in self._late if late.owner is not owner]

    # --- KVStore --------------------------------------------------------------------

    def connect(self) -> None:
        if self._is_closed:
            raise EngineError("connecting to the pool: the store is closed", outcome=Outcome.REFUSED)
        if self._pool.master_code:
            raise EngineError("connecting to the pool: no master answers", outcome=Outcome.FAILED)
        self._is_connected = True

    def register(self, regions: Sequence[Region]) -> None:
        if self._is_closed:
            raise EngineError("registering memory: the store is closed", outcome=Outcome.REFUSED)
        self._register.add(self._register.missing(regions))

    def put(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        with self._pool.lock:
            refusal = data_refusal(keys, batch, self._register)
            if refusal is not None:
                return _all(keys, store_codes.refused(refusal), is_lost=False)
            lost = self._lost(keys, store_codes.put_result)
            if lost is not None:
                return lost
            codes = [self._put(key, batch, index) for index, key in enumerate(keys)]
            return StoreAnswer(results=tuple(map(store_codes.put_result, codes)), is_lost=False)

    def get(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        def result(answer: int) -> KeyResult:
            return store_codes.get_result(answer, value_bytes=batch.value_bytes)

        with self._pool.lock:
            refusal = data_refusal(keys, batch, self._register)
            if refusal is not None:
                return _all(keys, store_codes.refused(refusal), is_lost=False)
            self._check_targets(batch)
            answer = self._lost(keys, result)
            if answer is None:
                codes = [self._get(key, batch, index) for index, key in enumerate(keys)]
                answer = StoreAnswer(results=tuple(map(result, codes)), is_lost=False)
            for index, outcome in enumerate(answer.outcomes):
                if outcome is KeyOutcome.UNKNOWN:
                    self._unresolved += spans_of(batch, index)
            return answer

    def exists(self, keys: Sequence[StoreKey]) -> StoreAnswer:
        with self._pool.lock:
            refusal = lookup_refusal(keys)
            if refusal is not None:
                return _all(keys, store_codes.refused(refusal), is_lost=False)
            lost = self._lost(keys, store_codes.exists_result)
            if lost is not None:
                return lost
            found = [int(self._grant(key) is not None) for key in keys]
            return StoreAnswer(results=tuple(map(store_codes.exists_result, found)), is_lost=False)

    def remove(self, keys: Sequence[StoreKey], *, prefix: str, even_in_use: bool = False) -> StoreAnswer:
        with self._pool.lock:
            refusal = removal_refusal(keys, prefix)
            if refusal is not None:
                return _all(keys, store_codes.refused(refusal), is_lost=False)
            lost = self._lost(keys, store_codes.remove_result)
            if lost is not None:
                return lost
            codes = [self._remove(key, even_in_use=even_in_use) for key in keys]
            return StoreAnswer(results=tuple(map(store_codes.remove_result, codes)), is_lost=False)

    def health(self) -> StoreHealth:
        if not self._is_connected:
            return StoreHealth.CLOSED
        return StoreHealth.UNREACHABLE if self._pool.master_code else StoreHealth.CONNECTED

    def fence(self) -> bool:
        with self._pool.lock:
            self._late.clear()
            self._unresolved.clear()
            return True

    def close(self) -> bool:
        with self._pool.lock:
            self._is_closed = True
            self._is_connected = False
            self.fence()
            self._pool.forget(self)
            return True

    # --- inside ---------------------------------------------------------------------

    def _lost(self, keys: Sequence[StoreKey], result: Callable[[int], KeyResult]) -> StoreAnswer | None:
        """The answer of a call that finds no client or no master; None when it finds both."""
        if not self._is_connected:
            return _all(keys, store_codes.refused("there is no connection to the pool now"), is_lost=True)
        code = self._pool.master_code
        if not code:
            return None
        if self.knows_master_is_lost:
            return _all(keys, store_codes.refused("the master of the pool does not answer"), is_lost=True)
        self.knows_master_is_lost = True
        return _all(keys, result(code), is_lost=store_codes.is_lost(code))

    def _grant(self, key: StoreKey) -> StoredObject | None:
        """The object, with a fresh object lease."""
        held = self._pool.objects.get(key)
        if held is not None:
            held.lease_until_s = self._pool.now_s + self._pool.object_lease_s
        return held

    def _put(self, key: StoreKey, batch: StoreBatch, index: int) -> int:
        fault = self._pool.put_fault(key)
        if fault is not None:
            return fault.code
        if key in self._pool.objects:
            return 0
        owner = self._pool.place(batch.value_bytes, self)
        if owner is None:
            return _FULL
        if owner.is_stopped or owner.killed_at_s is not None:
            return _TRANSFER_FAIL
        spans = spans_of(batch, index)
        value = b"".join(ctypes.string_at(start, end - start) for start, end in spans)
        self._pool.objects[key] = StoredObject(value=value, owner=owner, lease_until_s=0.0)
        return 0

    def _get(self, key: StoreKey, batch: StoreBatch, index: int) -> int:
        fault = self._pool.get_fault(key)
        held = self._grant(key)
        spans = spans_of(batch, index)
        if fault is not None:
            value = held.value if held is not None else b"\xee" * batch.value_bytes
            return self._get_with(fault, None, writes_of(spans, value))
        if held is None:
            return _MISSING
        if batch.value_bytes != len(held.value):
            return _TOO_SHORT if batch.value_bytes < len(held.value) else _TRANSFER_FAIL
        writes = writes_of(spans, held.value)
        if held.owner.killed_at_s is not None:
            return _TRANSFER_FAIL
        if held.owner.is_stopped:
            return self._get_with(GetFault(code=_TRANSFER_FAIL, num_landed=2, lands_late=True), held.owner, writes)
        carry_out(writes)
        return len(held.value) if self._pool.object_lease_s > 0 else _LEASE_EXPIRED

    def _remove(self, key: StoreKey, *, even_in_use: bool) -> int:
        held = self._pool.objects.get(key)
        if held is None:
            return _MISSING
        if held.lease_until_s > self._pool.now_s and not even_in_use:
            return _LEASED
        del self._pool.objects[key]
        return 0

    def _get_with(self, fault: GetFault, owner: MemoryStore | None, writes: tuple[Write, ...]) -> int:
        carry_out(writes[: fault.num_landed])
        if fault.lands_late:
            self._late.append(_Late(owner=owner, writes=writes[fault.num_landed :]))
        return fault.code

    def _check_targets(self, batch: StoreBatch) -> None:
        spans = sorted(span for index in range(len(batch)) for span in spans_of(batch, index))
        if any(left[1] > right[0] for left, right in itertools.pairwise(spans)):
            raise LocalProtocolError("buffers of a get overlap")
        if any(start < end and first < last for first, last in self._unresolved for start, end in cut_to(spans, first, last)):
            raise LocalProtocolError("a get into buffers of an earlier one that is UNKNOWN; fence first")


def _all(keys: Sequence[StoreKey], result: KeyResult, *, is_lost: bool) -> StoreAnswer:
    return StoreAnswer(results=(result,) * len(keys), is_lost=is_lost)
