"""P2P and the prefix pool in one connector: who is asked first, and who is told what.

Order of sources: what the local cache has, then the prefill engine a request names, else the pool. A request that its prefill
engine let down may look into the pool, once. Both sides save and serve side by side.
"""

from __future__ import annotations

from typing import Any

from vllm_mooncake_ascend.connectors import requests
from vllm_mooncake_ascend.connectors.envelopes import StepMetadata, WorkerMetadata
from vllm_mooncake_ascend.connectors.p2p_scheduler_side import P2PSchedulerSide
from vllm_mooncake_ascend.connectors.p2p_worker_side import P2PWorkerSide
from vllm_mooncake_ascend.connectors.pool_scheduler_side import PoolSchedulerSide
from vllm_mooncake_ascend.connectors.pool_worker_side import PoolWorkerSide
from vllm_mooncake_ascend.connectors.progress import BlockTable
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.metrics import stats
from vllm_mooncake_ascend.types import RequestId


class CombinedSchedulerSide:
    """One per engine (DP rank)."""

    def __init__(self, p2p: P2PSchedulerSide, pool: PoolSchedulerSide) -> None:
        self._p2p = p2p
        self._pool = pool
        self._from_pool: dict[RequestId, bool] = {}
        """Requests with a prefill engine, and whether the pool has been asked for them."""
        self._offered_by_pool: set[RequestId] = set()
        """Requests whose last answer to vLLM was the pool's."""

    def bind_block_pool(self, block_pool: Any) -> None:
        self._p2p.bind_block_pool(block_pool)
        self._pool.bind_block_pool(block_pool)

    def start(self, ranks: tuple[RankLayout, ...]) -> None:
        self._p2p.start(ranks)
        self._pool.start(ranks)

    # --- requests -------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._p2p.on_new_request(request)
        request_id = requests.request_id(request)
        has_prefill_engine = self._p2p.wants(request_id)
        if has_prefill_engine:
            self._from_pool[request_id] = False
        self._pool.on_new_request(request, may_load=not has_prefill_engine)

    def num_new_matched_tokens(self, request: Any, num_local_tokens: int) -> int | None:
        request_id = requests.request_id(request)
        self._offered_by_pool.discard(request_id)
        num_tokens = self._p2p.num_new_matched_tokens(request, num_local_tokens)
        if num_tokens is None or num_tokens > 0:
            return num_tokens
        if self._from_pool.get(request_id) is False:
            self._from_pool[request_id] = True
            self._pool.look_up(request)
        num_tokens = self._pool.num_new_matched_tokens(request, num_local_tokens)
        if num_tokens:
            self._offered_by_pool.add(request_id)
        return num_tokens

    def update_state_after_alloc(self, request: Any, block_ids: BlockTable, num_remote_tokens: int) -> None:
        is_of_pool = requests.request_id(request) in self._offered_by_pool
        self._p2p.update_state_after_alloc(request, block_ids, 0 if is_of_pool else num_remote_tokens)
        self._pool.update_state_after_alloc(request, block_ids, num_remote_tokens if is_of_pool else 0)

    def hit_sources(self, request: Any, num_tokens: int) -> dict[Any, int]:
        """Asked right after the allocation, before any other question about the request."""
        is_of_pool = requests.request_id(request) in self._offered_by_pool
        return (self._pool if is_of_pool else self._p2p).hit_sources(request, num_tokens)

    def request_finished(self, request: Any, block_ids: BlockTable) -> dict[str, Any] | None:
        request_id = requests.request_id(request)
        self._from_pool.pop(request_id, None)
        self._offered_by_pool.discard(request_id)
        self._pool.request_finished(request, block_ids)
        return self._p2p.request_finished(request, block_ids)

    # --- steps ----------------------------------------------------------------------------------------------------

    def observe_step(self, scheduler_output: Any) -> None:
        self._p2p.observe_step(scheduler_output)
        self._pool.observe_step(scheduler_output)

    def has_pending(self) -> bool:
        return self._p2p.has_pending() or self._pool.has_pending()

    @property
    def is_waiting(self) -> bool:
        return self._p2p.is_waiting or self._pool.is_waiting

    @property
    def awaits_workers(self) -> bool:
        return self._p2p.awaits_workers or self._pool.awaits_workers

    @property
    def is_patient(self) -> bool:
        return self._pool.is_patient and not self._p2p.is_waiting

    @property
    def wants_steps(self) -> bool:
        return self._p2p.wants_steps or self._pool.wants_steps

    def take_step(self) -> StepMetadata:
        p2p, pool = self._p2p.take_step(), self._pool.take_step()
        return StepMetadata(p2p=p2p.p2p, pool=pool.pool, reports=p2p.reports + pool.reports, echo=max(p2p.echo, pool.echo))

    def update_results(self, results: WorkerMetadata) -> None:
        self._p2p.update_results(results)
        self._pool.update_results(results)

    def release_pending_blocks(self) -> bool:
        has_freed = [self._p2p.release_pending_blocks(), self._pool.release_pending_blocks()]
        return any(has_freed)

    def reset_cache(self) -> None:
        self._p2p.reset_cache()
        self._pool.reset_cache()

    def take_events(self) -> list[Any]:
        return [*self._p2p.take_events(), *self._pool.take_events()]

    def take_stats(self) -> dict[str, Any]:
        return _merged(self._p2p.take_stats(), self._pool.take_stats())

    def shutdown(self) -> None:
        self._p2p.shutdown()
        self._pool.shutdown()


class CombinedWorkerSide:
    """One per worker process."""

    def __init__(self, p2p: P2PWorkerSide, pool: PoolWorkerSide) -> None:
        self._p2p = p2p
        self._pool = pool

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> RankLayout:
        layout = self._p2p.register_kv_caches(kv_caches)
        self._pool.register(layout)
        return layout

    def begin_step(self, step: StepMetadata) -> None:
        self._p2p.begin_step(step)
        self._pool.begin_step(step)

    def take_results(self) -> WorkerMetadata | None:
        p2p, pool = self._p2p.take_results(), self._pool.take_results()
        if p2p is None or pool is None:
            return p2p or pool
        return WorkerMetadata(p2p=p2p.p2p, pool=pool.pool)

    def take_stats(self) -> dict[str, Any]:
        return _merged(self._p2p.take_stats(), self._pool.take_stats())

    def shutdown(self) -> None:
        self._p2p.shutdown()
        self._pool.shutdown()


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return stats.merge(one, other) if one and other else one or other
