"""A process with one Mooncake engine that serves patterned memory and reads when told: the other side of contract tests.

    python -m vllm_mooncake_ascend.testing.engine_peer --protocol tcp --num-bytes 1048576 --seed 1

Line by line, JSON: it first prints `Serving`; then it answers each command on stdin with one line. It ends when stdin
does. Everything else (stop, continue, kill) is done to it with signals.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Union

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.transfer import MooncakeTransferEngine
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.testing.memory import Bytes, address_of, batch_of, pattern, region_of
from vllm_mooncake_ascend.types import Outcome, Session


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """First line of the process: where its memory can be read."""

    session: str
    base_address: int
    num_bytes: int


class Read(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read `num_bytes` that should be `pattern(seed)` from a peer, `rounds` times over. Answer: `ReadAnswer`."""

    session: str
    remote_address: int
    num_bytes: int
    run_bytes: int
    seed: int
    rounds: int


class Close(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Close the engine and stay alive. Answer: `Closed`."""


class ReadAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How the reads ended: outcomes that are not DONE, and rounds whose bytes were wrong."""

    failures: list[str]
    num_wrong: int


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    pass


Command = Union[Read, Close]


def run_batches(local: Bytes, remote_address: int, run_bytes: int) -> Iterator[CopyBatch]:
    """Read all of `local` from `remote_address` on, in runs of `run_bytes`, in as many calls as the limits ask for."""
    run_offsets = range(0, local.nbytes, run_bytes)
    runs_per_call = min(limits.MAX_CALL_DESCRIPTORS, limits.MAX_CALL_BYTES // run_bytes)
    for first in range(0, len(run_offsets), runs_per_call):
        yield batch_of(
            [
                (address_of(local) + offset, remote_address + offset, min(run_bytes, local.nbytes - offset))
                for offset in run_offsets[first : first + runs_per_call]
            ]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--protocol", required=True)
    parser.add_argument("--num-bytes", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    memory = pattern(options.seed, options.num_bytes)
    engine = MooncakeTransferEngine(host=options.host, protocol=options.protocol)
    engine.register([region_of(memory)])
    _say(Serving(session=engine.session, base_address=address_of(memory), num_bytes=memory.nbytes))
    for line in sys.stdin:
        command = msgspec.json.decode(line, type=Command)
        if isinstance(command, Read):
            _say(_read(engine, command))
        else:
            engine.close()
            _say(Closed())
    # Not by returning: a peer must end at once and the same way whatever state its engine is in.
    sys.stdout.flush()
    os._exit(0)


def _read(engine: MooncakeTransferEngine, command: Read) -> ReadAnswer:
    expected = pattern(command.seed, command.num_bytes)
    failures = []
    num_wrong = 0
    local = pattern(command.seed + 1, command.num_bytes)
    engine.register([region_of(local)])
    for _ in range(command.rounds):
        local[:] = 0
        for batch in run_batches(local, command.remote_address, command.run_bytes):
            result = engine.read(Session(command.session), batch)
            if result.outcome is not Outcome.DONE:
                failures.append(f"{result.outcome.value}: {result.reason}")
        num_wrong += int(not (local == expected).all())
    return ReadAnswer(failures=failures, num_wrong=num_wrong)


def _say(answer: Union[Serving, ReadAnswer, Closed]) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
