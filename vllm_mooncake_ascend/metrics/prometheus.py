"""Exports statistics as Prometheus metrics, with metric classes handed in.

vLLM hands in its own classes (prometheus_client's, or wrappers for Ray) and its label names, model and engine; the proxy
and tests hand in prometheus_client's. Nothing here may raise into the engine: vLLM calls `observe` on the task that
delivers every request's output.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mooncake_ascend.metrics.names import METRICS, PREFIX, Metric

logger = logging.getLogger(__name__)


class Exporter:
    """One set of metrics of this process."""

    def __init__(self, *, gauge_class: Any, counter_class: Any, histogram_class: Any, label_names: Sequence[str]) -> None:
        self._metrics = {}
        for metric in METRICS:
            names = [*label_names, metric.label] if metric.label else list(label_names)
            options: dict[str, Any] = {"name": PREFIX + metric.name, "documentation": metric.help, "labelnames": names}
            match metric.kind:
                case "counter":
                    made = counter_class(**options)
                case "gauge":
                    made = gauge_class(**options, multiprocess_mode="mostrecent")
                case "histogram":
                    made = histogram_class(**options, buckets=list(metric.buckets))
            self._metrics[metric.name] = made
        self._failed = False

    def observe(self, data: Mapping[str, Any], label_values: Sequence[object]) -> None:
        """Add what `stats.Stats.take` gave, under vLLM's label values of one engine."""
        try:
            self._observe(data, label_values)
        except (TypeError, ValueError, AttributeError, LookupError) as error:  # data of another shape or a foreign class
            if not self._failed:
                logger.warning("KV transfer metrics cannot be exported (told once): %s: %s", type(error).__name__, error)
            self._failed = True

    def _observe(self, data: Mapping[str, Any], label_values: Sequence[object]) -> None:
        for metric in METRICS:
            match metric.kind:
                case "counter":
                    for value, amount in data.get("counters", {}).get(metric.name, {}).items():
                        self._child(metric, label_values, value).inc(amount)
                case "gauge":
                    if metric.name in data.get("gauges", {}):
                        self._child(metric, label_values, "").set(data["gauges"][metric.name])
                case "histogram":
                    for observation in data.get("histograms", {}).get(metric.name, []):
                        self._child(metric, label_values, "").observe(observation)

    def _child(self, metric: Metric, label_values: Sequence[object], value: str) -> Any:
        values = [*label_values, metric.bounded(value)] if metric.label else list(label_values)
        return self._metrics[metric.name].labels(*values) if values else self._metrics[metric.name]
