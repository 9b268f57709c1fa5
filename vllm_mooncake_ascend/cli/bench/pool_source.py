"""Another engine's worker for `bench pool`: a process that lends memory, and has put blocks into it.

    python -m vllm_mooncake_ascend.cli.bench.pool_source --master 127.0.0.1:50051 --blocks 64 --seed 1

It puts each block twice, with a seal and without, prints a line, and ends when its stdin does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

from vllm_mooncake_ascend.cli.bench import partner
from vllm_mooncake_ascend.cli.bench.pool_memory import SEALED, UNSEALED, PoolMemory, make_store
from vllm_mooncake_ascend.cli.bench.transfer_memory import STEP_BYTES
from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore

OTHER = "other process"
"""Family of the names of what it puts: this and SEALED or UNSEALED."""


class SourceFailed(RuntimeError):
    """The process could not put."""


@contextlib.contextmanager
def running(master_address: str, num_blocks: int, seed: int) -> Iterator[None]:
    """The process, from its last put to its end.

    Raises:
        PartnerFailed: it ended, or said nothing.
    """
    command = [sys.executable, "-m", __name__, "--master", master_address]
    with partner.running([*command, "--blocks", str(num_blocks), "--seed", str(seed)]):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args()
    memory = PoolMemory(options.blocks, seed=options.seed)
    stores = [_filled_store(options.master, memory, kind) for kind in (SEALED, UNSEALED)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    assert stores, "their memory goes with them"
    # Not by returning: the clients' threads are still there, and the master may have gone.
    os._exit(0)


def _filled_store(master_address: str, memory: PoolMemory, kind: str) -> KVStore:
    segment_bytes = 2 * memory.num_blocks * STEP_BYTES + (64 << 20)
    store = make_store(master_address, segment_bytes=segment_bytes, is_sealed=kind == SEALED)
    store.register(memory.layout.regions)
    store.connect()
    for call in memory.put_calls(f"{OTHER}, {kind}", memory.num_blocks):
        outcomes = set(store.put(call.keys, call.batch).outcomes)
        if outcomes != {KeyOutcome.ACCEPTED}:
            raise SourceFailed(f"putting: {outcomes}")
    return store


if __name__ == "__main__":
    main()
