"""`bench page`: reports of earlier runs as one page of Markdown, for the documentation. Measures nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import typer

from vllm_mooncake_ascend.cli.bench.report import Figure, Ratio, Report, compared
from vllm_mooncake_ascend.cli.bench.samples import figure_verdict, ratio_verdict
from vllm_mooncake_ascend.cli.bench.tables import number


def page(
    reports: list[Path] = typer.Argument(help="Files that `bench ... --json` wrote.", exists=True, dir_okay=False),
    out: Path = typer.Option(..., help="The page to write.", dir_okay=False),
    plots: Path = typer.Option(None, help="Folder with the plots of these runs, to be shown on the page.", file_okay=False),
) -> None:
    """Make a page of Markdown of reports that `bench` wrote as JSON."""
    try:
        read = [msgspec.json.decode(path.read_bytes(), type=Report) for path in reports]
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"not a report of bench: {error}") from error
    pictures = sorted(plots.glob("*.svg")) if plots is not None else []
    links = [Path(os.path.relpath(path, out.parent)) for path in pictures]
    reading = "[benchmarks](benchmarks.md)" if (out.parent / "benchmarks.md").is_file() else "docs/benchmarks.md of the project"
    out.write_text("\n".join(page_of(read, links, reading)) + "\n", encoding="utf-8")


def page_of(reports: Sequence[Report], pictures: Sequence[Path], reading: str) -> Iterator[str]:
    """Its lines. What is noise has no number. `reading`: where it is told how to read it."""
    yield "# One run of the benchmarks"
    yield ""
    yield f"Made by `vllm-mooncake-ascend bench`; do not edit. How to read it: {reading}."
    for report in reports:
        yield from _section(report)
        slug = report.command.replace(" ", "-")
        for picture in pictures:
            if picture.name.startswith(f"{slug}-"):
                yield f"![{picture.stem}]({picture.as_posix()})"
                yield ""


def _section(report: Report) -> Iterator[str]:
    yield from ("", f"## {report.command}", "")
    for texts in (report.versions, report.machine):
        yield ", ".join(f"{name} {text}" for name, text in texts.items()) + "."
    num_noise = sum(bool(figure.spread.noise) for figure in report.figures)
    yield (
        f"{report.started_utc}, {report.seconds:.0f} s, seed {report.seed}. "
        f"{num_noise} of {len(report.figures)} figures are noise and have no number."
    )
    if report.figures:
        yield from ("", "| what | case | of | median | quartiles | unit | goal | verdict | foreign cores |")
        yield "|---|---|---|---:|---:|---|---|---|---:|"
        yield from (_figure_row(figure) for figure in report.figures)
    if report.ratios:
        yield from ("", "| what | case | ratio | median | 95% interval | goal | verdict |", "|---|---|---|---:|---:|---|---|")
        yield from (_ratio_row(ratio) for ratio in report.ratios)
    yield ""
    for note in report.notes:
        yield f"- {note}"
    if report.notes:
        yield ""


def _figure_row(figure: Figure) -> str:
    measure, spread = figure.measure, figure.spread
    cells = (
        measure.name,
        measure.case,
        measure.subject,
        "" if spread.noise else number(spread.median),
        "" if spread.noise else f"{number(spread.low_quartile)} - {number(spread.high_quartile)}",
        f"{measure.unit} CPU" if measure.clock == "cpu" else measure.unit,
        str(measure.goal or ""),
        figure_verdict(spread, measure.goal),
        f"{spread.foreign_cores:.2f}",
    )
    return _row(cells)


def _ratio_row(ratio: Ratio) -> str:
    above, below, spread = ratio.comparison.above, ratio.comparison.below, ratio.spread
    cells = (
        above.name,
        above.case,
        compared(above, below),
        "" if spread.noise else number(spread.median),
        "" if spread.noise else f"{number(spread.low)} - {number(spread.high)}",
        str(ratio.comparison.goal or ""),
        ratio_verdict(spread, ratio.comparison.goal),
    )
    return _row(cells)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
