"""`bench all`: one measurement after the other, each in a process of its own, and all of it in one folder:

    PART.json    the report, every sample included
    plots/       SVG of each figure
    page.md      all tables and plots

A part that fails does not keep the others from running; it is told at the end. So is one whose report is missing: the page
shows what was measured in this run and nothing older.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer

from vllm_mooncake_ascend.cli import processes
from vllm_mooncake_ascend.cli.bench import page, plot
from vllm_mooncake_ascend.cli.bench.report import Report

PARTS = ("micro", "transfer", "pool", "scale", "proxy", "hits", "pd")
"""Those that write a report; those that need quiet longest come last."""


def everything(
    parts: list[str] = typer.Option(PARTS, "--part", help="What to run; may be given again; all by default."),
    out: Path = typer.Option(Path("build/bench"), help="Folder for reports and plots.", file_okay=False),
    page_path: Path = typer.Option(None, "--page", help="The page of tables; OUT/page.md when not given.", dir_okay=False),
    arguments: list[str] = typer.Argument(None, help="Options for each part, behind a --, as in: --part pd -- --rounds 3"),
) -> None:
    """Run all measurements, or some: reports as JSON, plots, and one page of tables."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(PARTS)}", param_hint="--part")
    chosen = [part for part in PARTS if part in parts]
    ended = {}
    for part in chosen:
        typer.echo(f"bench {part}", err=True)
        ended[part] = _run(part, out, arguments or ())
    made = [out / f"{part}.json" for part in chosen if (out / f"{part}.json").is_file()]
    if made:
        _illustrate(made, out / "plots", page_path or out / "page.md")
    for part, code in ended.items():
        if code:
            typer.echo(f"error: bench {part} ended with {code}", err=True)
    raise typer.Exit(1 if any(ended.values()) else 0)


def _run(part: str, out: Path, arguments: Sequence[str]) -> int:
    """One part, to its end; what it prints is seen. Its report of an earlier run is gone first."""
    report_path = out / f"{part}.json"
    report_path.unlink(missing_ok=True)
    command = (sys.executable, "-m", "vllm_mooncake_ascend.cli.main", "bench", part, "--json", str(report_path), *arguments)
    with processes.termination_as_interrupt(), subprocess.Popen(command) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            # Ctrl-C reached it too, SIGTERM did not. It stops its servers before it ends.
            with processes.not_interrupted():
                child.terminate()
                child.wait()
            raise


def _illustrate(report_paths: Sequence[Path], plots: Path, page_path: Path) -> None:
    shutil.rmtree(plots, ignore_errors=True)
    try:
        for path in report_paths:
            plot.write_plots(msgspec.json.decode(path.read_bytes(), type=Report), plots)
    except plot.PlotMissing as error:
        typer.echo(f"no plots: {error}", err=True)
    page.page(list(report_paths), out=page_path, plots=plots)
    typer.echo(f"tables and plots: {page_path}")
