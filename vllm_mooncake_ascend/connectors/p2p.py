"""MooncakeConnectorV1: the P2P connector as vLLM sees it. Delegation only; one object plays one role.

All hooks of the supported versions stand side by side: `get_finished` with `get_transfer_results`, `bind_gpu_block_pool`
with `bind_kv_cache_manager`, and so on. vLLM calls those that its version knows.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_mooncake_ascend.config import P2PConfig, parse_p2p
from vllm_mooncake_ascend.connectors import identity, kv_cache, support, versions
from vllm_mooncake_ascend.connectors.scheduler_side import SchedulerSide
from vllm_mooncake_ascend.connectors.stats import P2PConnectorStats, P2PPromMetrics
from vllm_mooncake_ascend.connectors.worker_side import WorkerSide
from vllm_mooncake_ascend.layout import compatibility
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.wire.messages import PROTOCOL_VERSION
from vllm_mooncake_ascend.wire.steps import WorkerResults, WorkerStep

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class P2PMetadata(KVConnectorMetadata):
    """Scheduler -> workers, every step."""

    step: WorkerStep


@dataclasses.dataclass
class P2PHandshake(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, once: the encoded RankLayout."""

    layout: bytes


@dataclasses.dataclass
class P2PWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker -> scheduler, in steps that have results."""

    results: WorkerResults

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, P2PWorkerMetadata)
        return P2PWorkerMetadata(results=WorkerResults(ended=self.results.ended + other.results.ended))


@versions.with_hit_source
class MooncakeConnectorV1(KVConnectorBase_V1, SupportsHMA):
    """Moves a request's KV cache from the prefill engine that computed it into this decode engine, or offers ours."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        support.refuse_unsupported(vllm_config, kv_cache_config)
        self._config = _read_config(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            vllm_config.kv_transfer_config.kv_load_failure_policy = self._config.load_failure_policy
            self._scheduler = SchedulerSide(vllm_config, self._config)
        else:
            self._worker = WorkerSide(vllm_config, kv_cache_config, self._config, _device_type())

    # --- class-level answers --------------------------------------------------------------------------------------

    @classmethod
    def supports_sleep_mode(cls) -> bool:
        """Memory that peers may read cannot be unmapped; unregister and restore are not built."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> P2PConnectorStats:
        return P2PConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> P2PPromMetrics:
        return P2PPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- scheduler role -------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.bind_gpu_block_pool(versions.block_pool_of(kv_cache_manager))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduling.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp_rank): found for tp_rank, found in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        ranks = []
        for _, handshake in sorted(metadata.items()):
            assert isinstance(handshake, P2PHandshake)
            ranks.append(msgspec.msgpack.decode(handshake.layout, type=RankLayout))
        fingerprint = compatibility.fingerprint(
            identity.cache_identity(self._vllm_config, _device_type()), tuple(ranks), protocol_version=PROTOCOL_VERSION
        )
        self._scheduling.start(tuple(ranks), fingerprint)

    def on_new_request(self, request: Request) -> None:
        self._scheduling.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduling.update_state_after_alloc(request, kv_cache.block_table(blocks.get_block_ids()), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return P2PMetadata(step=self._scheduling.build_step(scheduler_output))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        found = connector_output.kv_connector_worker_meta
        self._scheduling.update_results(found.results if isinstance(found, P2PWorkerMetadata) else None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduling.request_finished(request, kv_cache.block_table(block_ids))

    def has_pending_block_frees(self) -> bool:
        return self._scheduling.release_pending_blocks()

    def reset_cache(self) -> bool | None:
        return self._scheduling.reset_cache()

    # --- worker role ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._working.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        layout = self._working.handshake()
        return None if layout is None else P2PHandshake(layout=layout)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, P2PMetadata)
        self._working.begin_step(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Reads were started with the metadata: vLLM calls this after the forward pass from 0.29 on."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only after its KV has arrived whole."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved: decode engines read the blocks themselves."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        return None, set(self._working.reports().received) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        reports = self._working.reports()
        return versions.transfer_results(set(reports.received), set(reports.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if versions.HAS_FAILED_RECEIVES else set(self._working.reports().invalid_block_ids)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        results = self._working.take_results()
        return None if results is None else P2PWorkerMetadata(results=results)

    # --- both roles -----------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> P2PConnectorStats | None:
        side = self._scheduler or self._working
        data = side.take_stats()
        return P2PConnectorStats(data=data) if data else None

    def shutdown(self) -> None:
        side = self._scheduler or self._working
        side.shutdown()

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler hook was called on the worker-role connector"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a worker hook was called on the scheduler-role connector"
        return self._worker


def _read_config(vllm_config: Any) -> P2PConfig:
    from vllm.utils.network_utils import get_ip

    config, warnings = parse_p2p(
        vllm_config.kv_transfer_config.kv_connector_extra_config,
        os.environ,
        device_type=_device_type(),
        default_host=get_ip(),
        read_text=lambda path: Path(path).read_text(encoding="utf-8"),
    )
    for warning in warnings:
        logger.warning("%s", warning)
    return config


def _device_type() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.device_type)
