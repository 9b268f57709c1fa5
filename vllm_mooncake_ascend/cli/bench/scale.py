"""`bench scale`: what a request costs our machines as prompts grow longer, more requests come at once, and more engines take
part. CPU time of one thread that does the work of all engines of a transfer: producer, consumer, reader, and their messages."""

from __future__ import annotations

from pathlib import Path

import typer

from vllm_mooncake_ascend.cli.bench import run
from vllm_mooncake_ascend.cli.bench.rounds import MIN_SAMPLE_S

PARTS = ("prompts", "at_once", "remembered", "engines", "first", "renewals")


def scale(
    parts: list[str] = typer.Option(
        PARTS, "--part", help="prompts, at_once, remembered, engines, first or renewals; may be given again. All by default."
    ),
    tokens: list[int] = typer.Option((1_024, 4_096, 16_384, 65_536, 131_072), min=1, help="Lengths of prompts."),
    at_once: list[int] = typer.Option((1, 16, 128, 1_024), min=1, help="Requests at once between two engines."),
    remembered: list[int] = typer.Option((16, 1_024, 16_384), min=1, help="Ended requests that prefill remembers."),
    engines: list[int] = typer.Option((2, 10, 100, 1_000), min=2, help="Engines, prefill and decode together."),
    block_tokens: list[int] = typer.Option(
        (128, 16), min=1, help="Tokens of a block; the first one where prompts do not grow."
    ),
    chunk_tokens: int = typer.Option(512, min=1, help="Tokens of one step of a prefill."),
    base_tokens: int = typer.Option(2_048, min=1, help="Length of prompts where it does not grow."),
    layers: int = typer.Option(32, min=1, help="Of every engine: the size of a handshake."),
    sample_s: float = typer.Option(MIN_SAMPLE_S, min=0.0, help="Length of a sample of many requests, at least."),
    rounds: int = run.ROUNDS,
    seed: int = run.SEED,
    max_foreign_cores: float = run.FOREIGN_CORES,
    json_path: Path = run.JSON,
    plots: Path = run.PLOTS,
) -> None:
    """CPU, messages and actions of a request as prompts, concurrency and the number of engines grow; both transfer modes."""
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: known are {', '.join(PARTS)}", param_hint="--part")
    from vllm_mooncake_ascend.cli.bench import scale_loads
    from vllm_mooncake_ascend.cli.bench.scale_cases import measure_series, note_slopes

    sizes = scale_loads.Sizes(
        chunk_tokens=chunk_tokens,
        num_layers=layers,
        base_tokens=base_tokens,
        block_tokens=block_tokens[0],
        sample_s=sample_s,
    )
    this = run.Run("bench scale", num_rounds=rounds, seed=seed, max_foreign_cores=max_foreign_cores)
    if "prompts" in parts:
        name = "request, by its prompt"
        measure_series(this, name, scale_loads.prompt_loads(sizes, tokens, block_tokens), grows_with_size=True)
        note_slopes(this, name)
    if "at_once" in parts:
        measure_series(this, "request, by those at once", scale_loads.at_once_loads(sizes, at_once))
    if "remembered" in parts:
        measure_series(this, "request, by those ended", scale_loads.remembered_loads(sizes, remembered))
    if "engines" in parts:
        measure_series(this, "request, by engines", scale_loads.engine_loads(sizes, engines))
        this.note(
            "Engines take turns: with half of each, all others were served since a request's two engines last were, so that "
            "their state is in no cache of the core, where in production every engine has a core. What that costs shows where "
            "caches are emptied on purpose; what more engines cost beyond that does not."
        )
    if "first" in parts:
        measure_series(this, "first of a pair, by engines", scale_loads.first_loads(sizes, engines))
    if "renewals" in parts:
        measure_series(this, "renewal, by those waiting", scale_loads.renewal_loads(sizes, at_once))
    this.note(
        "One thread does the work of all engines: producer, consumer, reader, encoding and decoding of messages. Neither vLLM, "
        "nor planning (`bench micro`), nor moving of bytes (`bench transfer`) is in it."
    )
    this.finish(json_path, plots)
