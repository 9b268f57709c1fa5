"""The other side of `bench transfer`: a process with memory that is read, by Mooncake alone, by our engine, and by a socket.

    python -m vllm_mooncake_ascend.cli.bench.transfer_source --num-bytes 1048576 --seed 1

It prints one line of JSON, `Serving`, and ends when its stdin does. On its socket it answers each 8-byte number, little
endian, with so many bytes of its memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator

import msgspec

from vllm_mooncake_ascend.cli.bench import partner
from vllm_mooncake_ascend.cli.bench.raw_engine import RawEngine
from vllm_mooncake_ascend.cli.bench.transfer_memory import Bytes, make_memory, region_of
from vllm_mooncake_ascend.engines.transfer import MooncakeTransferEngine

SIZE_BYTES = 8


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """Where the memory can be read."""

    base_address: int
    num_bytes: int
    session: str
    """Of our engine."""
    raw_session: str
    socket_port: int


@contextlib.contextmanager
def running(num_bytes: int, seed: int) -> Iterator[Serving]:
    """The process, from its start to its end.

    Raises:
        PartnerFailed: it ended, or said nothing.
    """
    command = [sys.executable, "-m", __name__, "--num-bytes", str(num_bytes), "--seed", str(seed)]
    with partner.running(command) as line:
        yield msgspec.json.decode(line, type=Serving)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-bytes", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    memory = make_memory(options.num_bytes, seed=options.seed)
    region = region_of(memory)
    engine = MooncakeTransferEngine(host="127.0.0.1", protocol="tcp")
    engine.register([region])
    raw = RawEngine([region])
    serving = Serving(
        base_address=region.base_address,
        num_bytes=region.length_bytes,
        session=engine.session,
        raw_session=raw.session,
        socket_port=_serve_socket(memory),
    )
    sys.stdout.write(msgspec.json.encode(serving).decode() + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    # Not by returning: Mooncake's threads are still there.
    os._exit(0)


def _serve_socket(memory: Bytes) -> int:
    """Serve in a thread; returns the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                while size := connection.recv(SIZE_BYTES, socket.MSG_WAITALL):
                    connection.sendall(memory.data[: int.from_bytes(size, "little")])

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
