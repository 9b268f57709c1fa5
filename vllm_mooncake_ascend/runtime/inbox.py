"""Inbox: values handed from any thread to one other, in order, with one event to wait on.

Its owner drains it whole. It never drops what it took and never grows beyond all bounds: `put` says no when it is full,
and `is_crowded` tells those who can do without (a message from the network comes again) to stay away long before that,
so that what cannot come again (a pin to give back) always finds room.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Inbox(Generic[Value]):
    """At most `capacity` values. `wake` is called by whoever puts, after each value."""

    def __init__(self, *, capacity: int, wake: Callable[[], None] = lambda: None) -> None:
        assert capacity >= 2
        self._capacity = capacity
        self._wake = wake
        self._values: collections.deque[Value] = collections.deque()
        self._lock = threading.Lock()
        self._filled = threading.Event()

    def put(self, value: Value) -> bool:
        """Add a value; False, and nothing added, when the inbox is full."""
        with self._lock:
            if len(self._values) >= self._capacity:
                return False
            self._values.append(value)
            self._filled.set()
        self._wake()
        return True

    def nudge(self) -> None:
        """Call `wake` although nothing was put: something else has changed."""
        self._wake()

    def drain(self) -> list[Value]:
        """Take all values, in the order they were put."""
        if not self._filled.is_set():
            return []
        with self._lock:
            values = list(self._values)
            self._values.clear()
            self._filled.clear()
            return values

    def wait(self, timeout_s: float | None) -> bool:
        """Whether `drain` would return something: now, or within `timeout_s` (None: however long it takes)."""
        return self._filled.wait(timeout_s)

    @property
    def has_values(self) -> bool:
        """`drain` would return something."""
        return self._filled.is_set()

    @property
    def is_crowded(self) -> bool:
        """Half full: whoever can send its value again later should."""
        return 2 * len(self._values) >= self._capacity
