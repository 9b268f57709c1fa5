"""Children are started where they should run and are always ended, whatever they do about it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_mooncake_ascend.cli import processes
from vllm_mooncake_ascend.cli.processes import Child, Placement

TALKING = "import os, sys; fd = os.open(sys.argv[1], os.O_WRONLY); os.write(fd, str(os.getpid()).encode()); os.close(fd); "
WAITING = TALKING + "import signal; signal.pause()"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + WAITING
PARENT = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {DEAF!r}, sys.argv[1]]); child.wait()"


class Nursery:
    """Starts children that say through a pipe when they are up, so that no test has to wait by the clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.children: list[Child] = []

    def start(self, code: str, *, placement: Placement | None = None) -> tuple[Child, int]:
        """The child, and the id of the process that spoke."""
        pipe = self._folder / f"pipe-{len(self.children)}"
        os.mkfifo(pipe)
        child = processes.start(
            [sys.executable, "-c", code, str(pipe)],
            environment=os.environ,
            log_path=self._folder / "logs" / "child.log",
            placement=placement or Placement(),
        )
        self.children.append(child)
        return child, int(pipe.read_text())


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    made = Nursery(tmp_path)
    yield made
    processes.stop_all(made.children, grace_s=0)


def test_a_child_ends_on_sigterm(nursery: Nursery) -> None:
    """Stops a well-behaved child and looks at how it ended."""
    child, _ = nursery.start(WAITING)
    assert {child.pid: -signal.SIGTERM} == processes.stop_all([child], grace_s=30)


def test_a_deaf_child_is_killed_after_the_grace(nursery: Nursery) -> None:
    """Stops a child that ignores SIGTERM."""
    child, _ = nursery.start(DEAF)
    assert {child.pid: -signal.SIGKILL} == processes.stop_all([child], grace_s=0.1)


def test_a_frozen_child_ends_on_sigterm(nursery: Nursery) -> None:
    """Stops a child that was stopped by SIGSTOP, which takes no signal until it is let go on."""
    child, _ = nursery.start(WAITING)
    child.signal(signal.SIGSTOP)
    assert {child.pid: -signal.SIGTERM} == processes.stop_all([child], grace_s=30)


def test_grandchildren_end_with_their_group(nursery: Nursery) -> None:
    """The leader ends on SIGTERM at once, its own child ignores it: both must be gone afterwards."""
    child, grandchild_id = nursery.start(PARENT)
    processes.stop_all([child], grace_s=0.1)
    assert ([], False) == (processes.live_group(child.pid), Path(f"/proc/{grandchild_id}/exe").exists())


def test_stopping_twice_is_harmless(nursery: Nursery) -> None:
    """The second call finds a reaped child and tells the same end."""
    child, _ = nursery.start(WAITING)
    assert processes.stop_all([child], grace_s=30) == processes.stop_all([child], grace_s=30)


def test_a_child_keeps_to_its_cpus(nursery: Nursery) -> None:
    """Starts a child on one CPU; this thread keeps all of its own."""
    before = os.sched_getaffinity(0)
    _, process_id = nursery.start(WAITING, placement=Placement(cpus=frozenset({max(before)})))
    assert ({max(before)}, before) == (os.sched_getaffinity(process_id), os.sched_getaffinity(0))


def test_cpus_that_do_not_exist_are_ignored(nursery: Nursery) -> None:
    """A placement made on another machine must not keep a server from starting."""
    _, process_id = nursery.start(WAITING, placement=Placement(cpus=frozenset({100_000})))
    assert os.sched_getaffinity(0) == os.sched_getaffinity(process_id)


def test_a_child_steps_back(nursery: Nursery) -> None:
    """Starts a child with a niceness."""
    child, _ = nursery.start(WAITING, placement=Placement(niceness=7))
    assert 7 == os.getpriority(os.PRIO_PROCESS, child.pid)


def test_the_log_tail_has_the_last_lines(nursery: Nursery) -> None:
    """Starts a child that writes before it speaks."""
    child, _ = nursery.start("print(*range(100), sep='\\n', flush=True); " + WAITING)
    assert "98\n99" == child.log_tail(2)


def test_a_free_port_can_be_bound() -> None:
    """Asks for ports of both address families."""
    assert all(1023 < processes.free_port(host) < 65536 for host in ("127.0.0.1", "::1"))


def test_sigterm_becomes_an_interrupt_and_is_put_back() -> None:
    """Sends SIGTERM to this process inside the block."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), processes.termination_as_interrupt():
        os.kill(os.getpid(), signal.SIGTERM)
    assert before == signal.getsignal(signal.SIGTERM)


def test_nothing_interrupts_the_stopping() -> None:
    """Sends Ctrl-C to this process inside the block; a background job may have been started with SIGINT ignored."""
    before = signal.getsignal(signal.SIGINT)
    with processes.not_interrupted():
        os.kill(os.getpid(), signal.SIGINT)
    assert before == signal.getsignal(signal.SIGINT)
