"""`demo`: a prefill engine, a decode engine, the proxy and a plain engine on this host, and proof that all agree.

First part: every prompt goes through the proxy and, for comparison, to the plain engine. KV that moved is read off the decode
engine's metrics before and after. Second part (`demo_pool`): the prefill and the decode engine, now asked directly, share
prefixes through a pool. They take part in it from the start, as engines with `prefix_pooling` do; no two prompts of the first
part have a block in common, so nothing comes from the pool there.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
import typer
from rich.console import Console

from vllm_mooncake_ascend._version import __version__
from vllm_mooncake_ascend.cli import demo_pool_report, demo_report, launch, processes, servers, versions
from vllm_mooncake_ascend.cli.demo_client import Answer, RequestFailed, ask, new_session, read_metrics
from vllm_mooncake_ascend.cli.demo_pool import Engines, run_scenarios
from vllm_mooncake_ascend.cli.demo_pool_report import PoolRow
from vllm_mooncake_ascend.cli.demo_prompts import BATCHES, WARM_UP, DemoPrompt
from vllm_mooncake_ascend.cli.demo_report import Moved, Report, Row
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, ServerFailed
from vllm_mooncake_ascend.cli.master_http import MasterHttp, MasterUnreachable

MODEL_NAME = "demo"
BLOCK_SIZE = 128
METRICS_SETTLE_S = 5.0
"""An engine publishes what a step did with the step's output; nothing says when, so we look until the reads are counted."""
METRICS_POLL_S = 0.1
TABLE_WIDTH = 160
KV_CACHE_GIB = 1
"""For each engine; holds the prompts of the demo."""
POOL_SEGMENT = "1GB"
"""Memory that the prefill and the decode engine lend to the pool, each; holds all that is saved."""


class Urls(msgspec.Struct, frozen=True, kw_only=True):
    """Where the demo's servers answer."""

    proxy: str
    prefill: str
    decode: str
    reference: str


def engine_arguments(dtype: str) -> tuple[str, ...]:
    """vLLM options of all three engines; they must be the same, or answers could differ for another reason."""
    return (
        *("--served-model-name", MODEL_NAME, "--dtype", dtype, "--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "8", "--enforce-eager"),
    )


def demo_specs(model: Path, dtype: str, pool_master: str) -> list[servers.ServerSpec]:
    """The demo's engines."""
    environment = servers.cpu_environment(os.environ, kv_cache_gib=KV_CACHE_GIB) | servers.pool_environment(os.environ)
    arguments = engine_arguments(dtype)
    plan = launch.Plan(
        model=str(model),
        num_prefill=1,
        num_decode=1,
        arguments=arguments,
        pool_segment=POOL_SEGMENT,
        pool_master=pool_master,
    )
    specs = launch.engine_specs(plan, cpus=frozenset(os.sched_getaffinity(0)), cpu_environment=environment)
    reference = servers.engine("reference", "reference", str(model), arguments=arguments, environment=environment)
    return [*specs, reference]


async def run_batches(urls: Urls, bytes_per_block: int, console: Console) -> list[Row]:
    """Send all prompts both ways, batch by batch."""
    rows: list[Row] = []
    total = sum(len(batch) for batch in BATCHES)
    async with new_session() as session:
        for url in (urls.proxy, urls.reference):
            await ask(session, url, MODEL_NAME, WARM_UP)
        await _moved_by(session, urls, num_reads=1, before={})
        for batch in BATCHES:
            with console.status(f"request {len(rows) + 1} of {total}: {batch[0].name}"):
                rows += await _run_batch(session, urls, batch, bytes_per_block)
            if not console.is_terminal:
                console.print(f"{len(rows)} of {total} requests done")
    return rows


async def _run_batch(
    session: aiohttp.ClientSession, urls: Urls, batch: Sequence[DemoPrompt], bytes_per_block: int
) -> list[Row]:
    before = await read_metrics(session, urls.decode)
    answers = await _ask_at_once(session, urls.proxy, batch)
    moved = await _moved_by(session, urls, num_reads=len(batch), before=before)
    references = await _ask_at_once(session, urls.reference, batch)
    return demo_report.rows_of(batch, answers, references, moved, bytes_per_block)


async def _ask_at_once(session: aiohttp.ClientSession, url: str, batch: Sequence[DemoPrompt]) -> list[Answer]:
    return list(await asyncio.gather(*(ask(session, url, MODEL_NAME, prompt) for prompt in batch)))


async def _moved_by(session: aiohttp.ClientSession, urls: Urls, *, num_reads: int, before: dict[str, float]) -> Moved:
    """What decode read since `before`; waits a moment until `num_reads` reads are counted."""
    deadline = time.monotonic() + METRICS_SETTLE_S
    while True:
        moved = Moved.between(before, await read_metrics(session, urls.decode))
        if moved.num_reads >= num_reads or time.monotonic() > deadline:
            return moved
        await asyncio.sleep(METRICS_POLL_S)


def report_of(rows: Sequence[Row], pool: Sequence[PoolRow], *, model: Path, dtype: str, seconds: float) -> Report:
    """The report of a finished run."""
    return Report(
        vllm=versions.version_of(versions.VLLM),
        mooncake=versions.version_of(versions.MOONCAKE),
        connector=__version__,
        model=model.name,
        dtype=dtype,
        machine=f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        all_equal=all(row.equal for row in rows) and all(row.equal for row in pool),
        all_moved=all(row.kv_moved for row in rows),
        seconds=seconds,
        requests=tuple(rows),
        pool=tuple(pool),
    )


def run(model: Path, dtype: str, out: Path, console: Console) -> Report:
    """Start everything, send everything, stop everything.

    Raises:
        ServerFailed: a server did not come up.
        RequestFailed: a request got no proper answer.
        MasterUnreachable: the pool's master does not tell what is in the pool.
    """
    started_s = time.monotonic()
    config = json.loads((model / "config.json").read_text())
    bytes_per_block = demo_report.block_bytes(config, dtype=dtype, block_size=BLOCK_SIZE)
    with processes.termination_as_interrupt(), LocalCluster(out / "logs") as cluster:
        console.print("starting the pool's master and three engines; this takes a minute or two")
        master = launch.start_master(cluster, console)
        launch.bring_up(cluster, demo_specs(model, dtype, master.rpc_address), console)
        urls = Urls(**{role: cluster.with_role(role)[0].url for role in Urls.__struct_fields__})
        rows = asyncio.run(run_batches(urls, bytes_per_block, console))
        engines = Engines(model=MODEL_NAME, first=urls.prefill, second=urls.decode, plain=urls.reference)
        pool = asyncio.run(run_scenarios(engines, MasterHttp(master.url.removeprefix("http://")), console))
    return report_of(rows, pool, model=model, dtype=dtype, seconds=time.monotonic() - started_s)


def demo(
    model: Path = typer.Option(Path("build/models/smollm2-135m-instruct"), help="Model folder."),
    dtype: str = typer.Option("float32", help="float32 answers are exact; others may differ in their last bits."),
    out: Path = typer.Option(Path("build/demo"), help="Folder for report.json and the servers' logs."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON instead of the table."),
) -> None:
    """Show on this machine that prefill and decode engines answer as one plain engine does, and what moved between them."""
    if not (model / "config.json").is_file():
        raise typer.BadParameter(f"no model in {model}; `make models` makes the default one", param_hint="--model")
    if dtype not in demo_report.DTYPE_BYTES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(demo_report.DTYPE_BYTES)}", param_hint="--dtype")
    console = Console(stderr=as_json)
    try:
        report = run(model, dtype, out, console)
    except (ServerFailed, RequestFailed, MasterUnreachable) as error:
        typer.echo(f"error: {error}\nlogs: {out / 'logs'}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo("interrupted; all servers have been stopped", err=True)
        raise typer.Exit(130) from None
    demo_report.write_json(report, out / "report.json")
    _print_report(report, out / "report.json", as_json=as_json)
    raise typer.Exit(0 if report.ok else 1)


def _print_report(report: Report, path: Path, *, as_json: bool) -> None:
    if as_json:
        print(path.read_text(), end="")
        return
    console = Console()
    if console.width < TABLE_WIDTH:
        console = Console(width=TABLE_WIDTH)
    console.print(demo_report.table_of(report))
    for note in demo_report.NOTES:
        console.print(note, style="dim")
    moved = sum(row.kv_bytes_moved for row in report.requests) / 1e6
    console.print(f"{len(report.requests)} requests, {moved:,.1f} MB of KV cache moved, {report.seconds:.0f} s in all; {path}")
    console.print(demo_pool_report.table_of(report.pool))
    for note in demo_pool_report.NOTES:
        console.print(note, style="dim")
    console.print("all answers are equal" if report.all_equal else "[bold red]answers differ[/bold red]")
    if not report.all_moved:
        console.print("[bold red]KV cache of some requests did not move[/bold red]")
    if not report.all_hit:
        console.print("[bold red]some prefixes did not come from the pool[/bold red]")


def register(app: typer.Typer) -> None:
    """Add `demo` to the command line."""
    app.command()(demo)
