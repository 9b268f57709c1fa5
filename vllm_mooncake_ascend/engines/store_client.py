"""StoreClient: one client of the pool that can be replaced while threads use it.

Mooncake ends the process when a client is closed while a call of it is under way, so calls are counted: to close means to
let no new call in, and to wait until the last one has left. The client also knows whether it is *unresolved*: some call of
it was UNKNOWN, so bytes may still move until it is closed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from vllm_mooncake_ascend.engines.base import StoreHealth
from vllm_mooncake_ascend.engines.native_store import NativeStore, StoreSettings
from vllm_mooncake_ascend.errors import EngineError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.types import Outcome


class StoreClient:
    """Not connected at first. `connect`, `register` and `close` are called by one thread at a time, the rest by any."""

    def __init__(self, settings: StoreSettings, *, segment_bytes: int) -> None:
        self._settings = settings
        self._segment_bytes = segment_bytes
        self._changed = threading.Condition()
        self._native: NativeStore | None = None
        self._num_calls = 0
        self._is_shut = False
        """No new call may start."""
        self._is_unresolved = False

    @property
    def is_connected(self) -> bool:
        return self._native is not None

    @property
    def is_unresolved(self) -> bool:
        """Bytes of an earlier call may still move."""
        return self._is_unresolved

    def connect(self, regions: Sequence[Region]) -> None:
        """Set up and register.

        Raises:
            EngineError: it could not be done; there is no client then.
        """
        assert self._native is None, "connected already"
        native = NativeStore(self._settings, segment_bytes=self._segment_bytes)
        try:
            for region in regions:
                _register(native, region)
        except EngineError:
            native.close()
            raise
        with self._changed:
            self._native = native
            self._is_shut = False

    def register(self, region: Region) -> None:
        """More memory; nothing to do while not connected.

        Raises:
            EngineError(FAILED): Mooncake does not take it.
        """
        if self._native is not None:
            _register(self._native, region)

    @contextlib.contextmanager
    def call(self) -> Iterator[NativeStore | None]:
        """The client for one call; None when there is none now. It is not closed before the block ends."""
        with self._changed:
            native = None if self._is_shut else self._native
            self._num_calls += native is not None
        try:
            yield native
        finally:
            with self._changed:
                self._num_calls -= native is not None
                self._changed.notify_all()

    def note_unknown(self) -> None:
        """The call that is under way was UNKNOWN."""
        self._is_unresolved = True

    def health(self) -> StoreHealth:
        with self.call() as native:
            return StoreHealth.CLOSED if native is None else native.health()

    def close(self, *, wait_s: float) -> bool:
        """Let no call start any more, and close once the last one under way has ended, for which to wait `wait_s`.

        Returns:
            True when closed: nothing of this client moves any more. False: still shut; call again.
        """
        with self._changed:
            self._is_shut = True
            if not self._changed.wait_for(lambda: self._num_calls == 0, wait_s):
                return False
            native, self._native = self._native, None
        if native is not None:
            native.close()
        self._is_unresolved = False
        return True


def _register(native: NativeStore, region: Region) -> None:
    code = native.register(region)
    if code != 0:
        raise EngineError(
            f"registering [{region.base_address:#x}, +{region.length_bytes} bytes] with the pool's client returned {code}: it "
            "overlaps memory that something else has registered with it, or the device refused to map it",
            outcome=Outcome.FAILED,
        )
