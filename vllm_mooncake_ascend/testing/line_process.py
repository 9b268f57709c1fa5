"""A child process of a test that is asked by lines of JSON and answers by lines of JSON."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TypeVar

import msgspec

ANSWER_S = 60.0
"""A process that says nothing for so long has failed the test."""
_T = TypeVar("_T")


class LineProcess:
    """`python -m module arguments...`, from its start to `end`."""

    def __init__(self, module: str, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, command: msgspec.Struct) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()

    def answer(self, kind: type[_T]) -> _T:
        """Its next line; one that stays silent is killed, which ends the wait with an error."""
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_S, self._process.kill)
        watchdog.start()
        try:
            return msgspec.json.decode(self._process.stdout.readline(), type=kind)
        finally:
            watchdog.cancel()

    def stop(self) -> None:
        """Returns when it is stopped with all its threads, which is a moment after the signal."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)

    def end(self) -> None:
        """Leave nothing behind, in whatever state it is."""
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
