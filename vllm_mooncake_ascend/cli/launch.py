"""`launch`: prefill engines, decode engines and the proxy on this host, on ports that nobody has to choose; with a prefix pool
between them if wanted."""

from __future__ import annotations

import enum
import json
import os
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from vllm_mooncake_ascend.cli import processes, servers, startup
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, Server, ServerFailed
from vllm_mooncake_ascend.cli.serve import DEFAULT_SEGMENT


class TransferMode(str, enum.Enum):
    """The choices of `--transfer-mode`; meanings stand in `config.keys`."""

    after_prefill = "after_prefill"
    stream = "stream"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to launch."""

    model: str
    num_prefill: int
    num_decode: int
    arguments: tuple[str, ...]
    prefill_environment: dict[str, str] = {}
    decode_environment: dict[str, str] = {}
    pool_segment: str = ""
    """Memory that each worker lends to a prefix pool, with its unit. Empty: no pool."""
    pool_master: str = ""
    """`host:port` of the pool's master. Empty: one is started if there is a pool."""
    streams: bool = False
    """Decode reads while prefill computes, and the proxy asks both at once."""

    def with_master(self, address: str) -> Plan:
        """The same with this master."""
        return msgspec.structs.replace(self, pool_master=address)


def engine_specs(plan: Plan, *, cpus: frozenset[int], cpu_environment: dict[str, str]) -> list[servers.ServerSpec]:
    """The engines of `plan` on a host with `cpus`. A plan with a pool must know the pool's master."""
    assert bool(plan.pool_segment) == bool(plan.pool_master)
    placed = servers.placements(cpus, plan.num_prefill + plan.num_decode)

    def extra(role: str) -> dict[str, object]:
        pool = servers.pool_settings(role, plan.pool_master, plan.pool_segment) if plan.pool_master else {}
        return {**pool, "transfer_mode": "stream"} if plan.streams else pool

    roles = (
        ("prefill", plan.num_prefill, plan.prefill_environment),
        ("decode", plan.num_decode, plan.decode_environment),
    )
    return [
        servers.engine(
            f"{role}-{index}",
            role,
            plan.model,
            arguments=plan.arguments,
            environment={**cpu_environment, **environment},
            placement=placed.get(role),
            extra=extra(role),
        )
        for role, count, environment in roles
        for index in range(count)
    ]


def start_master(cluster: LocalCluster, console: Console) -> Server:
    """Start the master of a prefix pool and wait for it: engines must know its address."""
    master = cluster.start(servers.master())
    with startup.progress(console, cluster) as show:
        cluster.wait_ready(on_poll=show)
    return master


def pool_options(master: Server) -> str:
    """How `pool` finds this master."""
    return f"--master {master.rpc_address} --metrics {master.url.removeprefix('http://')}"


def bring_up(cluster: LocalCluster, specs: list[servers.ServerSpec], console: Console, *, streams: bool = False) -> None:
    """Start the engines, wait for them, then start the proxy before them and wait for it."""
    for spec in specs:
        cluster.start(spec)
    with startup.progress(console, cluster) as show:
        cluster.wait_ready(on_poll=show)
        urls = ([server.url for server in cluster.with_role(role)] for role in servers.KV_ROLES)
        cluster.start(servers.proxy(*urls, arguments=("--flow", "concurrent") if streams else ()))
        cluster.wait_ready(on_poll=show)


def as_json(cluster: LocalCluster) -> str:
    """The running servers as one line of JSON."""
    rows = [
        {
            "name": server.spec.name,
            "role": server.spec.role,
            "url": server.url,
            "rpc_address": server.rpc_address if server.rpc_port else None,
            "pid": server.child.pid,
            "ready_seconds": server.ready_after_s,
            "log": str(server.child.log_path),
        }
        for server in cluster.servers
    ]
    return json.dumps({"servers": rows})


def launch(
    context: typer.Context,
    model: str = typer.Argument(help="Model folder or name."),
    prefill: int = typer.Option(1, min=1, help="Number of prefill engines."),
    decode: int = typer.Option(1, min=1, help="Number of decode engines."),
    prefix_pooling: bool = typer.Option(
        False, "--prefix-pooling", help="Share prefixes between all engines through a pool; starts the pool's master too."
    ),
    pool_master: str = typer.Option(
        "", metavar="HOST:PORT", help="Share prefixes through the pool with this master, and start none."
    ),
    transfer_mode: TransferMode = typer.Option(
        TransferMode.after_prefill,
        help="When decode reads: once prefill has ended, or what prefill has computed while it computes the rest.",
    ),
    pool_segment: str = typer.Option(DEFAULT_SEGMENT, metavar="SIZE", help="Memory each worker lends to the pool."),
    prefill_env: list[str] = typer.Option([], help="KEY=VALUE for the prefill engines only; may be repeated."),
    decode_env: list[str] = typer.Option([], help="KEY=VALUE for the decode engines only; may be repeated."),
    logs: Path = typer.Option(Path("build/logs"), help="Folder for the log of each server."),
    as_json_line: bool = typer.Option(False, "--json", help="Print one line of JSON when all are ready, and nothing else."),
) -> None:
    """Start prefill engines, decode engines and the proxy on this host; Ctrl-C stops them all.

    What is not listed below goes to every vLLM engine unchanged.

    Example: vllm-mooncake-ascend launch MODEL --decode 2 --max-model-len 4096
    """
    plan = Plan(
        model=model,
        num_prefill=prefill,
        num_decode=decode,
        arguments=tuple(context.args),
        prefill_environment=environment_option(prefill_env, "--prefill-env"),
        decode_environment=environment_option(decode_env, "--decode-env"),
        pool_segment=pool_segment if prefix_pooling or pool_master else "",
        pool_master=pool_master,
        streams=transfer_mode is TransferMode.stream,
    )
    console = Console(stderr=as_json_line, quiet=as_json_line)
    try:
        with processes.termination_as_interrupt(), LocalCluster(logs) as cluster:
            _run(cluster, plan, console)
            if as_json_line:
                print(as_json(cluster), flush=True)
            console.print(startup.server_table(cluster))
            for master in cluster.with_role(servers.MASTER):
                console.print(f"look into the pool: vllm-mooncake-ascend pool stat {pool_options(master)}", soft_wrap=True)
            console.print(f"send requests to {cluster.with_role('proxy')[0].url}/v1 ; Ctrl-C stops everything")
            cluster.watch()
    except ServerFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        console.print("all servers have been stopped")


def _run(cluster: LocalCluster, plan: Plan, console: Console) -> None:
    """Start all that `plan` asks for."""
    if plan.pool_segment and not plan.pool_master:
        plan = plan.with_master(start_master(cluster, console).rpc_address)
    environment = servers.cpu_environment(os.environ)
    if plan.pool_master:
        environment |= servers.pool_environment(os.environ)
    specs = engine_specs(plan, cpus=frozenset(os.sched_getaffinity(0)), cpu_environment=environment)
    bring_up(cluster, specs, console, streams=plan.streams)


def environment_option(assignments: list[str], option: str) -> dict[str, str]:
    """KEY=VALUE words as a mapping."""
    pairs = [word.partition("=") for word in assignments]
    for word, (key, separator, _) in zip(assignments, pairs, strict=True):
        if not key or not separator:
            raise typer.BadParameter(f"{word!r} is not KEY=VALUE", param_hint=option)
    return {key: value for key, _, value in pairs}


def register(app: typer.Typer) -> None:
    """Add `launch` to the command line."""
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(launch)
