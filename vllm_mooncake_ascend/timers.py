"""Alarms of a machine: at most one per key, found in logarithmic time. Reads no clock."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_SPARE_ENTRIES = 64
"""Outdated heap entries that may lie around before they are swept out."""


class Timers(Generic[Key]):
    """`set` replaces a key's alarm, `take_due` hands out those that have come, each once."""

    def __init__(self) -> None:
        self._at_s: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._at_s)

    def set(self, key: Key, at_s: float) -> None:
        """Wake for `key` at `at_s`, and at no other time."""
        if self._at_s.get(key) == at_s:
            return
        self._at_s[key] = at_s
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, key))
        if len(self._heap) > 2 * len(self._at_s) + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._at_s.get(entry[2]) == entry[0]]
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        """No alarm for `key` (any more)."""
        self._at_s.pop(key, None)

    def next_s(self) -> float | None:
        """When the next alarm is, None without any."""
        while self._heap and self._at_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> Key | None:
        """The key whose time came first, None when none has come; its alarm is off.

        One at a time, because what is done for one key may end another.
        """
        next_s = self.next_s()
        if next_s is None or next_s > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at_s[key]
        return key
