"""Looks into, and meddles with, a vLLM engine that lives in this process. Reads vLLM's accounts, none of ours.

Written for vLLM 0.27 to 0.33: single-process engine, KV caches of all layers in `model_runner.kv_caches`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_mooncake_ascend.testing.engine_messages import EngineState

POISON = 0.5
"""A finite value that no KV cache holds over whole blocks: wrong answers, but no NaN that would spread by itself."""
OUR_PREFIXES = ("mooncake_ascend:", "vllm:")


def state(core: Any, *, num_steps: int) -> EngineState:
    """What the engine holds now."""
    scheduler = core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    num_running, num_waiting = scheduler.get_request_counts()
    blocks = [block for block in pool.blocks if not block.is_null]
    return EngineState(
        num_requests=len(scheduler.requests),
        num_running=num_running,
        num_waiting=num_waiting,
        num_steps=num_steps,
        num_blocks=len(blocks),
        num_free_blocks=pool.get_num_free_blocks(),
        held_block_ids=tuple(block.block_id for block in blocks if block.ref_cnt > 0),
        cached_block_ids=tuple(block.block_id for block in blocks if block.block_hash is not None),
        block_tables=_block_tables(scheduler),
        num_threads=len(os.listdir("/proc/self/task")),
        num_sockets=sum(target.startswith("socket:") for target in _open_files()),
    )


def metric_samples() -> dict[str, float]:
    """All samples of vLLM's and our metrics in this process, without vLLM's own labels."""
    from prometheus_client import REGISTRY

    samples: dict[str, float] = {}
    for metric in REGISTRY.collect():
        if not metric.name.startswith(OUR_PREFIXES):
            continue
        for sample in metric.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            shown = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
            key = f"{sample.name}{{{shown}}}" if shown else sample.name
            samples[key] = samples.get(key, 0.0) + float(sample.value)
    return samples


def poison(core: Any, block_ids: Sequence[int]) -> int:
    """Overwrite blocks in all layers; returns how many blocks."""
    for cache in _kv_caches(core):
        for block_id in block_ids:
            cache[block_id].fill_(POISON)
    return len(block_ids)


def digests(core: Any, block_ids: Iterable[int]) -> dict[int, str]:
    """A digest of each block over all layers."""
    caches = _kv_caches(core)
    found = {}
    for block_id in block_ids:
        digest = hashlib.sha256()
        for cache in caches:
            digest.update(cache[block_id].contiguous().numpy().tobytes())
        found[block_id] = digest.hexdigest()[:16]
    return found


def _block_tables(scheduler: Any) -> dict[str, tuple[int, ...]]:
    tables = {}
    for request_id in scheduler.requests:
        block_ids = scheduler.kv_cache_manager.get_block_ids(request_id)
        if block_ids and block_ids[0]:
            tables[request_id] = tuple(block_ids[0])
    return tables


def _kv_caches(core: Any) -> list[Any]:
    """One tensor per layer, blocks first."""
    caches = core.model_executor.driver_worker.worker.model_runner.kv_caches
    num_blocks = len(core.scheduler.kv_cache_manager.block_pool.blocks)
    assert all(cache.shape[0] == num_blocks for cache in caches), "the KV caches are not blocks first"
    return list(caches)


def _open_files() -> list[str]:
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except OSError:  # the descriptor of this very listing
            continue
    return targets
