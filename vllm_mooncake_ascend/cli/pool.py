"""`pool`: what is in a prefix pool, whether it is right (`pool_verify`), and dropping one namespace of it.

The master is found as engines find it: `--master`, else `mooncake.json`, else MOONCAKE_MASTER.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vllm_mooncake_ascend.cli import master_http, pool_census, pool_clear
from vllm_mooncake_ascend.cli.master_http import MasterHttp, metrics_address
from vllm_mooncake_ascend.cli.pool_census import Census
from vllm_mooncake_ascend.cli.pool_clear import Cleared
from vllm_mooncake_ascend.cli.pool_verify import verify
from vllm_mooncake_ascend.cli.serve import PASS_THROUGH
from vllm_mooncake_ascend.config import PoolConfig, parse_pool
from vllm_mooncake_ascend.errors import MooncakeAscendError

NAMESPACE = re.compile("[0-9a-f]{32}")
MASTER = typer.Option(
    "",
    metavar="HOST:PORT",
    help="The pool's master; left out: as mooncake.json (MOONCAKE_CONFIG_PATH) or MOONCAKE_MASTER says.",
)
METRICS = typer.Option(
    "", metavar="HOST:PORT", help=f"The master's metrics port; left out: port {master_http.DEFAULT_PORT} of the master's host."
)
JSON = typer.Option(False, "--json", help="Print JSON instead of the table.")


def stat(
    master: str = MASTER,
    metrics: str = METRICS,
    namespace: str = typer.Option("", help="End with 1 if the pool holds nothing of this one. Engines log theirs at start."),
    as_json: bool = JSON,
) -> None:
    """What is in the pool: how much, whose, in whose memory. Grants no object lease, so it keeps nothing from eviction.

    Example: vllm-mooncake-ascend pool stat --master 10.0.0.1:50051
    """
    wanted = _checked_namespace(namespace)
    try:
        found = take_census(MasterHttp(metrics or metrics_address(settings(master, os.environ).master_address)))
    except MooncakeAscendError as error:
        _fail(error)
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _print_census(found, wanted)
    raise typer.Exit(int(bool(wanted) and not found.objects_of(wanted)))


def clear(
    master: str = MASTER,
    metrics: str = METRICS,
    namespace: str = typer.Option(..., help="What to drop, as `pool stat` and the engines' logs name it."),
    yes: bool = typer.Option(False, "--yes", help="Do not ask."),
    as_json: bool = JSON,
) -> None:
    """Drop one namespace from the pool, nobody else's. Objects under an object lease stay; ends with 1 if any did.

    Example: vllm-mooncake-ascend pool clear --master 10.0.0.1:50051 --namespace 0123456789abcdef0123456789abcdef
    """
    wanted = _checked_namespace(namespace)
    try:
        config = settings(master, os.environ)
        listed = MasterHttp(metrics or metrics_address(config.master_address)).keys()
        keys = pool_clear.keys_of_namespace(listed, wanted)
        if keys and not yes:
            typer.confirm(f"drop {len(keys)} objects of namespace {wanted}?", abort=True, err=True)
        cleared = _clear(config, keys, wanted) if keys else Cleared()
    except MooncakeAscendError as error:
        _fail(error)
    if as_json:
        print(msgspec.json.encode(cleared).decode())
    else:
        _print_cleared(cleared)
    raise typer.Exit(0 if cleared.is_complete else 1)


def settings(master: str, environ: Mapping[str, str]) -> PoolConfig:
    """Which pool, read and checked as the engines read it.

    Raises:
        ConfigError: no master is named, or a setting is wrong.
    """
    options = {"master_address": master} if master else {}
    # Our client moves no bytes and nobody calls it, so neither device nor address of this machine matters.
    config, _ = parse_pool(
        options, environ, device_type="cpu", default_host="127.0.0.1", read_text=lambda name: Path(name).read_text()
    )
    return config


def take_census(master: MasterHttp) -> Census:
    """Ask one master for all that `stat` shows.

    Raises:
        MasterUnreachable: it does not answer.
    """
    shards, num_others = pool_census.shards_of(master.keys())
    return pool_census.census(
        shards,
        num_others,
        sizes=master.sizes([shard.sample for shard in shards.values()]),
        totals=master.totals(),
        segments=master.segments(),
    )


def _clear(config: PoolConfig, keys: list[str], namespace: str) -> Cleared:
    from vllm_mooncake_ascend.engines.native_store import StoreSettings
    from vllm_mooncake_ascend.engines.store import MooncakeStore

    store = MooncakeStore(
        StoreSettings(
            host=config.host,
            protocol=config.protocol,
            master_address=config.master_address,
            segment_bytes=0,
            device_name=config.device_name,
            tenant=config.tenant,
        )
    )
    store.connect()
    try:
        with Console(stderr=True).status("removing") as status:
            return pool_clear.clear(
                store, keys, namespace=namespace, on_progress=lambda done: status.update(f"{done:,} of {len(keys):,} done")
            )
    finally:
        store.close()


def _checked_namespace(text: str) -> str:
    if text and not NAMESPACE.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not a namespace: 32 hex digits", param_hint="--namespace")
    return text


def _fail(error: MooncakeAscendError) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2) from error


def _print_census(found: Census, wanted: str) -> None:
    console = Console()
    console.print(
        f"{found.num_objects:,} objects, {_megabytes(found.used_bytes)} of {_megabytes(found.capacity_bytes)} MB used, "
        f"{found.evicted_objects:,} objects evicted since the master started"
    )
    table = Table("namespace", title="whose")
    for heading in ("objects", "shards", "MB"):
        table.add_column(heading, justify="right")
    for holding in found.namespaces:
        size = "?" if holding.num_bytes is None else _megabytes(holding.num_bytes)
        table.add_row(holding.namespace, f"{holding.num_objects:,}", str(holding.num_shards), size)
    if found.num_others:
        table.add_row("others", f"{found.num_others:,}", "", "")
    console.print(table)
    where = Table("segment", "state", title="in whose memory")
    for heading in ("MB used", "MB"):
        where.add_column(heading, justify="right")
    for segment in found.segments:
        where.add_row(segment.name, segment.status, _megabytes(segment.used_bytes), _megabytes(segment.capacity_bytes))
    console.print(where)
    if wanted:
        console.print(f"namespace {wanted}: {found.objects_of(wanted):,} objects")


def _print_cleared(cleared: Cleared) -> None:
    print(f"{cleared.removed:,} removed, {cleared.gone:,} gone before, {cleared.in_use:,} in use, {cleared.unknown:,} unknown")
    for reason in cleared.reasons:
        print(reason)


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def register(app: typer.Typer) -> None:
    """Add `pool` with its commands to the command line."""
    pool = typer.Typer(help="Look into a prefix pool, and drop what is ours.", no_args_is_help=True)
    pool.command()(stat)
    pool.command(context_settings=PASS_THROUGH)(verify)
    pool.command()(clear)
    app.add_typer(pool, name="pool")
