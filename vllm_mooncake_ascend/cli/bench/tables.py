"""A report as tables for people. What is noise is shown as noise, with its range in grey."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from vllm_mooncake_ascend.cli.bench.report import Figure, Ratio, Report, compared
from vllm_mooncake_ascend.cli.bench.samples import figure_verdict, ratio_verdict

WIDTH = 128
"""Where the output is no terminal."""
_COLOURS = {"met": "green", "missed": "red", "open": "yellow", "noise": "dim"}


def number(value: float) -> str:
    """Three digits that count, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figures_table(figures: tuple[Figure, ...]) -> Table:
    table = Table("what", "case", "of", title="figures")
    for name in ("median", "quartiles"):
        table.add_column(name, justify="right")
    for name in ("unit", "goal", "verdict"):
        table.add_column(name)
    table.add_column("foreign cores", justify="right")
    for figure in figures:
        measure, spread = figure.measure, figure.spread
        quartiles = f"{number(spread.low_quartile)} - {number(spread.high_quartile)}"
        table.add_row(
            measure.name,
            measure.case,
            measure.subject,
            "[dim]noise[/dim]" if spread.noise else number(spread.median),
            f"[dim]{quartiles}[/dim]" if spread.noise else quartiles,
            f"{measure.unit} CPU" if measure.clock == "cpu" else measure.unit,
            str(measure.goal or ""),
            coloured(figure_verdict(spread, measure.goal)),
            f"{spread.foreign_cores:.2f}",
        )
    return table


def ratios_table(ratios: tuple[Ratio, ...]) -> Table:
    table = Table("what", "case", "ratio", title="ratios of interleaved pairs")
    for name in ("median", "95% interval"):
        table.add_column(name, justify="right")
    for name in ("goal", "verdict"):
        table.add_column(name)
    for ratio in ratios:
        above, below, spread = ratio.comparison.above, ratio.comparison.below, ratio.spread
        interval = f"{number(spread.low)} - {number(spread.high)}"
        table.add_row(
            above.name,
            above.case,
            compared(above, below),
            "[dim]noise[/dim]" if spread.noise else number(spread.median),
            f"[dim]{interval}[/dim]" if spread.noise else interval,
            str(ratio.comparison.goal or ""),
            coloured(ratio_verdict(spread, ratio.comparison.goal)),
        )
    return table


def coloured(verdict: str) -> str:
    colour = _COLOURS.get(verdict)
    return f"[{colour}]{verdict}[/{colour}]" if colour else verdict


def print_report(report: Report, console: Console) -> None:
    """Everything but the samples."""
    if not console.is_terminal and console.width < WIDTH:
        console = Console(width=WIDTH, file=console.file)
    for title, texts in (("versions", report.versions), ("machine", report.machine)):
        console.print(f"{title}: " + ", ".join(f"{name} {text}" for name, text in texts.items()), highlight=False)
    rules = report.rules
    console.print(
        f"{report.started_utc}, {report.seconds:.0f} s, seed {report.seed}; noise is: on the wall clock more than "
        f"{rules.max_foreign_cores:g} foreign cores around a sample, quartiles over {rules.max_spread:.0%} apart, an interval "
        f"wider than a factor of {rules.max_interval:g}",
        highlight=False,
    )
    if report.figures:
        console.print(figures_table(report.figures))
    if report.ratios:
        console.print(ratios_table(report.ratios))
    for note in report.notes:
        console.print(note, style="dim", highlight=False)
