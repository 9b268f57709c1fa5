"""Statistics of a stretch of time as one plain dict: what vLLM pickles, merges over ranks and time, and logs.

    {"counters": {name: {label value or "": sum}}, "gauges": {name: last value}, "histograms": {name: [observations]}}

An empty dict says that nothing happened. Names that this version does not know are left out of merges and summaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_mooncake_ascend.metrics.names import BY_NAME, METRICS

MAX_OBSERVATIONS = 4_096
"""Observations of one histogram kept in one dict; a log line over more reads than this describes the first of them."""

Data = dict[str, Any]


class Stats:
    """Collects what happens until it is taken. Not locked: whoever owns it serialises the calls."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[str, float]] = {}
        self._histograms: dict[str, list[float]] = {}
        self._gauges: dict[str, float] = {}
        self._told_gauges: dict[str, float] = {}

    def count(self, name: str, label: str = "", amount: float = 1.0) -> None:
        """Add to a counter; a label value nobody declared counts as `other`."""
        metric = BY_NAME[name]
        assert metric.kind == "counter", name
        series = self._counters.setdefault(name, {})
        key = metric.bounded(label) if metric.label else ""
        series[key] = series.get(key, 0.0) + amount

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        assert BY_NAME[name].kind == "histogram", name
        observations = self._histograms.setdefault(name, [])
        if len(observations) < MAX_OBSERVATIONS:
            observations.append(value)

    def set_gauge(self, name: str, value: float) -> None:
        """Set a gauge; it is told when it differs from what was told last."""
        assert BY_NAME[name].kind == "gauge", name
        self._gauges[name] = value

    def take(self) -> Data:
        """All that happened since the last call, `{}` when nothing did."""
        changed = {name: value for name, value in self._gauges.items() if self._told_gauges.get(name) != value}
        data = {"counters": self._counters, "histograms": self._histograms, "gauges": changed}
        self._told_gauges.update(changed)
        self._counters, self._histograms = {}, {}
        return {kind: values for kind, values in data.items() if values}


def merge(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> Data:
    """Both as one: counters add up, observations join, of gauges the later value stands."""
    counters = {name: dict(series) for name, series in _part(earlier, "counters").items()}
    for name, series in _part(later, "counters").items():
        joined = counters.setdefault(name, {})
        for label, amount in series.items():
            joined[label] = joined.get(label, 0.0) + amount
    histograms = {name: list(values) for name, values in _part(earlier, "histograms").items()}
    for name, values in _part(later, "histograms").items():
        histograms[name] = (histograms.get(name, []) + list(values))[:MAX_OBSERVATIONS]
    gauges = {**_part(earlier, "gauges"), **_part(later, "gauges")}
    merged: Data = {"counters": counters, "histograms": histograms, "gauges": gauges}
    return {kind: values for kind, values in merged.items() if values}


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """The few figures of one log line, in the order of `names`: sums, gauges, and mean and maximum of histograms."""
    figures: dict[str, int | float] = {}
    for metric in METRICS:
        if metric.kind == "counter":
            for label, amount in sorted(_part(data, "counters").get(metric.name, {}).items()):
                figures[f"{metric.name}[{label}]" if label else metric.name] = _short(amount)
        elif metric.kind == "gauge" and metric.name in _part(data, "gauges"):
            figures[metric.name] = _short(_part(data, "gauges")[metric.name])
        elif values := _part(data, "histograms").get(metric.name):
            figures[f"{metric.name}_mean"] = round(sum(values) / len(values), 4)
            figures[f"{metric.name}_max"] = round(max(values), 4)
    return figures


def _part(data: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    found = data.get(kind)
    return {name: value for name, value in found.items() if name in BY_NAME} if isinstance(found, Mapping) else {}


def _short(number: float) -> int | float:
    return int(number) if number == int(number) else round(number, 4)
