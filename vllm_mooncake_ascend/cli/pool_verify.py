"""`pool verify`: do the stored bytes equal a recomputation? Another process computes (`connectors.verify`); this one shows."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vllm_mooncake_ascend.cli import processes, servers
from vllm_mooncake_ascend.errors import MooncakeAscendError

CHILD = "vllm_mooncake_ascend.connectors.verify"
VERIFIER = "vllm_mooncake_ascend.connectors.pool_verifier"
POLL_S = 0.2
TABLE_WIDTH = 110


class VerifyFailed(MooncakeAscendError):
    """The engine that was to compute the prompts did not; the message has the end of its log."""


class PromptVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool holds of one prompt; as `connectors.pool_verifier.Verdict`, which only the other process can import."""

    namespace: str
    num_tokens: int
    num_objects: int
    in_pool: int
    equal: int
    close: int
    different: int
    unread: int
    max_difference: float | None
    """None: the values are of a type whose differences mean nothing."""
    reasons: tuple[str, ...]


def transfer_config(master: str, extra: Mapping[str, object]) -> str:
    """vLLM's `--kv-transfer-config` for the engine that computes. It lends no memory, loads nothing and saves nothing."""
    own = {"loads": False, "saves": False, "segment_bytes": 0, **({"master_address": master} if master else {})}
    # What an engine with both connectors in one has beside; its namespace is the same.
    settings = {key: value for key, value in extra.items() if key not in ("prefix_pooling", "save_decode")}
    config = {
        "kv_connector": "PoolVerifier",
        "kv_connector_module_path": VERIFIER,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {**settings, **own},
    }
    return json.dumps(config)


def prompts_of(texts: Sequence[str], file: Path | None) -> list[str]:
    """One JSON value for each prompt.

    Raises:
        typer.BadParameter: there is none, or a line of the file is not JSON.
    """
    lines = [json.dumps(text) for text in texts]
    for number, line in enumerate(file.read_text().splitlines() if file else (), 1):
        try:
            lines += [json.dumps(json.loads(line))] if line.strip() else []
        except json.JSONDecodeError as error:
            raise typer.BadParameter(f"{file}, line {number}: {error}", param_hint="--prompts") from error
    if not lines:
        raise typer.BadParameter("no prompt; give --prompt or --prompts", param_hint="--prompt")
    return lines


def compute(model: str, prompts: Sequence[str], arguments: Sequence[str], console: Console) -> list[PromptVerdict]:
    """Run the engine over all prompts.

    Raises:
        VerifyFailed: it did not get through.
    """
    with tempfile.TemporaryDirectory(prefix="pool-verify-") as name, processes.termination_as_interrupt():
        folder = Path(name)
        (folder / "prompts").write_text("\n".join(prompts))
        command = (sys.executable, "-m", CHILD, str(folder / "prompts"), str(folder / "verdicts"), "--model", model, *arguments)
        environment = {**os.environ, **servers.cpu_environment(os.environ), **servers.pool_environment(os.environ)}
        child = processes.start(command, environment=environment, log_path=folder / "log", placement=processes.Placement())
        try:
            with console.status(f"computing {len(prompts)} prompts; loading the model comes first"):
                while child.exit_code() is None:
                    time.sleep(POLL_S)
        finally:
            code = processes.stop_all([child])[child.pid]
        if code != 0:
            raise VerifyFailed(f"the engine ended with code {code}; the end of its log:\n{child.log_tail(30)}")
        return msgspec.json.decode((folder / "verdicts").read_bytes(), type=list[PromptVerdict])


def verify(
    context: typer.Context,
    model: str = typer.Option(..., help="Model folder or name, as the engines of the pool have it."),
    prompt: list[str] = typer.Option([], help="A prompt that some engine has computed and saved; may be repeated."),
    prompts: Path | None = typer.Option(
        None, exists=True, dir_okay=False, help="File of prompts, one JSON value a line: a text, chat messages, or token ids."
    ),
    master: str = typer.Option("", metavar="HOST:PORT", help="The pool's master; left out: as for `pool stat`."),
    kv_transfer_config: str = typer.Option("", help="The engines' own (JSON), for settings of the pool such as tenant."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of the table."),
) -> None:
    """Compute prompts anew and compare them with what the pool holds of them, block by block. Ends with 1 if any block differs.

    Nothing is loaded and nothing saved. What is not listed below goes to vLLM unchanged; give what the engines have: dtype,
    block size and the like decide what is theirs. CPU only, one worker.

    Example: vllm-mooncake-ascend pool verify --model MODEL --master 10.0.0.1:50051 --prompts prompts.jsonl --dtype float32
    """
    from vllm_mooncake_ascend.cli.doctor import settings_of

    lines = prompts_of(prompt, prompts)
    extra = settings_of(kv_transfer_config)[1] or {}
    arguments = ("--kv-transfer-config", transfer_config(master, extra), "--enforce-eager", *context.args)
    try:
        verdicts = compute(model, lines, arguments, Console(stderr=True))
    except VerifyFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        print(msgspec.json.encode(verdicts).decode())
    else:
        _print(verdicts)
    raise typer.Exit(int(any(verdict.different for verdict in verdicts)))


def table_of(verdicts: Sequence[PromptVerdict]) -> Table:
    """One row for each prompt."""
    table = Table(title=f"namespace {verdicts[0].namespace}")
    for heading in ("prompt", "tokens", "objects", "in pool", "equal", "close", "different", "unread", "largest difference"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, verdict in enumerate(verdicts, 1):
        different = f"[bold red]{verdict.different}[/bold red]" if verdict.different else "0"
        table.add_row(
            str(number),
            f"{verdict.num_tokens:,}",
            str(verdict.num_objects),
            str(verdict.in_pool),
            str(verdict.equal),
            str(verdict.close),
            different,
            str(verdict.unread),
            "?" if verdict.max_difference is None else f"{verdict.max_difference:.2g}",
        )
    return table


def _print(verdicts: Sequence[PromptVerdict]) -> None:
    console = Console()
    if console.width < TABLE_WIDTH:
        console = Console(width=TABLE_WIDTH)
    console.print(table_of(verdicts))
    for reason in dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons):
        console.print(reason, style="yellow", markup=False)
