"""The other process of a bench: it prints a line when it is ready, and ends when its stdin does."""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterator, Sequence

from vllm_mooncake_ascend.errors import MooncakeAscendError

START_S = 60.0
END_S = 15.0


class PartnerFailed(MooncakeAscendError):
    """The process did not start."""


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[bytes]:
    """The process, from its line to its end; gives the line.

    Raises:
        PartnerFailed: it ended, or said nothing.
    """
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
            watchdog.cancel()
            if not line:
                raise PartnerFailed(f"{' '.join(command)} ended, or said nothing for {START_S:.0f} s")
            yield line
        finally:
            watchdog.cancel()
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
