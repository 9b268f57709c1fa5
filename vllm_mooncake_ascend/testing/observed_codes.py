"""Which codes the installed Mooncake answers with, found out by asking it.

    python -m vllm_mooncake_ascend.testing.observed_codes tests/contract/observed_codes.json

prints the table of the installed version and adds it to that file. `engines.codes` was written from these tables; the
contract test compares, so that a Mooncake that answers differently is noticed by the name of what changed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vllm_mooncake_ascend.engines import build, environment
from vllm_mooncake_ascend.testing.memory import Bytes, address_of
from vllm_mooncake_ascend.testing.mooncake_world import ProcessPeer

Codes = dict[str, int]
"""What was done -> what Mooncake returned."""
Recorded = dict[str, dict[str, Codes]]
"""Version -> protocol -> codes."""

_HOST = "127.0.0.1"
_NOBODY = f"{_HOST}:9"
_NUM_BYTES = 1 << 16


def observe(protocol: str) -> Codes:
    """Ask the installed Mooncake. Takes about 12 s: one question needs a stopped peer and its timeout."""
    os.environ.update(environment.safe_defaults(os.environ, protocol=protocol, host=_HOST))
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    codes = {"initialize": engine.initialize(_HOST, "P2PHANDSHAKE", protocol, "")}
    memory = np.zeros(4 * _NUM_BYTES, dtype=np.uint8)
    peer = ProcessPeer(protocol, _NUM_BYTES, seed=1)
    try:
        codes |= _registering(engine, memory)
        codes |= _reading(engine, memory, peer)
        codes |= _reading_from_a_stopped_peer(engine, memory, peer)
        peer.kill()
        codes["read from a killed peer"] = _read(engine, peer.session, memory, peer.base_address)
        codes["probe of a killed peer"] = engine.send_probe(peer.session)
    finally:
        peer.end()
    return codes


def read_recorded(path: Path) -> Recorded:
    """The recorded tables."""
    return msgspec.json.decode(path.read_bytes(), type=Recorded) if path.exists() else {}


def _registering(engine: Any, memory: Bytes) -> Codes:
    base = address_of(memory)
    size = _NUM_BYTES
    return {
        "register": engine.batch_register_memory([base], [size], "*"),
        "register again": engine.batch_register_memory([base], [size], "*"),
        "register a part of it": engine.batch_register_memory([base + 4_096], [4_096], "*"),
        "register an overlap and a good one": engine.batch_register_memory([base + size, base + 4_096], [size, size], "*"),
        "register that good one alone": engine.batch_register_memory([base + size], [size], "*"),
        "register nothing": engine.batch_register_memory([], [], "*"),
        "register 0 bytes": engine.register_memory(base + 3 * size, 0),
        "unregister": engine.unregister_memory(base + size),
        "unregister again": engine.unregister_memory(base + size),
    }


def _reading(engine: Any, memory: Bytes, peer: ProcessPeer) -> Codes:
    session, remote = peer.session, peer.base_address
    unregistered = memory[2 * _NUM_BYTES :]
    address = address_of(memory)
    return {
        "open": engine.batch_transfer_sync_read(session, [], [], []),
        "open where nobody listens": engine.batch_transfer_sync_read(_NOBODY, [], [], []),
        "open a host without address": engine.batch_transfer_sync_read("no.such.host.invalid:9", [], [], []),
        "probe": engine.send_probe(session),
        "probe where nobody listens": engine.send_probe(_NOBODY),
        "read": _read(engine, session, memory, remote),
        "read into memory never registered": _read(engine, session, unregistered, remote),
        "read past the end of the peer's region": _read(engine, session, memory, remote + 1),
        "read what the peer never registered": _read(engine, session, memory, remote - (1 << 30)),
        "read with lists of unequal length": engine.batch_transfer_sync_read(session, [address], [remote, remote], [8]),
        "read 0 bytes": engine.batch_transfer_sync_read(session, [address], [remote], [0]),
        "read after all that": _read(engine, session, memory, remote),
    }


def _reading_from_a_stopped_peer(engine: Any, memory: Bytes, peer: ProcessPeer) -> Codes:
    memory[:] = 0
    peer.stop()
    code = _read(engine, peer.session, memory, peer.base_address)
    peer.resume()
    return {
        "read from a stopped peer": code,
        "bytes of it land late (1: yes)": int(_becomes_true(lambda: bool(memory.any()))),
    }


def _becomes_true(question: Callable[[], bool]) -> bool:
    """Ask again and again for about two seconds (late bytes take milliseconds)."""
    return any(question() for _ in range(200_000))


def _read(engine: Any, session: str, local: Bytes, remote_address: int) -> int:
    return int(engine.batch_transfer_sync_read(session, [address_of(local)], [remote_address], [_NUM_BYTES]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recorded", type=Path)
    parser.add_argument("--protocol", default="tcp")
    options = parser.parse_args()
    recorded = read_recorded(options.recorded)
    codes = observe(options.protocol)
    recorded.setdefault(build.installed_build().version, {})[options.protocol] = codes
    options.recorded.write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=2) + b"\n")
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(codes), indent=2).decode() + "\n")


if __name__ == "__main__":
    main()
