"""`serve`: become one vLLM server, by the command that works with the vLLM installed here."""

from __future__ import annotations

import os

import typer

from vllm_mooncake_ascend.cli import servers

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve(
    context: typer.Context,
    model: str = typer.Argument(help="Model folder or name."),
    role: str = typer.Option("", help="prefill or decode: adds our connector; leave out for a plain engine."),
) -> None:
    """Start one vLLM engine. What is not listed below goes to vLLM unchanged.

    Example: vllm-mooncake-ascend serve MODEL --role prefill --port 8100 --max-model-len 4096
    """
    arguments = list(context.args)
    if role and role not in servers.KV_ROLES:
        raise typer.BadParameter(f"{role!r}, expected {' or '.join(servers.KV_ROLES)}", param_hint="--role")
    if role and any(word.split("=")[0] == "--kv-transfer-config" for word in arguments):
        raise typer.BadParameter("cannot be combined with --kv-transfer-config, which says it all", param_hint="--role")
    if role:
        arguments += ["--kv-transfer-config", servers.transfer_config(role)]
    command = servers.serving_command(model, arguments)
    os.execv(command[0], command)


def register(app: typer.Typer) -> None:
    """Add `serve` to the command line."""
    app.command(context_settings=PASS_THROUGH)(serve)
