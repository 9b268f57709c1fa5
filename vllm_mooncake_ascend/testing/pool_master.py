"""A mooncake_master of a test, on loopback, on ports nobody else has: the one that `launch` starts, and ways to harm it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.cli import servers
from vllm_mooncake_ascend.cli.local_cluster import Server
from vllm_mooncake_ascend.testing import cluster

_HOST = "127.0.0.1"
_START_S = 30.0
_POLL_S = 0.02


class PoolMaster:
    """Runs from the constructor to `end`, with interruptions."""

    def __init__(
        self, *, object_lease_s: float = limits.OBJECT_LEASE_S, client_ttl_s: float = limits.MASTER_CLIENT_TTL_S
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pool-master-")
        log_path = Path(self._folder.name) / "master.log"
        spec = servers.master(host=_HOST, object_lease_s=object_lease_s, arguments=("--client_ttl", f"{client_ttl_s:.0f}"))
        self._server = Server(spec, host=_HOST, log_path=log_path)
        self._wait_ready()

    @property
    def address(self) -> str:
        """Where clients call it."""
        return self._server.rpc_address

    @property
    def metrics_address(self) -> str:
        """Where it answers over HTTP."""
        return self._server.url.removeprefix("http://")

    def start(self) -> None:
        """At the same address as before; returns when it accepts calls."""
        cluster.restart(self._server)
        self._wait_ready()

    def stop(self) -> None:
        """Returns when it is stopped with all its threads."""
        self._server.child.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._server.child.pid, os.WSTOPPED)

    def resume(self) -> None:
        self._server.child.signal(signal.SIGCONT)

    def kill(self) -> None:
        cluster.kill(self._server)

    def end(self) -> None:
        """Kill it, and forget its log."""
        self.kill()
        self._folder.cleanup()

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + _START_S
        while not self._server.check():
            assert time.monotonic() < deadline_s, self._server.story("does not accept calls")
            time.sleep(_POLL_S)
