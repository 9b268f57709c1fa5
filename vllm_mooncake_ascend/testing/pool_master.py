"""A mooncake_master of a test, on loopback, on ports nobody else has."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.cli.processes import free_port

_HOST = "127.0.0.1"
_START_S = 30.0
_POLL_S = 0.02


def master_command(*, rpc_port: int, metrics_port: int, host: str, object_lease_ms: int) -> list[str]:
    """How to start the installed master. Its `client_ttl` is ours: with Mooncake's own a busy CPU loses live owners."""
    return [
        str(Path(sys.executable).with_name("mooncake_master")),
        f"--rpc_address={host}",
        f"--rpc_port={rpc_port}",
        f"--metrics_host={host}",
        f"--metrics_port={metrics_port}",
        f"--default_kv_lease_ttl={object_lease_ms}",
        f"--client_ttl={limits.MASTER_CLIENT_TTL_S:.0f}",
        "--enable_metric_reporting=false",
    ]


class PoolMaster:
    """Runs from the constructor to `end`, with interruptions."""

    def __init__(self, *, object_lease_s: float = limits.OBJECT_LEASE_S) -> None:
        self._command = master_command(
            rpc_port=free_port(_HOST),
            metrics_port=free_port(_HOST),
            host=_HOST,
            object_lease_ms=round(object_lease_s * 1_000),
        )
        self._port = int(self._command[2].partition("=")[2])
        self.start()

    @property
    def address(self) -> str:
        return f"{_HOST}:{self._port}"

    def start(self) -> None:
        """At the same address as before; returns when it accepts calls."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline_s = time.monotonic() + _START_S
        while not self._accepts():
            assert self._process.poll() is None, "the master ended while it started"
            assert time.monotonic() < deadline_s, "the master does not accept calls"
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Returns when it is stopped with all its threads."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self.kill()

    def _accepts(self) -> bool:
        try:
            socket.create_connection((_HOST, self._port), timeout=1.0).close()
        except OSError:
            return False
        return True
