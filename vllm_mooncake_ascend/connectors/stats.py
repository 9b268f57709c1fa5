"""The connector's figures in vLLM's own clothes: statistics of a step, and their Prometheus metrics."""

from __future__ import annotations

import functools
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_mooncake_ascend.metrics import prometheus
from vllm_mooncake_ascend.metrics import stats as values


class ConnectorStats(KVConnectorStats):
    """What happened since the last step; mergeable over ranks and time. `data` holds plain values only."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data = values.merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        return values.summary(self.data)

    def is_empty(self) -> bool:
        return not self.data


class PromMetrics(KVConnectorPromMetrics):
    """The metrics of `metrics.names`, one child per engine of this API server."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._exporter = _exporter(self._gauge_cls, self._counter_cls, self._histogram_cls, tuple(labelnames))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        self._exporter.observe(transfer_stats_data, self.per_engine_labelvalues[engine_idx])


@functools.cache
def _exporter(gauge_class: Any, counter_class: Any, histogram_class: Any, label_names: tuple[str, ...]) -> prometheus.Exporter:
    """One of a process: vLLM's MultiConnector may have both connectors, and a registry takes each metric once."""
    return prometheus.Exporter(
        gauge_class=gauge_class, counter_class=counter_class, histogram_class=histogram_class, label_names=label_names
    )
