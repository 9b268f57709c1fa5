"""The worker-role side of P2P: registers KV memory, and hands steps to the transfer thread.

Everything here runs on the model-runner thread and returns at once; transfers run on the one thread of
`runtime.p2p_worker`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_mooncake_ascend.config import P2PConfig
from vllm_mooncake_ascend.connectors import kv_cache, queue_spin
from vllm_mooncake_ascend.connectors.device import device_type
from vllm_mooncake_ascend.connectors.envelopes import StepMetadata, WorkerMetadata
from vllm_mooncake_ascend.devices.select import select_device
from vllm_mooncake_ascend.engines.transfer import MooncakeTransferEngine
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.runtime.p2p_worker import P2PWorker
from vllm_mooncake_ascend.wire.steps import EMPTY_STEP, WorkerResults

logger = logging.getLogger(__name__)


class P2PWorkerSide:
    """One per worker process."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: P2PConfig, *, wake: Callable[[], None]) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._wake = wake
        self._device = select_device(device_type())
        self._worker: P2PWorker | None = None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> RankLayout:
        """Make the engine, register all KV memory with it and describe it for peers."""
        engine = MooncakeTransferEngine(
            host=self._config.transfer_host,
            protocol=self._config.protocol,
            device_name=self._config.device_name,
            memory_location=self._device.memory_location(),
            alignment_bytes=self._device.alignment_bytes,
        )
        rank = kv_cache.rank_numbers(self._vllm_config)
        layout = kv_cache.read_rank_layout(
            kv_caches,
            self._kv_cache_config,
            rank=rank,
            total_heads=kv_cache.total_heads(self._vllm_config),
            device_type=self._device.device_type,
            session=engine.session,
        )
        engine.register(layout.regions)
        self._worker = P2PWorker(
            engine=engine,
            device=self._device,
            layout=layout,
            read_wait_s=self._config.read_wait_s,
            is_strict=self._config.is_strict,
            wake=self._wake,
        )
        num_tamed = queue_spin.tame() if self._config.tame_queue_spin else 0
        logger.info(
            "KV memory is registered: session=%s regions=%d planes=%d bytes=%d queues_tamed=%d",
            engine.session,
            len(layout.regions),
            len(layout.planes),
            sum(region.length_bytes for region in layout.regions),
            num_tamed,
        )
        return layout

    def begin_step(self, step: StepMetadata) -> None:
        """Start the step's reads."""
        if step.p2p != EMPTY_STEP:
            assert self._worker is not None, "vLLM registers the KV caches before the first step"
            self._worker.submit(step.p2p)

    def take_results(self) -> WorkerMetadata | None:
        ended = self._worker.take_ended() if self._worker is not None else ()
        return WorkerMetadata(p2p=WorkerResults(ended=ended)) if ended else None

    def take_stats(self) -> dict[str, Any]:
        return self._worker.take_stats() if self._worker is not None else {}

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
