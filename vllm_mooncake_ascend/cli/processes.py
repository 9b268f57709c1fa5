"""Child processes of the command line: one server each, in a process group of its own, with a log file.

Owns starting and stopping, and nothing about what the servers are. Rules: a group is signalled only while its leader is
our unreaped child, so that no other process can have got its number; every started child is ended by its own id, politely
first, whatever else goes wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

STOP_GRACE_S = 15.0
"""Time between SIGTERM and SIGKILL: vLLM ends its engine and worker processes within 5 s when they are well."""
KILL_S = 10.0
"""SIGKILL takes effect when the kernel gets to it; a worker with gigabytes of memory to give back needs a moment."""
POLL_S = 0.05
LOG_TAIL_BYTES = 16_384


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where a server may run. Its later children inherit both."""

    cpus: frozenset[int] = frozenset()
    """CPU numbers; empty: all that we may use."""
    niceness: int = 0


class Child:
    """One started server process with its group and log."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self._process = process
        self.log_path = log_path

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; else how it ended (negative: by that signal). Does not reap: the id stays ours."""
        if self._process.returncode is not None:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def listens_on(self, port: int) -> bool:
        """Whether the leader itself accepts TCP connections on this port. Linux only."""
        listening = _listening_sockets(self.pid, port)
        with contextlib.suppress(OSError):
            return any(os.readlink(descriptor) in listening for descriptor in Path(f"/proc/{self.pid}/fd").iterdir())
        return False

    def signal(self, number: int) -> None:
        """Send a signal to the whole group; nothing happens when the leader was already reaped."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def ended(self) -> bool:
        """True when the leader and everything it started are gone (a process it left behind counts as running)."""
        return self.exit_code() is not None and not live_group(self.pid)

    def reap(self) -> int:
        """Kill what is left of the group, see it gone, and collect the leader. Returns how the leader ended."""
        if self._process.returncode is None:
            self.signal(signal.SIGKILL)
            deadline = time.monotonic() + KILL_S
            while live_group(self.pid) and time.monotonic() < deadline:
                time.sleep(POLL_S)
        return self._process.wait()

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines that the server wrote."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-num_lines:])


def start(command: Sequence[str], *, environment: Mapping[str, str], log_path: Path, placement: Placement) -> Child:
    """Start `command` in a group of its own, its output going to `log_path` (appended, so that restarts keep the story).

    The CPU set is taken over from this thread, hence it holds from the first instruction of the child on.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log, _this_thread_on(placement.cpus):
        process = _spawn(command, environment, log)
    child = Child(process, log_path)
    if placement.niceness:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, child.pid, placement.niceness)
    return child


def _spawn(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@contextlib.contextmanager
def _this_thread_on(cpus: frozenset[int]) -> Iterator[None]:
    """Keep this thread on `cpus` for the time of the block (nothing happens for an empty set)."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def stop_all(children: Sequence[Child], *, grace_s: float = STOP_GRACE_S) -> dict[int, int]:
    """End all children: SIGTERM to all at once, SIGKILL to what is left after `grace_s`. May be called twice.

    Returns:
        For each process id how it ended.
    """
    for child in children:
        child.signal(signal.SIGTERM)
        child.signal(signal.SIGCONT)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and not all(child.ended() for child in children):
        time.sleep(POLL_S)
    return {child.pid: child.reap() for child in children}


def live_group(group_id: int) -> list[int]:
    """Ids of the live processes of a group, from /proc; what has ended and waits to be collected is left out."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # pid (name, which may hold blanks and brackets) state parent group ...
            state, _parent, group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if int(group) == group_id and state != "Z":
                pids.append(int(stat.parent.name))
    return sorted(pids)


def _listening_sockets(process_id: int, port: int) -> set[str]:
    """Who listens on this port in the network of a process, as links of descriptors name sockets."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process_id}/net/{table}").read_text().splitlines()[1:]:
                # number local-address:port remote-address:port state ... inode, numbers in hex; 0A is LISTEN
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{words[9]}]")
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on now. Another process may take it before our child does: be ready to ask again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that both run the same clean-up. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def not_interrupted() -> Iterator[None]:
    """Hold off Ctrl-C and SIGTERM for the time of the block: a second Ctrl-C must not stop the stopping."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
