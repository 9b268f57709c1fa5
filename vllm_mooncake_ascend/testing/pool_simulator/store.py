"""The store of the simulated pool: keys, late bytes, outages. Worse than the real one, and by a seed.

A value is one word: the hash of the block it was put from, or what else was in that block when the call read it.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.types import Outcome


class Clock:
    """Simulated time: a heap of what is to happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """Do this at that time; what is due at one time happens in the order it was asked for."""
        self._count += 1
        heapq.heappush(self._heap, (max(at_s, self.now), self._count, call))

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = until_s


class Alarm:
    """One machine's next timer."""

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock = clock
        self._ring = ring
        self._at_s: float | None = None

    def set(self, at_s: float | None) -> None:
        """Ring at that time and at no other."""
        if at_s != self._at_s:
            self._at_s = at_s
            if at_s is not None:
                self._clock.at(at_s, lambda: self._go_off(at_s))

    def _go_off(self, at_s: float) -> None:
        if at_s == self._at_s:
            self._at_s = None
            self._ring()


@dataclasses.dataclass(frozen=True, slots=True)
class StoreFaults:
    """How bad calls are; shares of calls, or of keys."""

    slow: float = 0.0
    """Calls that hang for up to STORE_CALL_S, and then are unknown."""
    slow_lookup: float = 0.0
    """Lookups that take tens of milliseconds to seconds."""
    failed: float = 0.0
    """Keys whose get or put fails."""
    unknown: float = 0.0
    """Keys of unknown outcome: bytes of a get land at any time until a fence, those of a put are read later."""
    unfenced: float = 0.0
    """Fences that do not hold."""
    full: float = 0.0
    """Puts that find no room."""
    lost: float = 0.0
    """Keys that vanish, all at once, between any two calls."""
    unplannable: float = 0.0
    """Orders that a worker cannot plan."""
    outage: tuple[float, float] = (0.0, 0.0)
    """The master is dead from, to; it comes back empty."""


@dataclasses.dataclass(slots=True)
class Call:
    """What a call came to, and when."""

    seconds: float
    outcomes: list[Outcome]
    num_missing: int = 0
    is_full: bool = False
    is_lost: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Fencing:
    """What a fence came to, and when."""

    seconds: float
    holds: bool


class SimulatedStore:
    """Values by key. Callers ask what a call will come to, and carry out reads and writes of memory themselves."""

    def __init__(self, clock: Clock, faults: StoreFaults, rng: random.Random) -> None:
        self.values: dict[str, bytes] = {}
        self.faults = faults
        self._clock = clock
        self._rng = rng
        start_s, end_s = faults.outage
        if end_s > start_s:
            clock.at(end_s, self.values.clear)

    def is_dead(self, at_s: float | None = None) -> bool:
        """Whether the master is dead now, or was then."""
        start_s, end_s = self.faults.outage
        return start_s <= (self._clock.now if at_s is None else at_s) < end_s

    def is_healthy(self) -> bool:
        """What the client believes, which is old by up to two seconds."""
        return not self.is_dead(self._clock.now - self._rng.uniform(0, 2))

    def lookup(self) -> Call:
        """A call of exists: only its time, and whether it fails."""
        self._lose_some()
        if self.is_dead():
            return Call(seconds=4.5, outcomes=[], is_lost=True)
        is_slow = self._rng.random() < self.faults.slow_lookup
        return Call(seconds=self._rng.uniform(0.01, 3.0) if is_slow else self._rng.uniform(0.0003, 0.002), outcomes=[])

    def get(self, keys: list[str]) -> Call:
        """A get: per key what it comes to. Who gets a missing key fails."""
        self._lose_some()
        call = self._call(len(keys))
        for index, key in enumerate(keys):
            if call.outcomes[index] is Outcome.DONE and key not in self.values:
                call.outcomes[index] = Outcome.FAILED
                call.num_missing += 1
        return call

    def put(self, num_keys: int) -> Call:
        """A put: per key what it comes to."""
        call = self._call(num_keys)
        if not call.is_lost and self._rng.random() < self.faults.full:
            call.is_full = True
            first = self._rng.randrange(num_keys)
            for index in range(first, num_keys):
                call.outcomes[index] = worse(call.outcomes[index])
        return call

    def fence(self) -> Fencing:
        """A fence; needs no master."""
        return Fencing(seconds=self._rng.uniform(0.001, 0.05), holds=self._rng.random() >= self.faults.unfenced)

    def _call(self, num_keys: int) -> Call:
        if self.is_dead():
            return Call(seconds=4.5, outcomes=[Outcome.UNKNOWN] * num_keys, is_lost=True)
        if self._rng.random() < self.faults.slow:
            return Call(seconds=self._rng.uniform(5.0, limits.STORE_CALL_S), outcomes=[Outcome.UNKNOWN] * num_keys)
        return Call(seconds=self._rng.uniform(0.001, 0.05), outcomes=[self._outcome() for _ in range(num_keys)])

    def _outcome(self) -> Outcome:
        drawn = self._rng.random()
        if drawn < self.faults.failed:
            return Outcome.FAILED
        return Outcome.UNKNOWN if drawn < self.faults.failed + self.faults.unknown else Outcome.DONE

    def _lose_some(self) -> None:
        if self.values and self._rng.random() < self.faults.lost:
            for key in self._rng.sample(sorted(self.values), k=max(1, len(self.values) // 3)):
                del self.values[key]


def worse(outcome: Outcome) -> Outcome:
    """What becomes of a key that finds no room."""
    return Outcome.FAILED if outcome is Outcome.DONE else outcome
