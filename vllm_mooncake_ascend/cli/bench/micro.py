"""`bench micro`: what single steps cost in CPU time of the thread that takes them, without a model."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_mooncake_ascend.cli.bench import run

PARTS = ("planner", "codec", "lookups", "hooks")


def micro(
    parts: list[str] = typer.Option(
        PARTS, "--part", help="planner, codec, lookups or hooks; may be given again. All by default."
    ),
    blocks: int = typer.Option(8192, min=1, help="Blocks of a planned read, a save and an offer."),
    layers: int = typer.Option(80, min=1, help="Layers of these."),
    lookup_blocks: list[int] = typer.Option((100, 1024, 4096, 16384), min=1, help="Blocks of prompts looked up in the pool."),
    running: list[int] = typer.Option(
        (1, 64, 1024, 4096), min=1, help="Running requests of an engine whose hooks are measured."
    ),
    rounds: int = run.ROUNDS,
    seed: int = run.SEED,
    max_foreign_cores: float = run.FOREIGN_CORES,
    json_path: Path = run.JSON,
    plots: Path = run.PLOTS,
) -> None:
    """CPU time of the planner, the messages, the pool's lookups and the scheduler hooks (beside vLLM's own connector)."""
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
    if "hooks" in parts:
        _measure_hooks(this, running)
    this.finish(json_path, plots)


def _measure_hooks(this: run.Run, nums_running: list[int]) -> None:
    from vllm_mooncake_ascend.cli.bench.micro_hooks import HooksFailed, hook_comparisons, hook_samples
    from vllm_mooncake_ascend.cli.local_cluster import ServerFailed

    try:
        with this.console.status("scheduler hooks: some minutes"):
            samples = hook_samples(nums_running, num_rounds=this.num_rounds, seed=this.seed)
    except (HooksFailed, ServerFailed) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    this.add(samples, hook_comparisons(samples))
    this.note(
        "Hooks: vLLM's real scheduler and both roles of each connector in one process, without a model; of vLLM's own store "
        "connector the scheduler role alone. The no-op connector shows what the base class and the clock around each hook cost."
    )
