"""Which codes the installed Mooncake Store answers with, found out by asking it.

    python -m vllm_mooncake_ascend.testing.observed_store_codes tests/contract/observed_store_codes.json

prints the table of the installed version and adds it to that file. `engines.store_codes` was written from these tables; the
contract test compares, so that a Mooncake that answers differently is noticed by the name of what changed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vllm_mooncake_ascend.engines import build, environment
from vllm_mooncake_ascend.engines.base import KeyOutcome
from vllm_mooncake_ascend.testing.memory import Bytes, address_of
from vllm_mooncake_ascend.testing.mooncake_store_world import MooncakeStoreWorld, ProcessOwner
from vllm_mooncake_ascend.testing.observed_codes import Codes, Recorded, read_recorded

_HOST = "127.0.0.1"
_VALUE_BYTES = 1 << 16
_SEGMENT_BYTES = 16 << 20
_DOOMED = "of-the-killed"
_PING_S = 3.0
"""A client that pings has noticed by then that its master is gone."""


def observe() -> Codes:
    """Ask the installed Mooncake over TCP. Takes about 15 s."""
    os.environ.update(environment.safe_defaults(os.environ, protocol="tcp", host=_HOST))
    os.environ.update(environment.store_defaults(os.environ))
    world = MooncakeStoreWorld(late_watch_s=0.0)
    try:
        owner, store = world.owner(), _Raw(world.master_address, 0)
        assert set(owner.put(["there", _DOOMED], _VALUE_BYTES)) == {KeyOutcome.ACCEPTED}
        # Its object lease keeps the doomed one there: a put that finds no room makes the master evict at once.
        assert store.exists(_DOOMED) == 1
        codes = store.registering() | store.getting() | store.putting() | store.removing()
        codes |= _with_owner_killed(store, owner)
        codes |= _with_master_gone(world, store)
        store.close()
    finally:
        world.close()
    return codes


class _Raw:
    """Mooncake's own object, and memory for it."""

    def __init__(self, master_address: str, segment_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        setup = (_HOST, "P2PHANDSHAKE", segment_bytes, 0, "tcp", "", master_address)
        assert self._store.setup(*setup) == 0
        self._memory: Bytes = np.zeros(4 * _VALUE_BYTES, dtype=np.uint8)

    def registering(self) -> Codes:
        base = address_of(self._memory)
        return {
            "register": self._store.register_buffer(base, 2 * _VALUE_BYTES),
            "register again": self._store.register_buffer(base, 2 * _VALUE_BYTES),
            "register a part of it": self._store.register_buffer(base + 4_096, 4_096),
        }

    def getting(self) -> Codes:
        twice = self._store.batch_get_into_multi_buffers(["there", "there"], [self._at(0), self._at(1)], [[_VALUE_BYTES]] * 2)
        num_written = int(self._memory[0] != 0) + int(self._memory[_VALUE_BYTES] != 0)
        return {
            "exists": self.exists("there"),
            "exists of no such key": self.exists("not there"),
            "get": self.get("there", _VALUE_BYTES),
            "get of no such key": self.get("not there", _VALUE_BYTES),
            "get into too little": self.get("there", _VALUE_BYTES - 1),
            "get into too much": self.get("there", _VALUE_BYTES + 1),
            "get a key twice, first": twice[0],
            "get a key twice, second": twice[1],
            "targets of these two that were written": num_written,
        }

    def putting(self) -> Codes:
        return {
            "put": self.put("new", _VALUE_BYTES),
            "put what is there": self.put("there", _VALUE_BYTES),
            "put what is there with another length": self.put("there", 4_096),
            "put more than any segment has": self._put_large(),
            "put nothing": self.put("empty", 0),
        }

    def removing(self) -> Codes:
        return {
            "remove": self.remove("new"),
            "remove of no such key": self.remove("new"),
            "remove under an object lease": self.remove("there"),
        }

    def exists(self, key: str) -> int:
        return int(self._store.batch_is_exist([key])[0])

    def get(self, key: str, value_bytes: int) -> int:
        self._memory[:] = 0
        return int(self._store.batch_get_into_multi_buffers([key], [self._at(0)], [[value_bytes]])[0])

    def put(self, key: str, value_bytes: int) -> int:
        return int(self._store.batch_put_from_multi_buffers([key], [self._at(0)], [[value_bytes]])[0])

    def remove(self, key: str) -> int:
        return int(self._store.batch_remove([key])[0])

    def health(self) -> int:
        return int(self._store.health_check())

    def close(self) -> None:
        self._store.close()

    def _at(self, index: int) -> list[int]:
        return [address_of(self._memory) + index * _VALUE_BYTES]

    def _put_large(self) -> int:
        """The same few bytes many times over."""
        num_buffers = 2_048
        pointers, sizes = [self._at(0) * num_buffers], [[_VALUE_BYTES] * num_buffers]
        return int(self._store.batch_put_from_multi_buffers(["large"], pointers, sizes)[0])


def _with_owner_killed(store: _Raw, owner: ProcessOwner) -> Codes:
    owner.kill()
    return {
        "exists of a killed owner's": store.exists(_DOOMED),
        "get of a killed owner's": store.get(_DOOMED, _VALUE_BYTES),
    }


def _with_master_gone(world: MooncakeStoreWorld, store: _Raw) -> Codes:
    lends = _Raw(world.master_address, _SEGMENT_BYTES)
    codes = {"health": store.health(), "health of one that lends memory": lends.health()}
    world.stop_master()
    codes["exists at a stopped master"] = store.exists("there")
    world.resume_master()
    world.kill_master()
    codes["exists at a dead master"] = store.exists("there")
    codes["get at a dead master"] = store.get("there", _VALUE_BYTES)
    codes["put at a dead master"] = store.put("newer", _VALUE_BYTES)
    codes["remove at a dead master"] = store.remove("there")
    time.sleep(_PING_S)
    codes["health at a dead master"] = store.health()
    codes["health of one that lends memory at a dead master"] = lends.health()
    world.start_master()
    lends.close()
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recorded", type=Path)
    options = parser.parse_args()
    recorded: Recorded = read_recorded(options.recorded)
    codes = observe()
    recorded.setdefault(build.installed_build().version, {})["tcp"] = codes
    options.recorded.write_bytes(msgspec.json.format(msgspec.json.encode(recorded), indent=2) + b"\n")
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(codes), indent=2).decode() + "\n")


if __name__ == "__main__":
    main()
