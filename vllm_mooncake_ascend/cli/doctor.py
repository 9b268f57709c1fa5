"""`doctor`: why does it not start here? Runs on machines where nothing else does."""

from __future__ import annotations

import json
import os

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vllm_mooncake_ascend.cli.doctor_checks import Finding, diagnose
from vllm_mooncake_ascend.cli.doctor_facts import gather

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def doctor(
    quick: bool = typer.Option(False, "--quick", help="Do not try the imports of vLLM and Mooncake, which take some seconds."),
    kv_transfer_config: str = typer.Option("", help="Check this --kv-transfer-config (JSON) too."),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Check whether engines with our connector can run on this machine; ends with 1 when something must be mended."""
    extra_config = extra_config_of(kv_transfer_config)
    with Console(stderr=True).status("looking at this machine"):
        findings = diagnose(gather(os.environ, quick=quick), extra_config=extra_config)
    if as_json:
        print(json.dumps({"findings": msgspec.to_builtins(findings)}))
    else:
        Console().print(table_of(findings))
    raise typer.Exit(int(any(finding.state == "error" for finding in findings)))


def extra_config_of(text: str) -> dict[str, object] | None:
    """`kv_connector_extra_config` of a `--kv-transfer-config`; None when no text was given."""
    if not text:
        return None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--kv-transfer-config") from error
    extra = config.get("kv_connector_extra_config", {}) if isinstance(config, dict) else None
    if not isinstance(extra, dict):
        raise typer.BadParameter("must be an object, kv_connector_extra_config too", param_hint="--kv-transfer-config")
    return extra


def table_of(findings: list[Finding]) -> Table:
    """The findings for people."""
    table = Table("check", "state", title="vllm-mooncake-ascend doctor")
    for heading in ("seen", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        state = f"[{STYLES[finding.state]}]{finding.state}[/]"
        table.add_row(finding.check, state, finding.seen.replace("[", "("), finding.remedy)
    return table


def register(app: typer.Typer) -> None:
    """Add `doctor` to the command line."""
    app.command()(doctor)
