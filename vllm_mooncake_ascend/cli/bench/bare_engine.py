"""vLLM's real scheduler with a real connector, and no model: what scheduler hooks cost is measured on it.

The connector plays both roles in this process, and every step goes through the hooks of both in vLLM's order; what the worker
role says is given back with the step's output. The forward pass is left out: each request gets a token. Peers have the
scheduler role only (`has_workers` False).

The one module of `cli` that imports vLLM, when an engine is made.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

BLOCK_TOKENS = 128
HEAD_NUMBERS = 8
"""Of one key: as few as a KV cache can have, so that thousands of blocks fit."""
MAX_TOKENS = 32_768
BATCHED_TOKENS = 8_192
"""Of one step: 4,096 requests and newcomers."""
LAYER = "model.layers.0.self_attn.attn"
MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 4096,
    "max_position_embeddings": MAX_TOKENS,
}
"""No such model is ever loaded."""


class ConnectorChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A connector as `--kv-transfer-config` names it."""

    name: str
    module: str
    """"" for one that vLLM has."""
    role: str
    extra: Mapping[str, Any] = {}
    has_workers: bool = True
    """Its worker role runs here too."""


def prepare_process() -> None:
    """Before vLLM is imported: no hub, one thread."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "PYTHONHASHSEED": "0",
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def process_groups() -> Iterator[Path]:
    """vLLM's groups of one rank, once a process; gives the folder of the model that does not exist."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    with tempfile.TemporaryDirectory(prefix="bench-model-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL_CONFIG))
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(
                world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/groups", backend="gloo"
            )
            ensure_model_parallel_initialized(1, 1)
        init_none_hash(sha256)
        yield Path(folder)


class BareEngine:
    """One engine that runs up to `max_requests` at once."""

    def __init__(self, model: Path, choice: ConnectorChoice, *, max_requests: int, num_blocks: int) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self._config = _engine_config(model, choice, max_requests, num_blocks)
        cache_config = _cache_config(num_blocks)
        with set_current_vllm_config(self._config):
            self._caches = _make_caches(num_blocks)
            self._worker = _make_worker(self._config, cache_config, self._caches) if choice.has_workers else None
            self.scheduler = Scheduler(
                vllm_config=self._config,
                kv_cache_config=cache_config,
                structured_output_manager=StructuredOutputManager(self._config),
                block_size=BLOCK_TOKENS,
                hash_block_size=BLOCK_TOKENS,
                log_stats=True,
            )
        self._connector = connector = self.scheduler.get_kv_connector()
        if self._worker is not None:
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self._worker.get_handshake_metadata()})
        self.hooks = HookTimer(connector)
        self._ids = itertools.count()
        self.running: list[str] = []

    def add(self, num_tokens: int) -> str:
        """One more request, with a prompt nobody else has; it goes on until it is ended."""
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        number = next(self._ids)
        vocabulary = MODEL_CONFIG["vocab_size"]
        assert isinstance(vocabulary, int)
        request_id = f"cmpl-{number:032x}-0"
        self.scheduler.add_request(
            Request(
                request_id=request_id,
                prompt_token_ids=[(number + index * (1 + number // vocabulary)) % vocabulary for index in range(num_tokens)],
                sampling_params=SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
            )
        )
        self.running.append(request_id)
        return request_id

    def end(self, request_id: str) -> None:
        """As a client that leaves does it."""
        from vllm.v1.request import RequestStatus

        self.running.remove(request_id)
        self.scheduler.finish_requests({request_id}, RequestStatus.FINISHED_ABORTED)

    def step(self) -> int:
        """One step. Returns how many requests it ran."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        kv_output = KVConnectorOutput()
        if self._worker is not None:
            _run_worker_hooks(self._worker, output, kv_output)
        request_ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [[7] if requests[one].num_computed_tokens >= requests[one].num_prompt_tokens else [] for one in request_ids]
        result = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            kv_connector_output=kv_output,
        )
        self.scheduler.update_from_output(output, result)
        return len(request_ids)

    @property
    def has_unfinished_saves(self) -> bool:
        """The connector wants steps although nothing need run."""
        asks = getattr(type(self._connector), "has_pending_push_work", None)
        return asks is not None and bool(asks(self._connector))

    def close(self) -> None:
        self.scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()


class HookTimer:
    """CPU time of this thread inside the connector's hooks, of whatever calls them. A call costs a microsecond itself."""

    def __init__(self, connector: Any) -> None:
        self.seconds = 0.0
        self._depth = 0
        for name, _ in inspect.getmembers(type(connector), inspect.isfunction):
            if not name.startswith("_") and name != "shutdown":
                setattr(connector, name, functools.partial(self._timed, getattr(connector, name)))

    def _timed(self, hook: Any, *arguments: Any, **named: Any) -> Any:
        """Hooks that call hooks count once."""
        self._depth += 1
        started_s = time.thread_time()
        try:
            return hook(*arguments, **named)
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.seconds += time.thread_time() - started_s


def _engine_config(model: Path, choice: ConnectorChoice, max_requests: int, num_blocks: int) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector=choice.name,
        kv_connector_module_path=choice.module or None,
        kv_role=choice.role,
        kv_connector_extra_config=dict(choice.extra),
    )
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_num_seqs=max_requests,
        enforce_eager=True,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = False
    config.cache_config.num_gpu_blocks = num_blocks
    return config


def _cache_config(num_blocks: int) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=HEAD_NUMBERS, dtype=torch.float32)
    size = num_blocks * spec.page_size_bytes
    if "layers" in inspect.signature(KVCacheTensor).parameters:
        tensor = KVCacheTensor(size=size, layers=[LAYER], layer_stride=size, block_stride=spec.page_size_bytes)
    else:
        tensor = KVCacheTensor(size=size, shared_by=[LAYER])
    groups = [KVCacheGroupSpec(layer_names=[LAYER], kv_cache_spec=spec)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups)


def _make_caches(num_blocks: int) -> dict[str, Any]:
    """KV memory, which the engine must keep: a connector only knows where it lies."""
    import torch

    return {LAYER: torch.zeros(num_blocks, 1, BLOCK_TOKENS, 2 * HEAD_NUMBERS)}


def _make_worker(config: Any, cache_config: Any, caches: dict[str, Any]) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache_config)
    worker.register_kv_caches(caches)
    return worker


def _run_worker_hooks(worker: Any, output: Any, kv_output: Any) -> None:
    """As `vllm/v1/worker/kv_connector_model_runner_mixin.py` (0.32) calls them."""
    worker.handle_preemptions(output.kv_connector_metadata)
    worker.bind_connector_metadata(output.kv_connector_metadata)
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
