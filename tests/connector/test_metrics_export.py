"""Our metrics in vLLM's registry, made as vLLM's own loggers make them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig, VllmConfig

from vllm_mooncake_ascend.connectors.p2p import MooncakeConnectorV1
from vllm_mooncake_ascend.connectors.pool import MooncakeStoreConnectorV1
from vllm_mooncake_ascend.p2p import counters
from vllm_mooncake_ascend.pool import counters as pool_counters

LABELS = ["model_name", "engine"]


def test_both_connectors_of_one_process_share_their_metrics() -> None:
    """Goal: vLLM's MultiConnector with both of ours starts, and each one's figures arrive. Method: build both, as it does; a
    registry refuses a second metric of the same name."""
    config = VllmConfig(kv_transfer_config=KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both"))
    classes = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    p2p, pool = (
        connector.build_prom_metrics(config, classes, LABELS, {0: ["both", "0"]})
        for connector in (MooncakeConnectorV1, MooncakeStoreConnectorV1)
    )

    p2p.observe({"counters": {counters.READ_BYTES: {"": 3.0}}})
    pool.observe({"counters": {pool_counters.GET_BYTES: {"": 5.0}}})

    assert (3.0, 5.0) == (value_of(counters.READ_BYTES), value_of(pool_counters.GET_BYTES))


def value_of(name: str) -> Any:
    return REGISTRY.get_sample_value(f"mooncake_ascend:{name}", {"model_name": "both", "engine": "0"})
