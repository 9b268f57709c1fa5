"""`bench pool`: bytes a second into the prefix pool and out of it, and how long lookups take: ours beside Mooncake's client.

Ours is a worker's shell with its threads, as an engine has it: orders in, ends out. Raw is Mooncake's client with the same
names and buffers in the same calls, prepared beforehand.
"""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_mooncake_ascend.cli.bench import run

LOGS = Path("build/bench/logs")


def pool(
    sizes: list[int] = typer.Option((4, 64), "--size", min=1, help="MiB of one put or get; may be given again."),
    keys: list[int] = typer.Option((100, 1024, 4096, 16384), min=1, max=16384, help="Keys of one lookup."),
    rounds: int = run.ROUNDS,
    seed: int = run.SEED,
    max_foreign_cores: float = run.FOREIGN_CORES,
    json_path: Path = run.JSON,
    plots: Path = run.PLOTS,
) -> None:
    """Puts, gets and lookups of the prefix pool, ours beside Mooncake's own client, with and without `reads_apart`."""
    from vllm_mooncake_ascend.cli import processes, servers
    from vllm_mooncake_ascend.cli.bench.pool_cases import Pool
    from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, ServerFailed

    this = run.Run("bench pool", num_rounds=rounds, seed=seed, max_foreign_cores=max_foreign_cores)
    try:
        with processes.termination_as_interrupt(), LocalCluster(LOGS) as cluster:
            master = cluster.start(servers.master())
            cluster.wait_ready()
            with Pool.running(master.rpc_address, max(sizes), this.seed) as made:
                for size in dict.fromkeys(sizes):
                    this.measure(*made.puts(size))
                    this.measure(*made.gets(size))
                this.measure(*made.lookups(tuple(dict.fromkeys(keys))))
    except ServerFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    this.note("Every way to get was compared byte by byte before it was measured. A block is 1 MiB in 16 buffers.")
    this.note(
        "reads_apart: gets of what lies in one's own memory go over TCP too, so that a fence after a failed get spares it."
    )
    this.finish(json_path, plots)
