"""The worker-role side of the prefix pool: registers KV memory with the pool's client, and hands steps to its threads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_mooncake_ascend.config.pool import PoolConfig
from vllm_mooncake_ascend.connectors import kv_cache, queue_spin
from vllm_mooncake_ascend.connectors.device import device_type
from vllm_mooncake_ascend.connectors.envelopes import StepMetadata, WorkerMetadata
from vllm_mooncake_ascend.connectors.pool_store import has_seals, make_store
from vllm_mooncake_ascend.devices.select import select_device
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.pool.settings import WorkerSettings
from vllm_mooncake_ascend.runtime.pool_worker import PoolWorkerShell

logger = logging.getLogger(__name__)

_NO_SESSION = ""
"""Nobody reads this memory through a transfer engine."""


class PoolWorkerSide:
    """One per worker process."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: PoolConfig, *, wake: Callable[[], None]) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._wake = wake
        self._device = select_device(device_type())
        self._shell: PoolWorkerShell | None = None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> RankLayout:
        """For a worker that has no other use of its KV memory."""
        layout = kv_cache.read_rank_layout(
            kv_caches,
            self._kv_cache_config,
            rank=kv_cache.rank_numbers(self._vllm_config),
            total_heads=kv_cache.total_heads(self._vllm_config),
            device_type=self._device.device_type,
            session=_NO_SESSION,
        )
        self.register(layout)
        return layout

    def register(self, layout: RankLayout) -> None:
        """Register all KV memory, and join the pool."""
        segment_bytes = self._config.segment_bytes
        self._shell = PoolWorkerShell(
            settings=WorkerSettings(load_wait_s=self._config.load_wait_s),
            store=make_store(
                self._config,
                segment_bytes=segment_bytes,
                alignment_bytes=self._device.alignment_bytes,
                is_sealed=has_seals(self._device.device_type),
            ),
            device=self._device,
            layout=layout,
            is_strict=self._config.is_strict,
            wake=self._wake,
        )
        num_tamed = queue_spin.tame() if self._config.tame_queue_spin else 0
        logger.info(
            "prefix pool: KV memory is registered: regions=%d planes=%d segment_bytes=%d queues_tamed=%d",
            len(layout.regions),
            len(layout.planes),
            segment_bytes,
            num_tamed,
        )

    def begin_step(self, step: StepMetadata) -> None:
        if self._shell is not None:
            self._shell.submit(step.pool)

    def take_results(self) -> WorkerMetadata | None:
        results = self._shell.take_results() if self._shell is not None else None
        return None if results is None else WorkerMetadata(pool=results)

    def take_stats(self) -> dict[str, Any]:
        return self._shell.take_stats() if self._shell is not None else {}

    def shutdown(self) -> None:
        if self._shell is not None:
            self._shell.close()
