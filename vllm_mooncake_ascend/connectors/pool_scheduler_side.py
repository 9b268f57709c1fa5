"""The scheduler-role side of the prefix pool: translates vLLM's hooks into events and actions into vLLM's terms.

Runs on the engine's one scheduler thread; nothing here waits. All decisions are the machines' (`pool`), reached through
`runtime.pool_scheduler`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any

from vllm_mooncake_ascend.config.pool import PoolConfig
from vllm_mooncake_ascend.connectors import adapters, hashing, identity, kv_events, queue_spin, requests, versions
from vllm_mooncake_ascend.connectors.device import device_type
from vllm_mooncake_ascend.connectors.envelopes import StepMetadata, WorkerMetadata
from vllm_mooncake_ascend.connectors.kv_events import KvEvents
from vllm_mooncake_ascend.connectors.pool_store import has_seals, make_store
from vllm_mooncake_ascend.connectors.progress import BlockTable, Chunk, Progress
from vllm_mooncake_ascend.connectors.versions import HAS_FAILED_RECEIVES, BlockPins, LocalCache
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.layout import blocks
from vllm_mooncake_ascend.layout.plane import GroupLayout, RankLayout
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.planner import pool_keys
from vllm_mooncake_ascend.pool import actions, events
from vllm_mooncake_ascend.pool.settings import PoolSettings
from vllm_mooncake_ascend.runtime.pool_scheduler import PoolSchedulerShell
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.pool_steps import PoolStep

logger = logging.getLogger(__name__)


class PoolSchedulerSide:
    """One per engine (DP rank).

    Raises:
        ConfigError: block hashes of this engine cannot be shared, and the settings do not say that this is meant.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: PoolConfig, *, wake: Callable[[], None]) -> None:
        self._vllm_config = vllm_config
        self._config = config
        self._wake = wake
        self._hashing = hashing.hashing_of(vllm_config, kv_cache_config)
        self._identity = identity.cache_identity(vllm_config, device_type())
        self._private_reason = _private_reason(vllm_config, config)
        self._pins: BlockPins | None = None
        self._local: LocalCache | None = None
        self._engine: _Started | None = None
        self._asked: dict[RequestId, int] = {}
        """Requests that vLLM asked about, and the local hit it found at its last question."""
        self._for_workers: list[Any] = []

    # --- set-up ---------------------------------------------------------------------------------------------------

    def bind_block_pool(self, block_pool: Any) -> None:
        self._pins = BlockPins(block_pool)
        self._local = LocalCache(block_pool)

    def start(self, ranks: tuple[RankLayout, ...]) -> None:
        """Join the pool. Called once, after all workers registered their memory, before the first request."""
        assert self._pins is not None, "vLLM binds the block pool before it hands over handshake metadata"
        generation = uuid.uuid4().hex if self._private_reason else self._config.weights_version
        shards = pool_keys.shards(ranks)
        settings = PoolSettings(
            namespace=self._namespace(generation),
            groups=ranks[0].groups,
            hash_tokens=self._hashing.block_tokens,
            num_ranks=len(ranks),
            can_report_unknown_at_once=HAS_FAILED_RECEIVES,
            tells_events=kv_events.are_wanted(self._vllm_config),
            max_saved_blocks=int(self._pins.num_blocks * self._config.max_saved_ratio),
            min_hit_tokens=self._config.min_hit_tokens,
            lookup_wait_s=self._config.lookup_wait_s,
            load_wait_s=self._config.load_wait_s,
            object_lease_s=self._config.object_lease_s,
        )
        shell = PoolSchedulerShell(
            settings=settings,
            shards=shards,
            store=make_store(self._config, segment_bytes=0),
            is_strict=self._config.is_strict,
            wake=self._wake,
        )
        self._engine = _Started(
            shell=shell,
            groups=ranks[0].groups,
            shards=shards,
            progress=Progress(groups=ranks[0].groups, follows_decode=self._config.save_decode),
            events=KvEvents(ranks[0].groups, self._hashing.block_tokens) if settings.tells_events else None,
        )
        shell.start()
        num_tamed = queue_spin.tame() if self._config.tame_queue_spin else 0
        logger.info(
            "prefix pool: master=%s namespace=%s hashing=%s shards=%d loads=%s saves=%s load_failure_policy=%s queues_tamed=%d",
            self._config.master_address,
            settings.namespace,
            hashing.fingerprint(self._hashing),
            len(shards),
            self._config.loads,
            self._saves,
            self._config.load_failure_policy,
            num_tamed,
        )

    @property
    def shared_namespace(self) -> str:
        """The namespace that this engine shares with others; "" when its block hashes are nobody else's."""
        return "" if self._private_reason else self._namespace(self._config.weights_version)

    @property
    def hash_tokens(self) -> int:
        """Tokens of one block hash."""
        return self._hashing.block_tokens

    # --- requests -------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any, *, may_load: bool = True) -> None:
        """`may_load` False: another source goes first; `look_up` when it has let the request down."""
        self._arrived(request, may_load=may_load and self._config.loads and requests.may_use_cached(request))

    def look_up(self, request: Any) -> None:
        """Look into the pool after all."""
        self._arrived(request, may_load=self._config.loads and requests.may_use_cached(request))

    def num_new_matched_tokens(self, request: Any, num_local_tokens: int) -> int | None:
        request_id = requests.request_id(request)
        num_tokens = self._started.shell.hit_tokens(request_id, num_local_tokens)
        if num_tokens:
            self._asked[request_id] = num_local_tokens
        return num_tokens

    def hit_sources(self, request: Any, num_tokens: int) -> dict[Any, int]:  # noqa: ARG002
        return {versions.hit_source("EXTERNAL_UNSPECIFIED"): num_tokens}

    def update_state_after_alloc(self, request: Any, block_ids: BlockTable, num_remote_tokens: int) -> None:
        started, request_id = self._started, requests.request_id(request)
        if self._saves:
            started.progress.admitted(request, block_ids)
        num_local_tokens = self._asked.pop(request_id, 0)
        end_token = num_local_tokens + num_remote_tokens
        loaded = (
            blocks.loaded_block_ids(group, num_local_tokens, end_token, table)
            for group, table in zip(started.groups, block_ids, strict=True)
        )
        started.shell.feed(
            events.BlocksAllocated(
                request_id=request_id,
                num_local_tokens=num_local_tokens,
                num_remote_tokens=num_remote_tokens,
                block_ids=block_ids,
                loaded_block_ids=tuple(block_id for ids in loaded for block_id in ids),
            )
        )
        self._apply_pending()

    def request_finished(self, request: Any, block_ids: BlockTable) -> None:
        """What the last step computed is saved from here: vLLM frees the blocks before it tells of that step's output."""
        started, request_id = self._started, requests.request_id(request)
        self._asked.pop(request_id, None)
        started.progress.ended(request_id)
        chain = started.shell.chain(request_id)
        if self._saves and chain is not None and requests.ended_with_kv(request):
            num_tokens = min(requests.num_written_tokens(request), self._last_token(request))
            self._written(Chunk(request_id=request_id, chain=chain, num_tokens=num_tokens, block_ids=block_ids))
        started.shell.feed(events.RequestEnded(request_id=request_id))
        self._apply_pending()
        started.requests.pop(request_id, None)

    # --- steps ----------------------------------------------------------------------------------------------------

    def observe_step(self, scheduler_output: Any) -> None:
        started = self._started
        for request_id in getattr(scheduler_output, "preempted_req_ids", None) or ():
            started.progress.preempted(RequestId(request_id))
            started.shell.feed(events.RequestPreempted(request_id=RequestId(request_id)))
        started.echo = started.progress.scheduled(scheduler_output, started.shell.chain) if len(started.progress) else 0

    def has_pending(self) -> bool:
        return bool(self._for_workers) or self._started.shell.has_pending

    @property
    def is_waiting(self) -> bool:
        return self._started.shell.num_waiting > 0 or self.wants_steps

    @property
    def awaits_workers(self) -> bool:
        return self._started.shell.num_loading > 0

    @property
    def is_patient(self) -> bool:
        return self._started.shell.num_waiting == 0

    @property
    def wants_steps(self) -> bool:
        """Blocks are kept for a save, or a load that was given up, until its end is told, which only a step's output does."""
        return self._block_pins.num_pinned > 0 and not self._started.shell.has_failed

    def take_step(self) -> StepMetadata:
        started = self._started
        self._apply_pending()
        if not self._for_workers:
            return StepMetadata(echo=started.echo)
        pending, self._for_workers = self._for_workers, []
        saves = tuple(action.order for action in pending if isinstance(action, actions.OrderSave))
        step = PoolStep(
            shards=started.shards if saves and not started.workers_know_shards else (),
            cancels=tuple(action.load_id for action in pending if isinstance(action, actions.CancelLoad)),
            loads=tuple(action.order for action in pending if isinstance(action, actions.OrderLoad)),
            saves=saves,
        )
        started.workers_know_shards |= bool(saves)
        reports = tuple(action.report for action in pending if isinstance(action, actions.ReportReceive))
        return StepMetadata(pool=step, reports=reports, echo=started.echo)

    def update_results(self, results: WorkerMetadata) -> None:
        started = self._started
        for load in results.pool.loads:
            started.shell.feed(events.RankLoadEnded(ended=load))
        for save in results.pool.saves:
            started.shell.feed(events.RankSaveEnded(ended=save))
        for chunk in started.progress.written(results.echo):
            self._written(chunk)
        self._apply_pending()

    def release_pending_blocks(self) -> bool:
        num_before = self._block_pins.num_pinned
        self._apply_pending()
        return self._block_pins.num_pinned < num_before

    def reset_cache(self) -> None:
        """vLLM drops its cached blocks, for new weights say: from now on this engine shares with itself alone."""
        namespace = self._namespace(uuid.uuid4().hex)
        logger.info("prefix pool: the cache was reset, going on in a namespace of our own: namespace=%s", namespace)
        self._started.shell.feed(events.PoolReset(namespace=namespace))
        self._apply_pending()

    def take_events(self) -> list[Any]:
        told = self._started.events
        return [] if told is None else told.take()

    def take_stats(self) -> dict[str, Any]:
        data = self._started.shell.take_stats()
        if self._private_reason and data:
            data.setdefault("gauges", {})[names.POOL_HASHES_PRIVATE] = 1
        return data

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shell.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _started(self) -> _Started:
        assert self._engine is not None, "vLLM hands over handshake metadata before the first request"
        return self._engine

    @property
    def _block_pins(self) -> BlockPins:
        assert self._pins is not None, "vLLM binds the block pool before the first request"
        return self._pins

    @property
    def _saves(self) -> bool:
        return self._config.saves_as(self._vllm_config.kv_transfer_config.kv_role)

    def _namespace(self, generation: str) -> str:
        return pool_keys.namespace(
            pool_keys.NamespaceFacts(
                identity=self._identity,
                hashing=self._hashing,
                tenant=self._config.tenant,
                generation=generation,
                is_sealed=has_seals(device_type()),
            )
        )

    def _arrived(self, request: Any, *, may_load: bool) -> None:
        started, request_id = self._started, requests.request_id(request)
        if started.events is not None:
            started.requests[request_id] = request
        hashes = adapters.pool_hashes(request)
        may_save = self._saves and hashes is not None and not requests.may_be_rewritten(request)
        if hashes is None:
            hashes, may_load = (), False
        started.shell.feed(
            events.RequestArrived(
                request_id=request_id,
                hashes=hashes,
                num_prompt_tokens=requests.num_prompt_tokens(request),
                num_local_tokens=self._num_local_tokens(request) if may_load else 0,
                may_load=may_load,
                may_save=may_save,
            )
        )

    def _num_local_tokens(self, request: Any) -> int:
        """What the local cache seems to have of the prompt."""
        assert self._local is not None
        group = self._started.groups[0]
        if len(self._started.groups) > 1 or group.tokens_per_block != self._hashing.block_tokens:
            return 0
        return self._local.num_prefix_blocks(request.block_hashes) * group.tokens_per_block

    def _last_token(self, request: Any) -> int:
        """Tokens of a finished request that may be saved. The KV of the last sampled one was never computed."""
        if not self._config.save_decode:
            return requests.num_prompt_tokens(request)
        return max(requests.num_prompt_tokens(request), int(request.num_tokens) - 1)

    def _written(self, chunk: Chunk) -> None:
        self._started.shell.feed(
            events.ChunkComputed(
                request_id=chunk.request_id, chain=chunk.chain, num_tokens=chunk.num_tokens, block_ids=chunk.block_ids
            )
        )
        self._apply_pending()

    def _request_of(self, action: Any) -> Any:
        return self._started.requests.get(action.order.request_id) if isinstance(action, actions.OrderSave) else None

    def _apply_pending(self) -> None:
        """Do what the machine asks of this thread (pins); keep what is the workers' for the next step."""
        started = self._started
        for action in started.shell.drain():
            if started.events is not None:
                started.events.note(action, self._request_of(action))
            match action:
                case actions.Stored() | actions.NotStored() | actions.Gone():
                    pass
                case actions.PinBlocks():
                    self._block_pins.pin(action.block_ids)
                case actions.UnpinBlocks():
                    self._block_pins.unpin(action.block_ids)
                case _:
                    self._for_workers.append(action)


class _Started:
    """What exists once the engine has started."""

    def __init__(
        self,
        *,
        shell: PoolSchedulerShell,
        groups: tuple[GroupLayout, ...],
        shards: tuple[pool_keys.Shard, ...],
        progress: Progress,
        events: KvEvents | None,
    ) -> None:
        self.shell = shell
        self.groups = groups
        self.shards = shards
        self.progress = progress
        self.events = events
        self.requests: dict[RequestId, Any] = {}
        """vLLM's live requests, where somebody listens to events."""
        self.workers_know_shards = False
        self.echo = 0
        """Number of the step that is being built."""


def _private_reason(vllm_config: Any, config: PoolConfig) -> str:
    reason = hashing.private_reason(vllm_config)
    if reason and not config.allow_private_hashes:
        raise ConfigError(f"{reason}; or set allow_private_hashes to true, and this engine will share with nobody but itself")
    if reason:
        logger.warning("prefix pool: this engine will share with nobody but itself: %s", reason)
    return reason
