"""MooncakeStoreConnectorV1: shares prefix blocks between all engines of one pool."""

from __future__ import annotations

import os
from typing import Any

from vllm_mooncake_ascend.config.pool import PoolConfig, parse_pool
from vllm_mooncake_ascend.connectors import connector, device, support
from vllm_mooncake_ascend.connectors.pool_scheduler_side import PoolSchedulerSide
from vllm_mooncake_ascend.connectors.pool_worker_side import PoolWorkerSide


class MooncakeStoreConnectorV1(connector.MooncakeConnector):
    """Loads what some engine has computed of a prompt, and saves what this one computes."""

    _config: PoolConfig

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that does not happen is a hit less, and nothing else."""
        return False

    def _read_config(self, vllm_config: Any) -> PoolConfig:
        self._config, warnings = parse_pool(
            vllm_config.kv_transfer_config.kv_connector_extra_config,
            os.environ,
            device_type=device.device_type(),
            default_host=device.host_address(),
            read_text=connector.read_text,
        )
        connector.tell_warnings(warnings)
        return self._config

    def _make_scheduler_side(self, vllm_config: Any, kv_cache_config: Any) -> connector.SchedulerSide:
        settings = support.pool_settings(vllm_config, self._config, device_type=device.device_type())
        return PoolSchedulerSide(vllm_config, kv_cache_config, settings, wake=self._pacer.wake)

    def _make_worker_side(self, vllm_config: Any, kv_cache_config: Any) -> connector.WorkerSide:
        return PoolWorkerSide(vllm_config, kv_cache_config, self._config, wake=self._news.set)
