"""A TCP relay of a test, on loopback: stands for a name that can come to mean another machine.

Connections go where the relay points when they are made, and stay there, as connections to an address do after its name moved.
It is a process of its own, because Mooncake's setup holds the GIL of whoever calls it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading

import msgspec

from vllm_mooncake_ascend.testing.line_process import LineProcess

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16


class PointAt(msgspec.Struct, frozen=True, kw_only=True):
    """New connections go there."""

    target: str
    """host:port"""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the start and to each `PointAt`."""

    address: str
    """Where the relay accepts: host:port."""


class TcpRelay:
    """Accepts from the constructor to `end`."""

    def __init__(self, target: str) -> None:
        """`target`: host:port."""
        self._process = LineProcess(__name__, [target])
        self.address = self._process.answer(Listening).address

    def point_at(self, target: str) -> None:
        """New connections go there."""
        self._process.ask(PointAt(target=target))
        self._process.answer(Listening)

    def end(self) -> None:
        self._process.end()


class _Relay:
    def __init__(self, target: str) -> None:
        self.target = target
        self._listener = socket.create_server((_HOST, 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def say(self) -> None:
        listening = Listening(address=f"{_HOST}:{self._listener.getsockname()[1]}")
        sys.stdout.write(msgspec.json.encode(listening).decode() + "\n")
        sys.stdout.flush()

    def _accept(self) -> None:
        while True:
            caller, _ = self._listener.accept()
            host, _, port = self.target.rpartition(":")
            try:
                called = socket.create_connection((host, int(port)))
            except OSError:
                caller.close()
                continue
            for source, target in ((caller, called), (called, caller)):
                threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)


def main() -> None:
    relay = _Relay(sys.argv[1])
    relay.say()
    for line in sys.stdin:
        relay.target = msgspec.json.decode(line, type=PointAt).target
        relay.say()
    os._exit(0)


if __name__ == "__main__":
    main()
