"""A mooncake_client of a test, on loopback: a process that owns memory of a pool and does nothing else, and ways to harm it."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from vllm_mooncake_ascend.cli.local_cluster import Server
from vllm_mooncake_ascend.cli.servers import PORT, RPC_PORT, ServerSpec
from vllm_mooncake_ascend.testing import cluster
from vllm_mooncake_ascend.testing.pool_master import PoolMaster

_HOST = "127.0.0.1"
_START_S = 30.0
_POLL_S = 0.02


class PoolOwner:
    """Runs from the constructor to `end`, with interruptions."""

    def __init__(self, master: PoolMaster, *, segment_size: str) -> None:
        """`segment_size`: with its unit, as Mooncake has it."""
        self._folder = tempfile.TemporaryDirectory(prefix="pool-owner-")
        log_path = Path(self._folder.name) / "owner.log"
        self._server = Server(_spec(master.address, segment_size), host=_HOST, log_path=log_path)
        self._wait_ready()

    def start(self) -> None:
        """Again, with empty memory; returns when it has joined the pool."""
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
            assert time.monotonic() < deadline_s, self._server.story("does not join the pool")
            time.sleep(_POLL_S)


def _spec(master_address: str, segment_size: str) -> ServerSpec:
    command = (
        *(str(Path(sys.executable).with_name("mooncake_client")), "--host", _HOST, "--port", RPC_PORT),
        *("--metadata_server", "P2PHANDSHAKE", "--master_server_address", master_address, "--protocol", "tcp"),
        *("--global_segment_size", segment_size, "--enable_http_server", "--http_port", PORT),
    )
    return ServerSpec(name="pool owner", role="pool owner", command=command)
