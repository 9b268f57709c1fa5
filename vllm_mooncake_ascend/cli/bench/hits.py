"""`bench hits`: time to the first token when the prompt's prefix comes from the pool: ours beside vLLM's own store connector,
and a plain engine beside each.

Sets of engines run one after the other, as two would share the cores: what one set and its plain engine do is paired, and two
sets are compared by their ratios. Of each new prompt, in this order, with a rest before each:

    cold        the first engine computes it, and saves it; the plain engine computes it, before or after
    pool hit    the second engine, which has never seen it
    local hit   the first and the plain engine again, from their own caches

After each round of prompts eight requests decode at once on the first engine, and on the plain one.
"""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_mooncake_ascend.cli.bench import run


def hits(
    model: Path = typer.Option(Path("build/models/smollm2-135m-instruct"), help="Model folder."),
    dtype: str = typer.Option("bfloat16", help="As vLLM has it."),
    lengths: list[int] = typer.Option((516, 2053), "--length", min=130, max=3900, help="Tokens of a prompt."),
    kinds: list[str] = typer.Option(("ours", "vllm"), "--set", help="ours or vllm; may be given again."),
    rounds: int = typer.Option(7, min=1, help="Prompts of each length."),
    seed: int = run.SEED,
    max_foreign_cores: float = run.FOREIGN_CORES,
    json_path: Path = run.JSON,
    plots: Path = run.PLOTS,
) -> None:
    """Time to the first token of cold prompts, pool hits and local hits, with real engines."""
    from vllm_mooncake_ascend.cli.bench.hits_sets import KINDS, measure_set
    from vllm_mooncake_ascend.cli.local_cluster import ServerFailed

    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"no model in {model}; `make models` makes the default one", param_hint="--model")
    unknown = set(kinds) - KINDS.keys()
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {', '.join(KINDS)}", param_hint="--set")
    this = run.Run("bench hits", num_rounds=rounds, seed=seed, max_foreign_cores=max_foreign_cores)
    for kind in dict.fromkeys(kinds):
        try:
            measure_set(this, KINDS[kind], model, dtype, tuple(dict.fromkeys(lengths)))
        except ServerFailed as error:
            this.note(f"{kind}: not measured, a server did not start: {str(error).splitlines()[0]}")
    this.note("One answer token, so that the answer comes with it; chunks of 512 tokens; one compute thread an engine.")
    this.finish(json_path, plots)
