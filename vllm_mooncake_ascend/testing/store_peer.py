"""A client of a pool in a process of its own, for the contract of the store. Asked and answering by lines of JSON.

It lends memory, puts `store_world.value(key)` under keys, and judges what it gets by the same rule.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from typing import Union

import msgspec

from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore
from vllm_mooncake_ascend.engines.native_store import StoreSettings
from vllm_mooncake_ascend.engines.sealed_store import SealedStore
from vllm_mooncake_ascend.engines.store import MooncakeStore
from vllm_mooncake_ascend.testing.store_world import judged, memory_for, store_batch_of, values


class Put(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    keys: tuple[str, ...]
    value_bytes: int


class Get(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    keys: tuple[str, ...]
    value_bytes: int


class Overwrite(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first bytes of one object in this peer's own memory become those of another, without a call; None: all bytes."""

    key: str
    by: str
    num_bytes: int | None


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Leave the pool in good order, and end."""


Command = Union[Put, Get, Overwrite, Close]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Of each key; none to the start and to Close."""

    outcomes: tuple[KeyOutcome, ...] = ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master", required=True)
    parser.add_argument("--segment-bytes", type=int, required=True)
    parser.add_argument("--sealed", action="store_true")
    options = parser.parse_args()
    settings = StoreSettings(
        host="127.0.0.1", protocol="tcp", master_address=options.master, segment_bytes=options.segment_bytes
    )
    mooncake = MooncakeStore(settings)
    store = SealedStore(mooncake) if options.sealed else mooncake
    store.connect()
    _say(Answer())
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        if isinstance(command, Close):
            store.close()
            _say(Answer())
        elif isinstance(command, Overwrite):
            _overwrite(mooncake, command)
            _say(Answer())
        else:
            _say(Answer(outcomes=_call(store, command)))
    # Not by returning: a peer must end at once and the same way whatever state its client is in.
    os._exit(0)


def _overwrite(store: MooncakeStore, command: Overwrite) -> None:
    (target, size), (source, _) = (_place(store, key) for key in (command.key, command.by))
    ctypes.memmove(target, source, size if command.num_bytes is None else command.num_bytes)


def _place(store: MooncakeStore, key: str) -> tuple[int, int]:
    """Address and size of an object of this peer's own memory."""
    with store._serving.call() as native:
        assert native is not None
        (replica,) = native._store.batch_get_replica_desc([key])[key]
    place = replica.get_memory_descriptor().buffer_descriptor
    return int(place.buffer_address), int(place.size)


def _call(store: KVStore, command: Union[Put, Get]) -> tuple[KeyOutcome, ...]:
    local = memory_for(store, len(command.keys), command.value_bytes)
    if isinstance(command, Get):
        return judged(store.get(command.keys, store_batch_of(local)), command.keys, local)
    local[:] = values(command.keys, command.value_bytes)
    return store.put(command.keys, store_batch_of(local)).outcomes


def _say(answer: Answer) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
