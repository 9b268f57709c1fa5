"""Where the master of a pool is: whether it answers there, and whether its name has come to stand for other machines.

Only of a plain `host:port`. Other addresses (`etcd://...`) are Mooncake's to resolve, and it follows a new master by them.

A new master behind the same name: Mooncake keeps the IP addresses that it found for the name, for up to five minutes, and looks
it up again sooner only where nobody accepts connections any more. So it follows by itself within 3 s from a master that was
killed, but stays 212 and 305 s with one that was silent, as a machine is that is gone (measured, 0.3.13.post1).
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import StoreHealth

_NO_REQUEST = b"\0"
Resolver = Callable[[str], frozenset[str]]
"""From a master's address to the IP addresses for which it stands now; none: not known."""


class MasterWatch:
    """Remembers where a master was found. Looks its name up when clients connect, and while it cannot be reached."""

    def __init__(self, address: str, resolve: Resolver) -> None:
        self._address = address
        self._resolve = resolve
        self._found_at: frozenset[str] = frozenset()
        self._num_moved = 0
        """Looks in a row that found it gone and its name moved."""

    def note_connecting(self) -> None:
        """All clients are about to connect."""
        self._found_at = self._resolve(self._address)
        self._num_moved = 0

    def has_moved(self) -> bool:
        """Whether its name stands for other machines than where it was found."""
        now_at = self._resolve(self._address)
        return bool(now_at and self._found_at) and now_at != self._found_at

    def is_left_behind(self, health: StoreHealth) -> bool:
        """Note what a look at the clients' health said. True: they hang on to a silent master, and another one is there."""
        if health is StoreHealth.UNREACHABLE:
            self._num_moved = self._num_moved + 1 if self.has_moved() else 0
        elif health is StoreHealth.CONNECTED and self._num_moved > 0:
            # Mooncake has followed by itself.
            self.note_connecting()
        return self._num_moved >= limits.PROBES_TO_MOVE


def silence(master_address: str) -> str:
    """Why no master answers at a plain address, "" when one does; "" for other addresses.

    A process that is stopped accepts connections all the same (the kernel does), and Mooncake's setup then holds the GIL for
    2.4 s at each attempt. So a byte is sent with which no request begins: a living master hangs up within 2 ms, and logs
    nothing (measured, 0.3.13.post1).
    """
    place = _place(master_address)
    if place is None:
        return "" if "://" in master_address else "nobody listens there: it is no host:port"
    try:
        with socket.create_connection(place, timeout=limits.STORE_CONNECT_S) as connection:
            connection.sendall(_NO_REQUEST)
            connection.recv(1)
    except ConnectionResetError:
        return ""
    except TimeoutError:
        return "it does not answer: it is stopped, short of CPU, or cannot be reached"
    except (OSError, UnicodeError) as error:
        return f"nobody listens there: {error}"
    return ""


def resolve(master_address: str) -> frozenset[str]:
    """IP addresses of a plain address, as the system's resolver has them, which may take seconds. Empty: not known."""
    place = _place(master_address)
    if place is None:
        return frozenset()
    try:
        return frozenset(str(found[4][0]) for found in socket.getaddrinfo(*place, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):
        return frozenset()


def _place(master_address: str) -> tuple[str, int] | None:
    host, _, port = master_address.rpartition(":")
    if "://" in master_address or not host or not port.isdecimal():
        return None
    return host.strip("[]"), int(port)
