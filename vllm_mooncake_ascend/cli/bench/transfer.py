"""`bench transfer`: bytes a second from one process into another over TCP loopback, ours beside what bounds it.

ours           a decode engine's worker: its order, plan, calls and answer
raw Mooncake   the same descriptors in the same calls, the same settings, none of our code
memcpy         the same descriptors inside one process
socket         one plain TCP connection, contiguous
"""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_mooncake_ascend.cli.bench import run

MIB = 1 << 20


def transfer(
    sizes: list[int] = typer.Option((1, 4, 16, 64, 256), "--size", min=1, help="MiB of one read; may be given again."),
    rounds: int = run.ROUNDS,
    seed: int = run.SEED,
    max_foreign_cores: float = run.FOREIGN_CORES,
    json_path: Path = run.JSON,
    plots: Path = run.PLOTS,
) -> None:
    """Rate of reads between two processes: ours, Mooncake's engine alone, a plain copy, and a socket."""
    from vllm_mooncake_ascend.cli.bench.transfer_cases import Transfers

    this = run.Run("bench transfer", num_rounds=rounds, seed=seed, max_foreign_cores=max_foreign_cores)
    with Transfers.running(max(sizes) * MIB, this.seed) as transfers:
        for size in dict.fromkeys(sizes):
            cases = transfers.cases(size * MIB)
            this.measure([probe for case in cases for probe in case.probes], [case.comparison for case in cases])
            for case in cases:
                case.check()
    this.note("After each size every way was read once more and compared byte by byte.")
    this.note("Mooncake has our MC_* settings in both engines of both sides.")
    this.finish(json_path, plots)
