"""An engine without a model: vLLM's real Scheduler, our real connector in both roles, and a forward pass done by hand.

The hand writes into each scheduled token's block a pattern made of the whole prefix, so that "the right KV" is a plain
comparison, and samples the token that the prompt's digest says. Hooks are called in the order of vLLM's own model runner
(`vllm/v1/worker/kv_connector_model_runner_mixin.py`, 0.32) and engine core. Everything happens in `schedule()` and
`finish()`, so that a test decides what comes between two halves of a step; asynchronous scheduling is one more step
scheduled before the first is finished.
"""

from __future__ import annotations

import collections
import hashlib
import inspect
import itertools
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, get_tp_group, init_distributed_environment
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

BLOCK = 32
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
HEADS, DIM = 2, 64
_HOST_KEYS = {"MooncakeConnectorV1": "side_channel_host", "MooncakeStoreConnectorV1": "transfer_host"}
MAX_WAIT_S = 60.0
_ids = itertools.count()


def transfer_config(connector: str, role: str, **extra: Any) -> dict[str, Any]:
    """vLLM's settings for a connector of ours, or for its MultiConnector, whose `connectors` are such settings."""
    if connector == "MultiConnector":
        return {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}
    return {
        "kv_connector": connector,
        "kv_connector_module_path": "vllm_mooncake_ascend",
        "kv_role": role,
        "kv_connector_extra_config": {_HOST_KEYS[connector]: "127.0.0.1", "tame_queue_spin": False, **extra},
    }


def start_process_groups(folder: str) -> None:
    """vLLM's groups of one rank, once a process; the store is a file, not a port."""
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/store", backend="gloo"
        )
        ensure_model_parallel_initialized(1, 1)
    init_none_hash(sha256)


class HandEngine:
    """One engine. `role`: kv_producer, kv_consumer or kv_both."""

    def __init__(
        self,
        model: str,
        role: str,
        *,
        num_blocks: int = 64,
        asynchronous: bool = False,
        chunk: int = 512,
        tensor_parallel: int = 1,
        prefix_caching: bool = True,
        connector: str = "MooncakeConnectorV1",
        **extra: Any,
    ) -> None:
        transfer = KVTransferConfig(**transfer_config(connector, role, **extra))
        self.config = EngineArgs(
            model=model,
            dtype="float32",
            block_size=BLOCK,
            max_model_len=2048,
            max_num_batched_tokens=chunk,
            max_num_seqs=16,
            enforce_eager=True,
            enable_prefix_caching=prefix_caching,
            kv_transfer_config=transfer,
        ).create_engine_config()
        self.config.scheduler_config.async_scheduling = asynchronous
        self.config.cache_config.num_gpu_blocks = num_blocks
        self.config.parallel_config.tensor_parallel_size = tensor_parallel
        num_heads = HEADS // tensor_parallel
        self.cache_config = _cache_config(num_blocks, num_heads)
        self.caches = [
            {layer: torch.zeros(num_blocks, num_heads, BLOCK, 2 * DIM) for layer in LAYERS} for _ in range(tensor_parallel)
        ]
        """Of each rank."""
        with set_current_vllm_config(self.config):
            self.workers = [self._make_worker(rank) for rank in range(tensor_parallel)]
            self.scheduler = _make_scheduler(AsyncScheduler if asynchronous else Scheduler, self.config, self.cache_config)
        self.connector = self.scheduler.get_kv_connector()
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )
        self._aggregator = KVOutputAggregator.from_connector(self.connector, tensor_parallel)
        self.tokens: dict[str, list[int]] = collections.defaultdict(list)
        self.params: dict[str, dict[str, Any] | None] = {}
        self.finished: dict[str, str] = {}
        self.loaded: set[str] = set()
        """Requests whose KV came from another engine."""
        self.not_loaded: set[str] = set()
        """Requests whose load failed after vLLM had given it blocks."""
        self._counts: dict[str, float] = collections.defaultdict(float)
        self.free_at_start = self.num_free_blocks
        self.steps: collections.deque[Any] = collections.deque()

    # --- requests -------------------------------------------------------------------------------------------------

    def add(self, prompt: list[int], *, transfer: Any = None, max_tokens: int = 4, **options: Any) -> str:
        """Give the engine a request; returns its id."""
        request_id = options.pop("request_id", None) or f"r{next(_ids)}"
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            extra_args={"kv_transfer_params": transfer} if transfer is not None else None,
            **options,
        )
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK, sha256),
            )
        )
        return request_id

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(set(request_ids), RequestStatus.FINISHED_ABORTED)

    # --- steps ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Any:
        """First half of a step: what the engine core does before and while the workers run."""
        output = self.scheduler.schedule()
        sampling = {request_id for request_id in output.num_scheduled_tokens if self._reaches_prompt_end(request_id)}
        for worker in self.workers:
            metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
        self._forward(output)
        kv_outputs = [self._end_step(worker, output) for worker in self.workers]
        self.steps.append((output, kv_outputs, sampling))
        return output

    def finish(self) -> None:
        """Second half of the oldest step under way: its output comes back."""
        output, kv_outputs, sampling = self.steps.popleft()
        req_ids = list(output.num_scheduled_tokens)
        sampled = [[10 + len(self.tokens[request_id])] if request_id in sampling else [] for request_id in req_ids]
        results = [
            ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(req_ids)},
                sampled_token_ids=sampled,
                kv_connector_output=kv_output,
            )
            for kv_output in kv_outputs
        ]
        result = self._aggregator.aggregate(results)
        self._note_loads(result.kv_connector_output)
        for outputs in self.scheduler.update_from_output(output, result).values():
            self._count(outputs.scheduler_stats)
            for one in outputs.outputs:
                self.tokens[one.request_id].extend(one.new_token_ids)
                if one.finish_reason is not None:
                    self.finished[one.request_id] = str(one.finish_reason)
                    self.params[one.request_id] = one.kv_transfer_params

    def step(self) -> Any:
        output = self.schedule()
        self.finish()
        return output

    def step_until(self, is_done: Callable[[], bool], *, what: str, others: tuple[HandEngine, ...] = ()) -> None:
        """Step (with `others` beside) until something is so. Time is the limit: what is waited for runs in other threads and
        processes, and a step may take no time at all."""
        deadline_s = time.monotonic() + MAX_WAIT_S
        while not is_done():
            assert time.monotonic() < deadline_s, f"{what}: not after {MAX_WAIT_S:g} s of steps"
            for engine in (self, *others):
                if engine.scheduler.has_requests():
                    engine.step()

    def run_until(self, *request_ids: str, others: tuple[HandEngine, ...] = ()) -> None:
        """Step (with `others` beside) until the requests have finished."""
        self.step_until(lambda: self.finished.keys() >= set(request_ids), what=f"{request_ids} finished", others=others)

    def step_to_running(self, request_id: str) -> None:
        """Step until a request's KV is there, or being computed."""
        self.step_until(lambda: self.status(request_id) == "RUNNING", what=f"{request_id} runs")

    def drive(self, *request_ids: str) -> None:
        """Run requests to their end as asynchronous scheduling does: one step ahead, where one is scheduled already."""
        self.run_until(*request_ids)
        while self.steps:
            self.finish()

    # --- what a test looks at -------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def block_ids(self, request_id: str) -> list[int]:
        return list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])

    def status(self, request_id: str) -> str:
        return str(self.scheduler.requests[request_id].status.name)

    def holds_kv(self, prompt: list[int], block_ids: list[int], *, num_tokens: int) -> bool:
        """Whether the blocks hold exactly the KV of the prompt's first `num_tokens` tokens (all layers and heads)."""
        return all(
            torch.equal(
                torch.cat([caches[layer][block_ids[index // BLOCK], :, index % BLOCK] for caches in self.caches]),
                _kv_of(prompt[: index + 1], layer),
            )
            for layer in LAYERS
            for index in range(num_tokens)
        )

    def take_count(self, name: str) -> float:
        """What was added to a counter of ours since this was asked last."""
        return self._counts.pop(name, 0.0)

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def _count(self, scheduler_stats: Any) -> None:
        data = getattr(scheduler_stats, "kv_connector_stats", None) or {}
        for name, series in data.get("counters", {}).items():
            self._counts[name] += sum(series.values())

    def _note_loads(self, kv_output: KVConnectorOutput) -> None:
        received = kv_output.finished_recving or set()
        failed = received if kv_output.invalid_block_ids else getattr(kv_output, "failed_recving", set())
        self.loaded |= received - failed
        self.not_loaded |= failed

    # --- the workers' part ----------------------------------------------------------------------------------------

    def _make_worker(self, rank: int) -> Any:
        """A worker-role connector that takes itself for this rank: in vLLM it would be alone in its process."""
        group = get_tp_group()
        group.rank_in_group = rank
        try:
            worker = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.cache_config)
            worker.register_kv_caches(self.caches[rank])
        finally:
            group.rank_in_group = 0
        return worker

    def _end_step(self, worker: Any, output: Any) -> KVConnectorOutput:
        """One worker's hooks after the forward pass. What it says is pickled, as between vLLM's processes."""
        kv_output = KVConnectorOutput()
        worker.start_load_kv(None)
        worker.wait_for_save()
        if hasattr(worker, "get_transfer_results") and hasattr(kv_output, "failed_recving"):
            results = worker.get_transfer_results(output.finished_req_ids)
            kv_output.finished_sending = results.finished_sending
            kv_output.finished_recving = results.finished_recving
            kv_output.failed_recving = results.failed_recving
        else:
            kv_output.finished_sending, kv_output.finished_recving = worker.get_finished(output.finished_req_ids)
        kv_output.invalid_block_ids = worker.get_block_ids_with_load_errors()
        kv_output.kv_connector_stats = worker.get_kv_connector_stats()
        kv_output.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        copied: KVConnectorOutput = pickle.loads(pickle.dumps(kv_output))
        return copied

    def _forward(self, output: Any) -> None:
        """Write the KV of every scheduled token."""
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            block_ids = self.block_ids(request_id)
            for index in range(end - num_tokens, end):
                prefix = request.all_token_ids[: index + 1]
                if len(prefix) <= index:
                    break  # asynchronous scheduling: the token is not known to the host yet
                for layer in LAYERS:
                    shares = _kv_of(list(prefix), layer).chunk(len(self.caches))
                    for caches, share in zip(self.caches, shares, strict=True):
                        caches[layer][block_ids[index // BLOCK], :, index % BLOCK] = share

    def _reaches_prompt_end(self, request_id: str) -> bool:
        request = self.scheduler.requests[request_id]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)


def _kv_of(prefix: list[int], layer: str) -> torch.Tensor:
    """[heads, content]: what the last token of `prefix` leaves in a layer; every head's is its own."""
    seed = int.from_bytes(hashlib.blake2b(repr((layer, prefix)).encode(), digest_size=4).digest(), "little")
    return torch.stack([torch.full((2 * DIM,), float(seed % 1_000_003 + 1_000_003 * head)) for head in range(HEADS)])


def _cache_config(num_blocks: int, num_heads: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=num_heads, head_size=DIM, dtype=torch.float32)
    size = num_blocks * spec.page_size_bytes
    fields = inspect.signature(KVCacheTensor).parameters
    if "layers" in fields:
        tensors = [
            KVCacheTensor(size=size, layers=[layer], layer_stride=size, block_stride=spec.page_size_bytes) for layer in LAYERS
        ]
    else:
        tensors = [KVCacheTensor(size=size, shared_by=[layer]) for layer in LAYERS]
    groups = [KVCacheGroupSpec(layer_names=list(LAYERS), kv_cache_spec=spec)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def _make_scheduler(kind: type, config: Any, cache_config: KVCacheConfig) -> Any:
    return kind(
        vllm_config=config,
        kv_cache_config=cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )


def offline() -> None:
    """No hub, one thread, broken invariants raised: what every test process of real engines sets before vLLM is imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_MOONCAKE_ASCEND_STRICT="1",
        PYTHONHASHSEED="0",
    )
