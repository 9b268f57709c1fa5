"""A set of servers on this host: started at once, waited for, stopped together. `launch`, `demo` and the e2e tests use it.

Each server passes through: starting -> ready, or starting -> (port taken: starting on another port) -> failed.
Whatever happens, leaving the `with` block ends every child.
"""

from __future__ import annotations

import os
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from vllm_mooncake_ascend.cli import processes
from vllm_mooncake_ascend.cli.servers import MASTER, PORT, RPC_PORT, ServerSpec
from vllm_mooncake_ascend.errors import MooncakeAscendError

READY_TIMEOUT_S = 600.0
"""An engine with a small model is ready in 20 to 40 s on two quiet cores; three at once beside busy neighbours took 190 s."""
READY_POLL_S = 0.25
ANSWER_TIMEOUT_S = 2.0
MAX_PORT_TRIES = 3
READY_PATHS = {"proxy": "/ready"}
PORT_TAKEN = "address already in use"


class ServerFailed(MooncakeAscendError):
    """A server ended or did not become ready; the message has the end of its log."""


class Server:
    """One running server of the set."""

    def __init__(self, spec: ServerSpec, *, host: str, log_path: Path) -> None:
        self.spec = spec
        self.ready_after_s: float | None = None
        self._host = host
        self._log_path = log_path
        self._port_tries = 0
        self.start()

    def start(self, *, port: int | None = None, rpc_port: int | None = None) -> None:
        """Start the process (again), on free ports or on those given.

        Raises:
            ServerFailed: there is no such program.
        """
        self.port = port or processes.free_port(self._host)
        self.rpc_port = rpc_port or (processes.free_port(self._host) if RPC_PORT in self.spec.command else None)
        self.ready_after_s = None
        self._started_s = time.monotonic()
        ports = {PORT: str(self.port), RPC_PORT: str(self.rpc_port)}
        try:
            self.child = processes.start(
                [ports.get(word, word) for word in self.spec.command],
                environment={**os.environ, **self.spec.environment},
                log_path=self._log_path,
                placement=self.spec.placement,
            )
        except FileNotFoundError as error:
            raise ServerFailed(f"{self.spec.name} cannot be started: {error}; is Mooncake installed?") from error

    @property
    def url(self) -> str:
        """Where the server answers, without a final slash."""
        return f"http://{self._place(self.port)}"

    @property
    def rpc_address(self) -> str:
        """Where clients of the master call it: `host:port`."""
        assert self.rpc_port is not None, f"{self.spec.name} has one port only"
        return self._place(self.rpc_port)

    def check(self) -> bool:
        """True when the server has become ready; starts it anew when its port was taken from under it.

        Raises:
            ServerFailed: it ended.
        """
        code = self.child.exit_code()
        if code is None:
            if self.ready_after_s is None and self._answers():
                self.ready_after_s = time.monotonic() - self._started_s
            return self.ready_after_s is not None
        self._port_tries += 1
        if self._found_its_port_taken() and self._port_tries < MAX_PORT_TRIES:
            self.child.reap()
            self.start()
            return False
        raise ServerFailed(self.story(f"ended with code {code} after {self.seconds():.0f} s"))

    def seconds(self) -> float:
        """Seconds since the process was started."""
        return time.monotonic() - self._started_s

    def _place(self, port: int) -> str:
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def _answers(self) -> bool:
        """On all its ports. Mooncake's master is well over HTTP for a moment before it finds its RPC port taken, and ends."""
        if self.rpc_port is not None and not self.child.listens_on(self.rpc_port):
            return False
        return _is_well(self.url + READY_PATHS.get(self.spec.role, "/health"))

    def _found_its_port_taken(self) -> bool:
        """Mooncake's master says nothing when its RPC port is taken: it just ends (0.3.13.post1)."""
        is_silent = self.spec.role == MASTER and self.ready_after_s is None
        return is_silent or PORT_TAKEN in self.child.log_tail(60).lower()

    def story(self, what: str) -> str:
        """What happened to this server, with the end of its log."""
        return f"{self.spec.name} ({self.url}) {what}; the end of {self.child.log_path}:\n{self.child.log_tail()}"


class LocalCluster:
    """Servers of one host; a context manager."""

    def __init__(self, log_folder: Path, *, host: str = "127.0.0.1") -> None:
        self.servers: list[Server] = []
        self._log_folder = log_folder
        self._host = host

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: types.TracebackType | None
    ) -> None:
        self.stop()

    def start(self, spec: ServerSpec) -> Server:
        """Start one more server; does not wait for it. The log of an earlier set with this name is replaced."""
        assert spec.name not in {server.spec.name for server in self.servers}, f"two servers called {spec.name}"
        log_path = self._log_folder / f"{spec.name}.log"
        log_path.unlink(missing_ok=True)
        server = Server(spec, host=self._host, log_path=log_path)
        self.servers.append(server)
        return server

    def with_role(self, role: str) -> list[Server]:
        """The servers of one role, in the order of their start."""
        return [server for server in self.servers if server.spec.role == role]

    def wait_ready(self, *, timeout_s: float = READY_TIMEOUT_S, on_poll: Callable[[], None] = lambda: None) -> None:
        """Wait until every server is ready; `on_poll` is called between looks, to show progress.

        Raises:
            ServerFailed: one ended, or was not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            waiting = [server for server in self.servers if not server.check()]
            on_poll()
            if not waiting:
                return
            if time.monotonic() > deadline:
                raise ServerFailed(waiting[0].story(f"was not ready within {timeout_s:.0f} s"))
            time.sleep(READY_POLL_S)

    def watch(self) -> None:
        """Wait for ever; returns only by raising.

        Raises:
            ServerFailed: a server ended.
        """
        while True:
            for server in self.servers:
                if (code := server.child.exit_code()) is not None:
                    raise ServerFailed(server.story(f"ended with code {code}"))
            time.sleep(READY_POLL_S)

    def stop(self, *, grace_s: float = processes.STOP_GRACE_S) -> None:
        """End all servers; a second call does nothing."""
        with processes.not_interrupted():
            processes.stop_all([server.child for server in self.servers], grace_s=grace_s)


def _is_well(url: str) -> bool:
    """True when `url` answers with 200 now."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=ANSWER_TIMEOUT_S) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.HTTPError):
        return False
