"""HeldStore: a store whose calls can be held up, or made to raise, by a test. What it lets through another store answers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from vllm_mooncake_ascend.engines.base import KVStore, StoreAnswer, StoreHealth, StoreKey
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.store_batch import StoreBatch

_T = TypeVar("_T")
_GATE_S = 60.0


class Gate:
    """Calls that have come to it wait until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        """Some call waits, or has waited."""
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def pass_through(self) -> None:
        self.entered.set()
        assert self._opened.wait(_GATE_S), "a test left a gate closed"


class HeldStore:
    """Follows `engines.base.KVStore`. As a real one, it neither closes nor fences while a call is under way.

    Args:
        store: answers.
        close_wait_s: how long `close` waits for calls under way.
    """

    def __init__(self, store: KVStore, *, close_wait_s: float = _GATE_S) -> None:
        self.threads: list[tuple[str, str]] = []
        """Each call and the name of its thread, oldest first."""
        self._store = store
        self._close_wait_s = close_wait_s
        self._gates: dict[str, Gate] = {}
        self._errors: dict[str, Exception] = {}
        self._changed = threading.Condition()
        self._num_calls = 0

    def hold(self, name: str) -> Gate:
        """Hold the calls of a method from now on, until the gate is opened."""
        gate = self._gates[name] = Gate()
        return gate

    def let_pass(self, name: str) -> None:
        """Hold no further call; those that wait go on waiting for their gate."""
        self._gates.pop(name)

    def fail(self, name: str, error: Exception) -> None:
        """Let the calls of a method raise from now on."""
        self._errors[name] = error

    def heal(self, name: str) -> None:
        self._errors.pop(name)

    def connect(self) -> None:
        self._run("connect", self._store.connect)

    def register(self, regions: Sequence[Region]) -> None:
        self._run("register", lambda: self._store.register(regions))

    def put(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        with self._under_way():
            return self._run("put", lambda: self._store.put(keys, batch))

    def get(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        with self._under_way():
            return self._run("get", lambda: self._store.get(keys, batch))

    def exists(self, keys: Sequence[StoreKey]) -> StoreAnswer:
        with self._under_way():
            return self._run("exists", lambda: self._store.exists(keys))

    def remove(self, keys: Sequence[StoreKey], *, prefix: str, even_in_use: bool = False) -> StoreAnswer:
        return self._run("remove", lambda: self._store.remove(keys, prefix=prefix, even_in_use=even_in_use))

    def health(self) -> StoreHealth:
        return self._run("health", self._store.health)

    def fence(self) -> bool:
        return self._run("fence", lambda: self._num_calls == 0 and self._store.fence())

    def close(self) -> bool:
        with self._changed:
            is_quiet = self._changed.wait_for(lambda: self._num_calls == 0, self._close_wait_s)
        return is_quiet and self._run("close", self._store.close)

    @contextlib.contextmanager
    def _under_way(self) -> Iterator[None]:
        with self._changed:
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def _run(self, name: str, call: Callable[[], _T]) -> _T:
        self.threads.append((name, threading.current_thread().name))
        if name in self._gates:
            self._gates[name].pass_through()
        if name in self._errors:
            raise self._errors[name]
        return call()
