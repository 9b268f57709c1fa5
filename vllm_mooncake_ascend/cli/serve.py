"""`serve`: become one vLLM server, by the command that works with the vLLM installed here."""

from __future__ import annotations

import os

import typer

from vllm_mooncake_ascend.cli import servers

DEFAULT_SEGMENT = "1GB"
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    model: str = typer.Argument(help="Model folder or name."),
    role: str = typer.Option("", help="prefill, decode or pool: adds our connector; leave out for a plain engine."),
    pool_master: str = typer.Option(
        "", metavar="HOST:PORT", help="Share prefixes through the pool with this master (pool: else as MOONCAKE_MASTER says)."
    ),
    pool_segment: str = typer.Option(
        DEFAULT_SEGMENT, metavar="SIZE", help="With --pool-master: memory each worker lends to the pool."
    ),
) -> None:
    """Start one vLLM engine. What is not listed below goes to vLLM unchanged.

    Example: vllm-mooncake-ascend serve MODEL --role prefill --port 8100 --max-model-len 4096
    """
    arguments = list(context.args)
    if role and role not in servers.CONNECTORS:
        raise typer.BadParameter(f"{role!r}, expected {' or '.join(servers.CONNECTORS)}", param_hint="--role")
    if pool_master and not role:
        raise typer.BadParameter("needs --role: a plain engine has no connector", param_hint="--pool-master")
    if role and any(word.split("=")[0] == "--kv-transfer-config" for word in arguments):
        raise typer.BadParameter("cannot be combined with --kv-transfer-config, which says it all", param_hint="--role")
    if role:
        extra = servers.pool_settings(role, pool_master, pool_segment) if pool_master else None
        arguments += ["--kv-transfer-config", servers.transfer_config(role, extra)]
    if role == servers.POOL or pool_master:
        os.environ.update(servers.pool_environment(os.environ))
    command = servers.serving_command(model, arguments)
    os.execv(command[0], command)


def register(app: typer.Typer) -> None:
    """Add `serve` to the command line."""
    app.command(context_settings=PASS_THROUGH)(serve)
