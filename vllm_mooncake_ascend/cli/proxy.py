"""`proxy`: one URL before prefill and decode engines."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import typer

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.config import keys, parse_p2p
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.proxy.service import run_proxy
from vllm_mooncake_ascend.proxy.settings import ProxySettings


class OnPrefillUnavailable(str, enum.Enum):
    """The choices of `--on-prefill-unavailable`."""

    fail = "fail"
    local = "local"


class FlowChoice(str, enum.Enum):
    """The choices of `--flow`."""

    sequential = "sequential"
    concurrent = "concurrent"


def proxy(
    prefill: list[str] = typer.Option(..., help="URL of a prefill engine; may be repeated."),
    decode: list[str] = typer.Option(..., help="URL of a decode engine; may be repeated."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on; 0.0.0.0 or :: for all."),
    port: int = typer.Option(8000, min=0, max=65_535, help="Port to listen on; 0 takes a free one."),
    on_prefill_unavailable: OnPrefillUnavailable = typer.Option(
        OnPrefillUnavailable.fail,
        help="When no prefill engine serves a request: answer an error, or let decode compute the prompt.",
    ),
    flow: FlowChoice = typer.Option(
        FlowChoice.sequential,
        help="Send a request to decode once prefill has answered, or to both at once, so that decode may read the KV while "
        "prefill computes (with transfer_mode=stream on both).",
    ),
    silence_timeout_s: float = typer.Option(
        limits.UPSTREAM_SILENCE_S, help="An engine, or a client, that keeps still for this long is given up."
    ),
    drain_timeout_s: float = typer.Option(limits.DRAIN_S, help="On SIGTERM, running requests have this long to end."),
    cluster_secret_file: Path | None = typer.Option(
        None, help=f"File with the engines' cluster secret; {keys.SECRET_VARIABLE} stands for it too."
    ),
) -> None:
    """Serve /v1/completions and /v1/chat/completions over prefill and decode engines.

    Example: vllm-mooncake-ascend proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200 --host 0.0.0.0
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        settings = ProxySettings(
            prefill_urls=tuple(prefill),
            decode_urls=tuple(decode),
            host=host,
            port=port,
            on_prefill_unavailable=on_prefill_unavailable.value,
            silence_s=silence_timeout_s,
            drain_s=drain_timeout_s,
            cluster_secret=_cluster_secret(os.environ, cluster_secret_file),
            flow=flow.value,
        )
        run_proxy(settings, on_ready=lambda url: print(f"proxy listens on {url}", flush=True))
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def register(app: typer.Typer) -> None:
    """Add `proxy` to the command line."""
    app.command()(proxy)


def _cluster_secret(environ: Mapping[str, str], path: Path | None) -> bytes | None:
    """The secret, read and checked as the engines read it."""
    options = {} if path is None else {"cluster_secret_file": str(path)}
    given = {name: environ[name] for name in (keys.SECRET_VARIABLE,) if name in environ}
    config, _ = parse_p2p(
        options, given, device_type="cpu", default_host="127.0.0.1", read_text=lambda name: Path(name).read_text()
    )
    return config.secret
