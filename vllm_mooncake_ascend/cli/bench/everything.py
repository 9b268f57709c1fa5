"""`bench all`: one measurement after the other, each in a process of its own, and all of it in one folder:

    PART.json    the report, every sample included
    page.md      all tables and plots; or wherever it is wanted
    plots/       SVG of each figure, beside the page

A part that fails does not keep the others from running; it is told at the end, as is one that wrote no report. The page shows
what was measured in this run and nothing older; after Ctrl-C, what was measured until then.
"""

from __future__ import annotations

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
    out: Path = typer.Option(Path("build/bench"), help="Folder for the reports.", file_okay=False),
    page_path: Path = typer.Option(
        None, "--page", help="The page of tables, with plots in a folder beside it; OUT/page.md when not given.", dir_okay=False
    ),
    arguments: list[str] = typer.Argument(None, help="Options for each part, behind a --, as in: --part pd -- --rounds 3"),
) -> None:
    """Run all measurements, or some: reports as JSON, plots, and one page of tables."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are {', '.join(PARTS)}", param_hint="--part")
    page_path = page_path or out / "page.md"
    page_path.parent.mkdir(parents=True, exist_ok=True)
    problems = []
    done: list[Path] = []
    try:
        for part in (one for one in PARTS if one in parts):
            typer.echo(f"bench {part}", err=True)
            report_path = out / f"{part}.json"
            code = _run(part, report_path, arguments or ())
            done += [report_path] if report_path.is_file() else []
            if code or not report_path.is_file():
                problems.append(f"bench {part} ended with {code}" + ("" if report_path.is_file() else ", and without a report"))
    except KeyboardInterrupt:
        problems.append("interrupted")
    if done:
        _illustrate(done, page_path)
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    raise typer.Exit(1 if problems else 0)


def _run(part: str, report_path: Path, arguments: Sequence[str]) -> int:
    """One part, to its end; what it prints is seen. Its report of an earlier run is gone first."""
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


def _illustrate(report_paths: Sequence[Path], page_path: Path) -> None:
    plots = page_path.parent / "plots"
    for path in report_paths:
        for old in plots.glob(f"bench-{path.stem}-*.svg"):
            old.unlink()
    try:
        for path in report_paths:
            plot.write_plots(msgspec.json.decode(path.read_bytes(), type=Report), plots)
    except plot.PlotMissing as error:
        typer.echo(f"no plots: {error}", err=True)
    page.page(list(report_paths), out=page_path, plots=plots)
    typer.echo(f"tables and plots: {page_path}")
