"""What both connectors are for vLLM: one object plays one role and hands every hook on to its side. Delegation only.

All hooks of the supported versions stand side by side: `get_finished` with `get_transfer_results`, `bind_gpu_block_pool`
with `bind_kv_cache_manager`, and so on. vLLM calls those that its version knows.
"""

from __future__ import annotations

import abc
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from vllm_mooncake_ascend.connectors import kv_cache, requests, support, versions
from vllm_mooncake_ascend.connectors.envelopes import Handshake, StepMetadata, WorkerMetadata
from vllm_mooncake_ascend.connectors.pacing import Pacer
from vllm_mooncake_ascend.connectors.reports import StepReports, step_reports
from vllm_mooncake_ascend.connectors.stats import ConnectorStats, PromMetrics
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.layout.plane import RankLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

BlockTable = tuple[tuple[int, ...], ...]
"""Block ids per KV cache group, from prompt token 0 on."""


class SchedulerSide(Protocol):
    """The scheduler-role side of a connector. All calls come from the engine's one scheduler thread."""

    def bind_block_pool(self, block_pool: Any) -> None: ...

    def start(self, ranks: tuple[RankLayout, ...]) -> None:
        """All workers have registered their memory; called once, before the first request."""

    def on_new_request(self, request: Any) -> None: ...

    def num_new_matched_tokens(self, request: Any, num_local_tokens: int) -> int | None:
        """Tokens that are loaded, asynchronously, beyond the local ones; None: not known yet."""

    def update_state_after_alloc(self, request: Any, block_ids: BlockTable, num_remote_tokens: int) -> None: ...

    def hit_sources(self, request: Any, num_tokens: int) -> dict[Any, int]:
        """vLLM's labels of where the loaded tokens come from (0.32+)."""

    def observe_step(self, scheduler_output: Any) -> None:
        """vLLM has scheduled a step."""

    def has_pending(self) -> bool:
        """There is something for the workers in this step."""

    @property
    def is_waiting(self) -> bool:
        """vLLM steps for requests that cannot run until something of ours ends, or for our sake alone."""

    @property
    def awaits_workers(self) -> bool:
        """Some read or load has all it needs: the next news of it is its end, which the workers have."""

    @property
    def is_patient(self) -> bool:
        """No request waits for it."""

    @property
    def wants_steps(self) -> bool:
        """Workers' results are awaited that only come with the output of a step."""

    def take_step(self) -> StepMetadata: ...

    def update_results(self, results: WorkerMetadata) -> None:
        """What the workers had to tell came back with a step's output."""

    def request_finished(self, request: Any, block_ids: BlockTable) -> dict[str, Any] | None:
        """Returns kv_transfer_params for the answer. Never delays vLLM's own freeing: what is needed is pinned."""

    def release_pending_blocks(self) -> bool:
        """Carry out releases that have come in; True when that freed blocks, so that vLLM need not preempt."""

    def reset_cache(self) -> None:
        """vLLM drops its cached blocks (new weights, say)."""

    def take_events(self) -> list[Any]: ...

    def take_stats(self) -> dict[str, Any]: ...

    def shutdown(self) -> None: ...


class WorkerSide(Protocol):
    """The worker-role side of a connector. All calls come from the model-runner thread, and return at once. `wake` of its
    constructor is called, from any thread, when `take_results` has something new."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> RankLayout:
        """Register all KV memory; returns its layout for the scheduler-role side."""

    def begin_step(self, step: StepMetadata) -> None:
        """Called with the metadata, before the forward pass."""

    def take_results(self) -> WorkerMetadata | None: ...

    def take_stats(self) -> dict[str, Any]: ...

    def shutdown(self) -> None: ...


class ConnectorConfig(Protocol):
    """What this module needs to know of the settings."""

    @property
    def load_failure_policy(self) -> str: ...

    @property
    def empty_step_wait_s(self) -> float: ...


class MooncakeConnector(KVConnectorBase_V1, SupportsHMA):
    """Base of the connectors: a subclass reads its settings and makes its sides."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig | None = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        support.refuse_unsupported(type(self).__name__, vllm_config, kv_cache_config)
        config = self._read_config(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._layout: RankLayout | None = None
        self._cached: versions.LocalCache | None = None
        self._step = StepMetadata()
        self._news = threading.Event()
        """There is something for `take_results` of the worker-role side."""
        self._pacer = Pacer(
            wait_s=config.empty_step_wait_s,
            may_sleep=vllm_config.parallel_config.data_parallel_size == 1,
            workers_may_wait=not vllm_config.scheduler_config.async_scheduling,
        )
        if role == KVConnectorRole.SCHEDULER:
            versions.scheduler_transfer_config(vllm_config).kv_load_failure_policy = config.load_failure_policy
            self._scheduler = self._make_scheduler_side(vllm_config, kv_cache_config)
        else:
            self._worker = self._make_worker_side(vllm_config, kv_cache_config)

    @abc.abstractmethod
    def _read_config(self, vllm_config: Any) -> ConnectorConfig:
        """Read and keep the settings.

        Raises:
            ConfigError: names the key, its value and the remedy.
        """

    @abc.abstractmethod
    def _make_scheduler_side(self, vllm_config: Any, kv_cache_config: Any) -> SchedulerSide: ...

    @abc.abstractmethod
    def _make_worker_side(self, vllm_config: Any, kv_cache_config: Any) -> WorkerSide: ...

    # --- class-level answers --------------------------------------------------------------------------------------

    @classmethod
    def supports_sleep_mode(cls) -> bool:
        """Memory that peers may read cannot be unmapped; unregister and restore are not built."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- scheduler role -------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.bind_gpu_block_pool(versions.block_pool_of(kv_cache_manager))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._cached = versions.LocalCache(gpu_block_pool)
        self._scheduling.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, tp_rank): found for tp_rank, found in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Under vLLM's MultiConnector the workers send the first child's alone.

        Raises:
            ConfigError: it is of a connector that is not ours, or does not do for this one.
        """
        ranks = []
        for _, handshake in sorted(metadata.items()):
            if not isinstance(handshake, Handshake):
                raise ConfigError(
                    f"{type(self).__name__} was given the handshake of another connector ({type(handshake).__module__}); in a "
                    "MultiConnector put it first"
                )
            ranks.append(msgspec.msgpack.decode(handshake.layout, type=RankLayout))
        self._scheduling.start(tuple(ranks))

    def on_new_request(self, request: Request) -> None:
        self._scheduling.on_new_request(request)
        requests.drop_odd_params(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._scheduling.num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduling.update_state_after_alloc(request, kv_cache.block_table(blocks.get_block_ids()), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        return self._scheduling.hit_sources(request, num_external_tokens) if num_external_tokens else {}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._scheduling.observe_step(scheduler_output)
        runs_something = scheduler_output.total_num_scheduled_tokens > 0
        number = self._pacer.step(self._scheduling, runs_something=runs_something)
        step = self._scheduling.take_step()
        step.number = number
        step.wait_s = self._pacer.workers_wait_s(
            self._scheduling, runs_something=runs_something, has_reports=bool(step.reports)
        )
        return step

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        found = connector_output.kv_connector_worker_meta
        if not isinstance(found, WorkerMetadata):
            self._pacer.came_back(0)
            return
        self._pacer.came_back(found.number)
        self._scheduling.update_results(found)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduling.request_finished(request, kv_cache.block_table(block_ids))

    def has_pending_block_frees(self) -> bool:
        return self._scheduling.release_pending_blocks()

    def has_pending_push_work(self) -> bool:
        return self._scheduling.wants_steps

    def reset_cache(self) -> bool | None:
        """vLLM's own reset does nothing, and says so, while a block is in use, as it is while we move it: what vLLM has cached
        is not found any more all the same."""
        assert self._cached is not None, "vLLM binds the block pool first"
        self._scheduling.reset_cache()
        self._cached.forget()
        return True

    def take_events(self) -> list[Any]:
        return self._scheduling.take_events()

    # --- worker role ----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layout = self._working.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._layout is None else Handshake(layout=msgspec.msgpack.encode(self._layout))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Transfers are started here, with the metadata: they must not wait for the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._step = connector_metadata
        self._working.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads were started with the metadata: vLLM calls this after the forward pass from 0.29 on."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: a request runs only after its KV has arrived whole."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved layer by layer: blocks are read, or put, once they are whole."""

    def wait_for_save(self) -> None:
        """Blocks that are being saved are pinned; nothing need wait for it."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        return None, set(self._reports.received) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ARG002
        if not self._step.reports:
            return versions.no_transfer_results()
        reports = self._reports
        return versions.transfer_results(set(reports.received), set(reports.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if versions.HAS_FAILED_RECEIVES else set(self._reports.invalid_block_ids)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        results = self._results()
        if self._step.echo:
            results = results or WorkerMetadata()
            results.echo = self._step.echo
        if results is not None:
            results.number = self._step.number
        return results

    def _results(self) -> WorkerMetadata | None:
        """What the workers' threads have to tell, or have within the time that the step leaves them."""
        if not self._step.wait_s:
            return self._working.take_results()
        self._news.clear()
        results = self._working.take_results()
        if results is None:
            self._news.wait(self._step.wait_s)
            results = self._working.take_results()
        return results

    # --- both roles -----------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        side = self._scheduler or self._working
        data = side.take_stats()
        return ConnectorStats(data=data) if data else None

    def shutdown(self) -> None:
        side = self._scheduler or self._working
        side.shutdown()

    @property
    def _reports(self) -> StepReports:
        return step_reports(self._step.reports)

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a scheduler hook was called on the worker-role connector"
        return self._scheduler

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a worker hook was called on the scheduler-role connector"
        return self._worker


def read_text(path: str) -> str:
    """A file that the settings name."""
    return Path(path).read_text(encoding="utf-8")


def tell_warnings(warnings: tuple[str, ...]) -> None:
    """What the operator should know about the settings."""
    for warning in warnings:
        logger.warning("%s", warning)
