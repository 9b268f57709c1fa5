"""A report's figures as bars, one SVG for each thing measured. Needs pygal, which only the extra `bench` installs."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

from vllm_mooncake_ascend.cli.bench.report import Figure, Report
from vllm_mooncake_ascend.errors import MooncakeAscendError

_FACTOR_FOR_LOGARITHM = 30.0
"""Bars of one plot that differ by more are drawn on a logarithmic scale."""


class PlotMissing(MooncakeAscendError):
    """There is nothing to plot with."""


def write_plots(report: Report, folder: Path) -> list[Path]:
    """One file for each name and unit; what is noise is left out. Returns the files.

    Raises:
        PlotMissing: pygal is not installed.
    """
    pygal = _pygal()
    folder.mkdir(parents=True, exist_ok=True)
    by_name: dict[tuple[str, str], list[Figure]] = {}
    for figure in report.figures:
        if not figure.spread.noise:
            by_name.setdefault((figure.measure.name, figure.measure.unit), []).append(figure)
    paths = []
    for (name, unit), figures in by_name.items():
        path = folder / f"{_slug(report.command)}-{_slug(name)}-{_slug(unit)}.svg"
        path.write_bytes(_chart(pygal, name, unit, figures).render())
        paths.append(path)
    return paths


def _pygal() -> Any:
    """The library, without the finder it adds to the interpreter for plugins of its own: that one warns at every later import
    of anything (3.1.3)."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ImportWarning)
            import pygal
    except ImportError as error:
        raise PlotMissing("plots need pygal: pip install 'vllm-mooncake-ascend[bench]'") from error
    sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "pygal"]
    return pygal


def _chart(pygal: Any, name: str, unit: str, figures: list[Figure]) -> Any:
    medians = [figure.spread.median for figure in figures]
    cases = list(dict.fromkeys(figure.measure.case for figure in figures))
    chart = pygal.Bar(
        title=f"{name} ({unit})",
        x_labels=cases,
        x_label_rotation=20,
        logarithmic=min(medians) > 0 and max(medians) > _FACTOR_FOR_LOGARITHM * min(medians),
        legend_at_bottom=True,
        js=[],
        height=420,
        width=900,
    )
    for subject in dict.fromkeys(figure.measure.subject for figure in figures):
        found = {figure.measure.case: figure.spread for figure in figures if figure.measure.subject == subject}
        chart.add(subject, [_bar(found.get(case)) for case in cases])
    return chart


def _bar(spread: Any) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {"value": spread.median, "ci": {"low": spread.low_quartile, "high": spread.high_quartile}}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
