"""Doorbell: wakes a thread that waits in a poll. Rung from any thread, also after it is closed."""

from __future__ import annotations

import os
import threading


class Doorbell:
    """An eventfd (Linux, as all of Mooncake) whose descriptor goes into the poller."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False

    def ring(self) -> None:
        """Wake the poller; many rings before it looks are one."""
        with self._lock:  # the number of a closed descriptor may belong to another file by now
            if not self._is_closed:
                os.eventfd_write(self.fd, 1)

    def hush(self) -> None:
        """Called by the woken thread before it looks for what there is to do."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.fd)
