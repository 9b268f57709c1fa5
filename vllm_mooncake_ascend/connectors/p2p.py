"""MooncakeConnectorV1: moves a request's KV cache from prefill to decode, and shares prefixes where pooling is on."""

from __future__ import annotations

import os
from typing import Any

from vllm_mooncake_ascend.config import P2PConfig, parse_p2p
from vllm_mooncake_ascend.connectors import connector, device, support
from vllm_mooncake_ascend.connectors.combined import CombinedSchedulerSide, CombinedWorkerSide
from vllm_mooncake_ascend.connectors.p2p_scheduler_side import P2PSchedulerSide
from vllm_mooncake_ascend.connectors.p2p_worker_side import P2PWorkerSide
from vllm_mooncake_ascend.connectors.pool_scheduler_side import PoolSchedulerSide
from vllm_mooncake_ascend.connectors.pool_worker_side import PoolWorkerSide


class MooncakeConnectorV1(connector.MooncakeConnector):
    """Moves a request's KV cache from the prefill engine that computed it into this decode engine, or offers ours."""

    _config: P2PConfig

    def _read_config(self, vllm_config: Any) -> P2PConfig:
        self._config, warnings = parse_p2p(
            vllm_config.kv_transfer_config.kv_connector_extra_config,
            os.environ,
            device_type=device.device_type(),
            default_host=device.host_address(),
            read_text=connector.read_text,
        )
        connector.tell_warnings(warnings)
        return self._config

    def _make_scheduler_side(self, vllm_config: Any, kv_cache_config: Any) -> connector.SchedulerSide:
        p2p, pool = P2PSchedulerSide(vllm_config, self._config, wake=self._pacer.wake), self._config.pool
        if pool is None:
            return p2p
        settings = support.pool_settings(vllm_config, pool, device_type=device.device_type())
        return CombinedSchedulerSide(p2p, PoolSchedulerSide(vllm_config, kv_cache_config, settings, wake=self._pacer.wake))

    def _make_worker_side(self, vllm_config: Any, kv_cache_config: Any) -> connector.WorkerSide:
        p2p, pool = P2PWorkerSide(vllm_config, kv_cache_config, self._config, wake=self._news.set), self._config.pool
        if pool is None:
            return p2p
        return CombinedWorkerSide(p2p, PoolWorkerSide(vllm_config, kv_cache_config, pool, wake=self._news.set))
