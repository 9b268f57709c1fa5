"""`bench micro`: what single steps cost in CPU time of the thread that takes them, without a model."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_mooncake_ascend.cli.bench import run

PARTS = ("planner", "codec", "lookups")


def micro(
    parts: list[str] = typer.Option(PARTS, "--part", help="planner, codec or lookups; may be given again. All by default."),
    blocks: int = typer.Option(8192, min=1, help="Blocks of a planned read, a save and an offer."),
    layers: int = typer.Option(80, min=1, help="Layers of these."),
    lookup_blocks: list[int] = typer.Option((100, 1024, 4096, 16384), min=1, help="Blocks of prompts looked up in the pool."),
    rounds: int = run.ROUNDS,
    seed: int = run.SEED,
    max_foreign_cores: float = run.FOREIGN_CORES,
    json_path: Path = run.JSON,
    plots: Path = run.PLOTS,
) -> None:
    """CPU time of the planner, the messages and the pool's lookups."""
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {', '.join(PARTS)}", param_hint="--part")
    from vllm_mooncake_ascend.cli.bench.micro_codec import codec_probes
    from vllm_mooncake_ascend.cli.bench.micro_lookups import lookup_probes
    from vllm_mooncake_ascend.cli.bench.micro_planner import planner_probes

    this = run.Run("bench micro", num_rounds=rounds, seed=seed, max_foreign_cores=max_foreign_cores)
    if "planner" in parts:
        this.measure(planner_probes(num_blocks=blocks, num_layers=layers, seed=this.seed))
    if "codec" in parts:
        this.measure(codec_probes(num_blocks=blocks, num_layers=layers, num_requests=1024))
    if "lookups" in parts:
        with lookup_probes(lookup_blocks) as probes:
            this.measure(probes)
    this.finish(json_path, plots)
