"""The worker-role half of MooncakeConnectorV1: registers KV memory, hands steps to the transfer thread, reports to vLLM.

Everything here runs on the model-runner thread and returns at once; transfers run on the one thread of
`runtime.p2p_worker`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import msgspec

from vllm_mooncake_ascend.config import P2PConfig
from vllm_mooncake_ascend.connectors import kv_cache, queue_spin
from vllm_mooncake_ascend.devices.select import select_device
from vllm_mooncake_ascend.engines.transfer import MooncakeTransferEngine
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.runtime.p2p_worker import P2PWorker
from vllm_mooncake_ascend.wire.steps import EMPTY_STEP, WorkerResults, WorkerStep

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class StepReports:
    """What vLLM is told at the end of a step."""

    received: frozenset[str]
    failed: frozenset[str]
    invalid_block_ids: frozenset[int]


_NO_REPORTS = StepReports(received=frozenset(), failed=frozenset(), invalid_block_ids=frozenset())


class WorkerSide:
    """One per worker process."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: P2PConfig, device_type: str) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._device = select_device(device_type)
        self._layout: RankLayout | None = None
        self._worker: P2PWorker | None = None
        self._step: WorkerStep = EMPTY_STEP

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Make the engine, register all KV memory with it and describe it for peers."""
        engine = MooncakeTransferEngine(
            host=self._config.transfer_host,
            protocol=self._config.protocol,
            device_name=self._config.device_name,
            memory_location=self._device.memory_location(),
            alignment_bytes=self._device.alignment_bytes,
        )
        rank = kv_cache.rank_numbers(self._vllm_config)
        self._layout = kv_cache.read_rank_layout(
            kv_caches,
            self._kv_cache_config,
            rank=rank,
            total_heads=kv_cache.total_heads(self._vllm_config),
            device_type=self._device.device_type,
            session=engine.session,
        )
        engine.register(self._layout.regions)
        self._worker = P2PWorker(
            engine=engine,
            device=self._device,
            layout=self._layout,
            rank=rank.tp_rank,
            read_wait_s=self._config.read_wait_s,
            is_strict=self._config.is_strict,
        )
        num_tamed = queue_spin.tame() if self._config.tame_queue_spin else 0
        logger.info(
            "KV memory is registered: session=%s regions=%d planes=%d bytes=%d queues_tamed=%d",
            engine.session,
            len(self._layout.regions),
            len(self._layout.planes),
            sum(region.length_bytes for region in self._layout.regions),
            num_tamed,
        )

    def handshake(self) -> bytes | None:
        """This rank's layout for the scheduler-role connector, None before registration."""
        return None if self._layout is None else msgspec.msgpack.encode(self._layout)

    def begin_step(self, step: WorkerStep) -> None:
        """Start the step's reads. Called with the metadata, before the forward pass: a read must not wait for it."""
        self._step = step
        if step is not EMPTY_STEP and step != EMPTY_STEP:
            assert self._worker is not None, "vLLM registers the KV caches before the first step"
            self._worker.submit(step)

    def reports(self) -> StepReports:
        """What to tell vLLM in this step; the scheduler-role connector has decided each of them exactly once."""
        if not self._step.reports:
            return _NO_REPORTS
        failed = [report for report in self._step.reports if not report.ok]
        return StepReports(
            received=frozenset(str(report.request_id) for report in self._step.reports),
            failed=frozenset(str(report.request_id) for report in failed),
            invalid_block_ids=frozenset(block_id for report in failed for block_id in report.block_ids),
        )

    def take_results(self) -> WorkerResults | None:
        ended = self._worker.take_ended() if self._worker is not None else ()
        return WorkerResults(ended=ended) if ended else None

    def take_stats(self) -> dict[str, Any]:
        return self._worker.take_stats() if self._worker is not None else {}

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
