"""Make Mooncake's listening thread wake more often, so that destroying an engine does not stop this process for a second.

Mooncake's handshake listener (`SocketHandShakePlugin`, transfer_metadata_plugin.cpp, v0.3.13.post1) waits in `accept` with a
receive timeout of 1 s on its socket and looks only then whether it should end. The destructor joins it, and runs with the
GIL held: no Python thread runs for up to a second, the model's neither (measured: 0.5-1.0 s, with this 3-50 ms). The
timeout belongs to the socket, so it can be shortened from here. Where the socket is not found, nothing changes but that.

Can go when Mooncake wakes its listener itself, or releases the GIL in its destructor.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct

ACCEPT_TIMEOUT_S = 0.05
"""Costs 0.1 % of a core, once for each engine."""


def wake_often(port: int) -> bool:
    """Shorten the timeout of this process's socket that listens on `port`. False when there is none to be found."""
    for descriptor in _open_descriptors():
        # Ours is a duplicate: descriptors may come and go in other threads meanwhile.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if _listens_on(duplicate, port):
                duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(ACCEPT_TIMEOUT_S))
                return True
    return False


def _open_descriptors() -> list[int]:
    """Numbers of the sockets this process has open; none where there is no /proc."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    found.append(int(name))
    return found


def _listens_on(candidate: socket.socket, port: int) -> bool:
    if candidate.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    is_listening = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    return is_listening and candidate.getsockname()[1] == port


def _timeval(timeout_s: float) -> bytes:
    seconds, fraction = divmod(timeout_s, 1.0)
    return struct.pack("ll", int(seconds), int(fraction * 1e6))
