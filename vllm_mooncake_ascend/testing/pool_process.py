"""A process of Mooncake's for a test, on loopback, on ports nobody else has, and ways to harm it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

from vllm_mooncake_ascend.cli.local_cluster import Server
from vllm_mooncake_ascend.cli.servers import ServerSpec
from vllm_mooncake_ascend.testing import cluster

HOST = "127.0.0.1"
_START_S = 30.0
_POLL_S = 0.02


class PoolProcess:
    """Runs from the constructor to `end`, with interruptions."""

    def __init__(self, spec: ServerSpec) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pool-process-")
        self._server = Server(spec, host=HOST, log_path=Path(self._folder.name) / "log")
        wait_ready(self._server)

    def start(self) -> None:
        """Again, at the same address and with empty memory; returns when it is ready."""
        cluster.restart(self._server)
        wait_ready(self._server)

    def stop(self) -> None:
        """Returns when it is stopped with all its threads."""
        stop(self._server)

    def resume(self) -> None:
        self._server.child.signal(signal.SIGCONT)

    def kill(self) -> None:
        cluster.kill(self._server)

    def end(self) -> None:
        """Kill it, and forget its log."""
        self.kill()
        self._folder.cleanup()


def wait_ready(server: Server) -> None:
    """Returns when it accepts calls, or has joined its pool."""
    deadline_s = time.monotonic() + _START_S
    while not server.check():
        assert time.monotonic() < deadline_s, server.story("is not ready")
        time.sleep(_POLL_S)


def stop(server: Server) -> None:
    """Returns when it is stopped with all its threads."""
    server.child.signal(signal.SIGSTOP)
    os.waitid(os.P_PID, server.child.pid, os.WSTOPPED)
