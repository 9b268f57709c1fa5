"""`doctor`: why does it not start here? Runs on machines where nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from vllm_mooncake_ascend.cli.doctor_checks import Finding, diagnose
from vllm_mooncake_ascend.cli.doctor_facts import Facts, gather
from vllm_mooncake_ascend.cli.doctor_pool import STORE_CONNECTOR, findings_of, look_at, pool_config
from vllm_mooncake_ascend.cli.master_http import DEFAULT_PORT
from vllm_mooncake_ascend.errors import ConfigError

STYLES = {"ok": "green", "warning": "yellow", "error": "bold red", "skipped": "dim"}


def doctor(
    quick: bool = typer.Option(False, "--quick", help="Do not try the imports of vLLM and Mooncake, which take some seconds."),
    kv_transfer_config: str = typer.Option("", help="Check this --kv-transfer-config (JSON) too, and the pool it names."),
    pool_metrics: str = typer.Option(
        "", metavar="HOST:PORT", help=f"Metrics port of the pool's master; left out: port {DEFAULT_PORT} of its host."
    ),
    pool_lease: bool = typer.Option(
        False,
        "--pool-lease",
        help="Measure the object lease of the pool's master: puts a small object, takes as long as it is.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the findings as JSON."),
) -> None:
    """Check whether engines with our connector can run on this machine; ends with 1 when something must be mended."""
    connector, extra_config = settings_of(kv_transfer_config)
    with Console(stderr=True).status("looking at this machine"):
        facts = gather(os.environ, quick=quick)
        of_transfers = None if connector == STORE_CONNECTOR else extra_config
        findings = diagnose(facts, extra_config=of_transfers, read_text=lambda name: Path(name).read_text())
        if not any(finding.check == "settings" and finding.state == "error" for finding in findings):
            findings += _pool_findings(facts, connector, extra_config or {}, pool_metrics, measures_lease=pool_lease)
    if as_json:
        print(json.dumps({"findings": msgspec.to_builtins(findings)}))
    else:
        Console().print(table_of(findings))
    raise typer.Exit(int(any(finding.state == "error" for finding in findings)))


def settings_of(text: str) -> tuple[str, dict[str, object] | None]:
    """`kv_connector` and `kv_connector_extra_config` of a `--kv-transfer-config`; None when no text was given."""
    if not text:
        return "", None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--kv-transfer-config") from error
    extra = config.get("kv_connector_extra_config", {}) if isinstance(config, dict) else None
    if not isinstance(extra, dict):
        raise typer.BadParameter("must be an object, kv_connector_extra_config too", param_hint="--kv-transfer-config")
    return str(config.get("kv_connector", "")), extra


def _pool_findings(
    facts: Facts, connector: str, extra_config: dict[str, object], metrics: str, *, measures_lease: bool
) -> list[Finding]:
    """About the pool that the settings or the environment name; none where they name none."""
    try:
        config = pool_config(connector, extra_config, os.environ, device_type=facts.device_type)
    except ConfigError as error:
        return [Finding(check="pool settings", state="error", seen=str(error), remedy="see docs/configuration.md")]
    if config is None:
        return []
    master = look_at(config, metrics)
    if not measures_lease or master.connect_error:
        return findings_of(config, master)
    from vllm_mooncake_ascend.cli.doctor_lease import measure_lease

    return findings_of(config, master, measure_lease(config))


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
