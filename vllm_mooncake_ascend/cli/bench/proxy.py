"""`bench proxy`: what a proxy adds to a request. Doubles of vLLM answer at once from a process of their own, so nothing is
measured but the ways to them; the client is a third process, and all three share this machine's cores.

ours, sequential       decode is asked when prefill has answered
ours, concurrent       both are asked at once
vllm-router            the Rust router of the vLLM project, if it installs and runs here
no proxy               the client asks the decode double alone: one leg, and nothing between
no proxy, both legs    the client asks prefill, then decode, as a proxy does
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import typer

from vllm_mooncake_ascend.cli.bench import run


def proxy(
    at_once: list[int] = typer.Option((1, 16, 128), min=1, help="Requests at once; may be given again."),
    seconds: float = typer.Option(1.0, min=0.01, help="Length of a sample."),
    prompt_chars: int = typer.Option(8_192, min=2, help="Length of the prompt: two thousand tokens are about so long."),
    events: int = typer.Option(16, min=1, help="Tokens of a streamed answer."),
    router: bool = typer.Option(True, help="Install vllm-router under build/ and measure it, too."),
    rounds: int = run.ROUNDS,
    seed: int = run.SEED,
    max_foreign_cores: float = run.FOREIGN_CORES,
    json_path: Path = run.JSON,
    plots: Path = run.PLOTS,
) -> None:
    """Requests a second, added latency and CPU of our proxy, beside no proxy and vllm-router, before doubles of vLLM."""
    from vllm_mooncake_ascend.cli.bench import proxy_rounds, proxy_ways
    from vllm_mooncake_ascend.cli.bench.partner import PartnerFailed
    from vllm_mooncake_ascend.cli.bench.proxy_load import ProxyBenchFailed
    from vllm_mooncake_ascend.cli.local_cluster import ServerFailed

    this = run.Run("bench proxy", num_rounds=rounds, seed=seed, max_foreign_cores=max_foreign_cores)
    sizes = proxy_rounds.Sizes(
        nums_at_once=tuple(dict.fromkeys(at_once)), seconds=seconds, prompt_chars=prompt_chars, num_rounds=rounds
    )
    try:
        with (
            proxy_ways.upstreams(events) as served,
            proxy_ways.ways(served, with_router=router) as (ways, notes),
            this.console.status("warming up") as status,
        ):
            measuring = proxy_rounds.measure(ways, served.prefill, sizes, random.Random(this.seed), status.update)
            samples = asyncio.run(measuring)
    except (PartnerFailed, ProxyBenchFailed, ServerFailed) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    this.add(samples, proxy_rounds.comparisons(samples))
    for note in notes:
        this.note(note)
    this.note(
        f"Prompts of {prompt_chars:,} characters; streamed answers of {events} tokens, written at once. A latency is that of "
        "the whole answer, where it is streamed of its first token. Added: less that of no proxy in the same round. Client, "
        "doubles and proxy share the cores, so rates are of all three together; CPU is of the proxy's process alone."
    )
    this.finish(json_path, plots)
