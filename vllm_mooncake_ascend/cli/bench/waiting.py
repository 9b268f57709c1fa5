"""`bench waiting`: CPU that a decode engine burns while one request waits for remote KV. The same engine is run with our
connector, with our connector and vLLM's queue untouched, and with a connector that does nothing but let a request wait:
the last one shows vLLM's own share.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vllm_mooncake_ascend.cli import cpu_use, processes, servers, startup
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, Server, ServerFailed

MODEL_NAME = "bench"
SETTLE_S = 3.0
PROMPT = list(range(100, 400))
NULL_CONNECTOR = {
    "kv_connector": "NullConnector",
    "kv_connector_module_path": "vllm_mooncake_ascend.testing.null_connector",
    "kv_role": "kv_consumer",
}


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Share of one core that each process of the waiting engine used."""

    engine: str
    state: str
    """idle, or waiting: one request waits for KV."""
    engine_core: float
    worker: float
    api_server: float


def _configs() -> dict[str, Mapping[str, Any]]:
    ours = json.loads(servers.transfer_config("decode"))
    untamed = json.loads(servers.transfer_config("decode", {"tame_queue_spin": False}))
    return {"ours": ours, "ours, queue as vLLM has it": untamed, "null connector": NULL_CONNECTOR}


def _engine(name: str, role: str, model: Path, config: Mapping[str, Any]) -> servers.ServerSpec:
    arguments = (
        *("--served-model-name", MODEL_NAME, "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "2048", "--max-num-seqs", "8", "--kv-transfer-config", json.dumps(config)),
    )
    environment = servers.cpu_environment(os.environ, kv_cache_gib=1)
    # A role that is none of prefill and decode, so that the connector is the one given here.
    return servers.engine(name, role, str(model), arguments=arguments, environment=environment)


async def _complete(url: str, params: Mapping[str, Any] | None) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": params}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        return dict(await response.json())


async def _shares(server: Server, seconds: float) -> dict[str, float]:
    before = cpu_use.cpu_seconds(server.child.pid)
    started_s = time.monotonic()
    await asyncio.sleep(seconds)
    after = cpu_use.cpu_seconds(server.child.pid)
    wall_s = time.monotonic() - started_s
    return {part: (after[part] - before.get(part, 0.0)) / wall_s for part in after}


async def _sample(server: Server, params: Mapping[str, Any], seconds: float) -> list[Waiting]:
    """The engine at rest, then with one request that waits."""
    await _complete(server.url, None)
    await asyncio.sleep(SETTLE_S)
    rows = [_row(server, "idle", await _shares(server, seconds))]
    waiting = asyncio.create_task(_complete(server.url, params))
    await asyncio.sleep(SETTLE_S)
    rows.append(_row(server, "waiting", await _shares(server, seconds)))
    if waiting.done():
        raise ServerFailed(server.story("answered a request that was to wait"))
    waiting.cancel()
    return rows


def _row(server: Server, state: str, shares: Mapping[str, float]) -> Waiting:
    return Waiting(
        engine=server.spec.name,
        state=state,
        engine_core=shares.get(cpu_use.ENGINE_CORE, 0.0),
        worker=shares.get(cpu_use.WORKER, 0.0),
        api_server=shares.get(cpu_use.SERVER, 0.0),
    )


def measure_waiting(model: Path, seconds: float, logs: Path, console: Console) -> list[Waiting]:
    """One prefill engine for real transfer ids, then each decode engine by itself."""
    rows: list[Waiting] = []
    with processes.termination_as_interrupt(), LocalCluster(logs) as cluster:
        prefill = cluster.start(_engine("prefill", "source", model, json.loads(servers.transfer_config("prefill"))))
        with startup.progress(console, cluster) as show:
            cluster.wait_ready(on_poll=show)
        answer = asyncio.run(_complete(prefill.url, {"do_remote_decode": True}))
        # A transfer nobody has announced: prefill keeps its reader waiting for limits.UNKNOWN_TRANSFER_WAIT_S.
        params = {**answer["kv_transfer_params"], "transfer_id": "never-announced", "null_wait": True}
        for name, config in _configs().items():
            with LocalCluster(logs) as alone:
                decode = alone.start(_engine(name, "waiting", model, config))
                with startup.progress(console, alone) as show:
                    alone.wait_ready(on_poll=show)
                rows += asyncio.run(_sample(decode, params, seconds))
    return rows


def waiting(
    model: Path = typer.Option(Path("build/models/tiny-gqa"), help="Model folder; its size does not matter here."),
    seconds: float = typer.Option(10.0, min=1.0, max=20.0, help="Length of each sample."),
    json_path: Path = typer.Option(None, "--json", help="Write the figures to this file.", dir_okay=False),
) -> None:
    """CPU that a decode engine burns while a request waits for remote KV, ours beside vLLM's own share."""
    console = Console()
    try:
        rows = measure_waiting(model, seconds, Path("build/bench/logs"), console)
    except ServerFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_bytes(msgspec.json.encode(rows))
    table = Table("engine", "state", "EngineCore", "Worker", "API server", title="share of one core")
    for row in rows:
        table.add_row(row.engine, row.state, *(f"{share:.2f}" for share in (row.engine_core, row.worker, row.api_server)))
    console.print(table)
