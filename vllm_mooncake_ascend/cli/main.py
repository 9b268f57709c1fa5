"""Entry point of `vllm-mooncake-ascend` (short: `vma`).

Each command lives in a module of its own with a function `register(app)`. A module imports at its top only what is cheap
and always there; vLLM, torch and Mooncake are reached, if at all, when the command runs. A module that cannot be imported
takes only its own command away: the others, above all the doctor, go on working on a broken machine.
"""

from __future__ import annotations

import importlib
import sys

import typer

from vllm_mooncake_ascend._version import __version__

COMMANDS = {
    "demo": "show the transfer at work on this machine",
    "launch": "start a prefill/decode set on this host",
    "serve": "start one vLLM engine",
    "proxy": "route requests over prefill and decode engines",
    "doctor": "check this machine",
    "bench": "measure on this machine",
    "pool": "look into a prefix pool",
}
"""Command -> what it is for. The command `x` is registered by the module `vllm_mooncake_ascend.cli.x`."""


def build_app() -> typer.Typer:
    """The command line with all its commands."""
    app = typer.Typer(
        name="vllm-mooncake-ascend",
        help="KV-cache transfer between vLLM engines over Mooncake.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name in COMMANDS:
        _register(app, name)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and end.", callback=_print_version, is_eager=True),
) -> None:
    pass


def _register(app: typer.Typer, name: str) -> None:
    """Add one command, or in its place one that tells why it is missing."""
    try:
        importlib.import_module(f"vllm_mooncake_ascend.cli.{name}").register(app)
    except ImportError as error:
        reason = f"`{name}` cannot run here: {error}. Install what is missing, or run `vllm-mooncake-ascend doctor`."

        def unavailable() -> None:
            print(reason, file=sys.stderr)
            raise typer.Exit(2)

        app.command(name, help=f"({COMMANDS[name]}: not available here, {error})")(unavailable)


def main() -> None:
    """Run the command line."""
    build_app()()


if __name__ == "__main__":
    main()
