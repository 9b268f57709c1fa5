"""The scheduler-role side of P2P: translates vLLM's hooks into events and actions into vLLM's terms.

Runs on the engine's one scheduler thread; nothing here waits. All decisions are the machines' (`p2p`), reached through
`runtime.p2p_scheduler`.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import uuid
from collections.abc import Callable
from typing import Any

from vllm_mooncake_ascend.config import P2PConfig
from vllm_mooncake_ascend.connectors import identity, queue_spin, requests, versions
from vllm_mooncake_ascend.connectors.device import device_type
from vllm_mooncake_ascend.connectors.envelopes import StepMetadata, WorkerMetadata
from vllm_mooncake_ascend.connectors.progress import Chunk, Progress
from vllm_mooncake_ascend.connectors.versions import HAS_FAILED_RECEIVES, BlockPins
from vllm_mooncake_ascend.errors import ConfigError, RemoteProtocolError
from vllm_mooncake_ascend.layout import blocks, compatibility
from vllm_mooncake_ascend.layout.plane import GroupLayout, RankLayout
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.runtime.clock import wall_s
from vllm_mooncake_ascend.runtime.p2p_scheduler import P2PScheduler
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import params
from vllm_mooncake_ascend.wire.messages import PROTOCOL_VERSION
from vllm_mooncake_ascend.wire.steps import WorkerStep

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Offered:
    """A prefill request of this engine."""

    transfer_id: TransferId
    """Under which its KV will be offered."""
    number: int
    """Of the request: its id may come again while a step of it is under way."""


class P2PSchedulerSide:
    """One per engine (DP rank)."""

    def __init__(self, vllm_config: Any, config: P2PConfig, *, wake: Callable[[], None]) -> None:
        transfer = vllm_config.kv_transfer_config
        self._vllm_config = vllm_config
        self._config = config
        self._shell = P2PScheduler(
            config=config,
            incarnation=Incarnation(uuid.uuid4().hex),
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
            wake=wake,
        )
        self._groups: tuple[GroupLayout, ...] = ()
        self._pins: BlockPins | None = None
        self._for_workers: list[Any] = []
        self._offered: dict[RequestId, _Offered] = {}
        self._numbers = itertools.count()
        self._progress: Progress | None = None
        """Of prefills that are offered while they run."""
        self._echo = 0
        self._wanted: dict[RequestId, int] = {}
        """Decode requests with a remote transfer, and the local hit vLLM found at its last question."""

    # --- set-up ---------------------------------------------------------------------------------------------------

    def bind_block_pool(self, block_pool: Any) -> None:
        self._pins = BlockPins(block_pool)

    @property
    def _block_pins(self) -> BlockPins:
        assert self._pins is not None, "vLLM binds the block pool before it hands over handshake metadata and requests"
        return self._pins

    def start(self, ranks: tuple[RankLayout, ...]) -> None:
        """Open the side channel. Called once, after all workers registered their memory, before the first request.

        Raises:
            ConfigError: nobody could read this memory, or the address cannot be listened on.
        """
        if not all(rank.session for rank in ranks):
            raise ConfigError(
                "MooncakeConnectorV1 was given the handshake of MooncakeStoreConnectorV1; in a MultiConnector put "
                "MooncakeConnectorV1 first, or use it alone with prefix_pooling"
            )
        self._groups = ranks[0].groups
        transfer = self._vllm_config.kv_transfer_config
        # An engine of both roles reads at the end only: it would hold blocks for a prefill of its peer, whose prefill may need
        # blocks that the peer holds for one of ours.
        reads_early = self._config.transfer_mode == "stream" and not transfer.is_kv_producer
        # Blocks that leave a sliding window are given away while the prefill runs.
        may_publish = not any(group.window_tokens or group.has_recurrent_state for group in self._groups)
        if self._config.transfer_mode == "stream" and transfer.is_kv_producer and may_publish:
            self._progress = Progress(groups=self._groups, follows_decode=False)
        fingerprint = compatibility.fingerprint(
            identity.cache_identity(self._vllm_config, device_type()), ranks, protocol_version=PROTOCOL_VERSION
        )
        self._shell.start(
            ranks,
            fingerprint,
            num_blocks=self._block_pins.num_blocks,
            can_report_unknown_at_once=HAS_FAILED_RECEIVES,
            publishes=self._progress is not None,
            reads_early=reads_early,
        )
        num_tamed = queue_spin.tame() if self._config.tame_queue_spin else 0
        logger.info(
            "KV transfer is ready: address=%s ranks=%d offers_while_computing=%s reads_while_computed=%s protocol=%s "
            "load_failure_policy=%s queues_tamed=%d",
            self._shell.address,
            len(ranks),
            self._progress is not None,
            reads_early,
            self._config.protocol,
            self._config.load_failure_policy,
            num_tamed,
        )

    # --- requests -------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Begin what the request's kv_transfer_params ask; what cannot be served is counted and computed locally."""
        try:
            wish = requests.wish(request, secret=self._config.secret, now_s=wall_s())
            if isinstance(wish, params.RemoteDecode):
                self._offer(request, wish)
            elif isinstance(wish, params.RemotePrefill):
                self._fetch(request, wish)
        except RemoteProtocolError as error:
            self._shell.count("requests_ignored_total", "bad_params")
            logger.warning("kv_transfer_params ignored: request_id=%s reason=%s", request.request_id, error)

    def wants(self, request_id: RequestId) -> bool:
        """Whether the request's KV is to come from a prefill engine."""
        return request_id in self._wanted

    def num_new_matched_tokens(self, request: Any, num_local_tokens: int) -> int | None:
        request_id = requests.request_id(request)
        if request_id not in self._wanted:
            return 0
        num_remote_tokens = self._shell.remote_tokens(request_id, num_local_tokens)
        if num_remote_tokens is not None:
            self._wanted[request_id] = num_local_tokens
        return num_remote_tokens

    def hit_sources(self, request: Any, num_tokens: int) -> dict[Any, int]:  # noqa: ARG002
        return {versions.hit_source("P2P"): num_tokens}

    def update_state_after_alloc(self, request: Any, block_ids: events.BlockTable, num_remote_tokens: int) -> None:
        request_id = requests.request_id(request)
        if self._progress is not None and request_id in self._offered:
            self._progress.admitted(request, block_ids)
        if request_id not in self._wanted:
            return
        num_local_tokens = self._wanted[request_id]
        self._shell.feed_consumer(
            events.BlocksAllocated(
                request_id=request_id,
                num_local_tokens=num_local_tokens,
                num_remote_tokens=num_remote_tokens,
                block_ids=block_ids,
                loaded_block_ids=tuple(
                    block_id
                    for group, table in zip(self._groups, block_ids, strict=True)
                    for block_id in blocks.loaded_block_ids(
                        group, num_local_tokens, num_local_tokens + num_remote_tokens, table
                    )
                ),
            )
        )
        self._apply_pending()

    def request_finished(self, request: Any, block_ids: events.BlockTable) -> dict[str, Any] | None:
        """Never delays vLLM's own freeing: what a reader still needs is pinned by a reference of ours."""
        request_id = requests.request_id(request)
        if self._wanted.pop(request_id, None) is not None:
            self._shell.feed_consumer(events.RequestEnded(request_id=request_id))
        offered = self._offered.pop(request_id, None)
        if offered is None:
            return None
        if self._progress is not None:
            self._progress.ended(request_id)
        num_tokens = min(requests.num_written_tokens(request), requests.num_prompt_tokens(request))
        has_kv = requests.ended_with_kv(request) and num_tokens == requests.num_prompt_tokens(request)
        self._shell.feed_producer(
            events.PrefillEnded(
                request_id=request_id,
                has_kv=has_kv,
                num_tokens=num_tokens if has_kv else 0,
                block_ids=blocks.tables_between(self._groups, 0, num_tokens if has_kv else 0, block_ids),
                reason="" if has_kv else requests.end_reason(request),
            )
        )
        self._apply_pending()
        return self._issue(offered.transfer_id, request, num_tokens) if has_kv else None

    # --- steps ----------------------------------------------------------------------------------------------------

    def observe_step(self, scheduler_output: Any) -> None:
        for request_id in getattr(scheduler_output, "preempted_req_ids", None) or ():
            if request_id in self._offered:
                self._shell.feed_producer(events.PrefillPreempted(request_id=RequestId(request_id)))
                if self._progress is not None:
                    self._progress.preempted(RequestId(request_id))
        self._echo = 0
        if self._progress is not None and len(self._progress):
            self._echo = self._progress.scheduled(scheduler_output, self._number_of)

    def has_pending(self) -> bool:
        self._apply_pending()
        return bool(self._for_workers)

    @property
    def is_waiting(self) -> bool:
        """vLLM steps again and again for requests that cannot run: their KV is not here, a read of an aborted one has not
        ended, or leases hold the blocks they need."""
        return bool(self._wanted or self._offered or self._shell.waits_for_peers())

    @property
    def awaits_workers(self) -> bool:
        return self._shell.awaits_ranks()

    @property
    def is_patient(self) -> bool:
        """Never: vLLM steps for requests alone."""
        return False

    @property
    def wants_steps(self) -> bool:
        """Never: an idle engine sleeps, whatever its leases hold."""
        return False

    def take_step(self) -> StepMetadata:
        self._apply_pending()
        if not self._for_workers:
            return StepMetadata(echo=self._echo)
        pending, self._for_workers = self._for_workers, []
        reports = tuple(action.report for action in pending if isinstance(action, actions.ReportReceive))
        return StepMetadata(p2p=_worker_step(pending), reports=reports, echo=self._echo)

    def update_results(self, results: WorkerMetadata) -> None:
        for ended in results.p2p.ended:
            self._shell.feed_consumer(events.RankReadEnded(ended=ended))
        if self._progress is not None:
            for chunk in self._progress.written(results.echo):
                self._publish(chunk)
        self._apply_pending()

    def release_pending_blocks(self) -> bool:
        """Carry out releases that have come in; True when that freed blocks, so that vLLM need not preempt."""
        num_before = self._block_pins.num_pinned
        self._apply_pending()
        return self._block_pins.num_pinned < num_before

    def reset_cache(self) -> None:
        """vLLM drops its cached blocks (new weights, say): nobody may read them any more."""
        self._shell.feed_producer(events.LeasesRevoked(reason="reset"))
        self._apply_pending()

    def take_events(self) -> list[Any]:
        """None: events tell of caches, and what is being moved is in none."""
        return []

    def take_stats(self) -> dict[str, Any]:
        return self._shell.take_stats()

    def shutdown(self) -> None:
        self._shell.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _offer(self, request: Any, wish: params.RemoteDecode) -> None:
        if not self._vllm_config.kv_transfer_config.is_kv_producer:
            raise RemoteProtocolError("do_remote_decode was sent to an engine whose kv_role is kv_consumer")
        request_id = requests.request_id(request)
        self._shell.feed_producer(
            events.PrefillArrived(
                request_id=request_id,
                wanted_id=wish.transfer_id,
                fresh_id=TransferId(uuid.uuid4().hex),
                prompt_digest=requests.prompt_digest(request),
                num_prompt_tokens=requests.num_prompt_tokens(request),
            )
        )
        self._apply_pending()

    def _fetch(self, request: Any, wish: params.RemotePrefill) -> None:
        if not self._vllm_config.kv_transfer_config.is_kv_consumer:
            raise RemoteProtocolError("do_remote_prefill was sent to an engine whose kv_role is kv_producer")
        self._shell.check_peer_allowed(wish.address)
        request_id = requests.request_id(request)
        self._wanted[request_id] = 0
        # Of a request that its API server refused vLLM tells by a stand-in: aborted at once, with a prompt of one token. It
        # comes and goes as the reader that the transfer was for, so that prefill is freed (0.30+).
        is_stand_in = getattr(request, "abort_immediately", False)
        self._shell.feed_consumer(
            events.RequestArrived(
                request_id=request_id,
                transfer=wish,
                prompt_digest=wish.prompt_digest if is_stand_in else requests.prompt_digest(request),
                num_prompt_tokens=requests.num_prompt_tokens(request),
            )
        )

    def _number_of(self, request_id: RequestId) -> int | None:
        offered = self._offered.get(request_id)
        return None if offered is None else offered.number

    def _publish(self, chunk: Chunk) -> None:
        """Tell of whole blocks, in every group, that a step has written. The request still has them: it would have been told
        of otherwise before."""
        if self._number_of(chunk.request_id) != chunk.chain:
            return
        num_tokens = blocks.tokens_of_whole_blocks(chunk.num_tokens, self._groups)
        if num_tokens == 0:
            return
        self._shell.feed_producer(
            events.PrefillProgressed(
                request_id=chunk.request_id,
                num_tokens=num_tokens,
                block_ids=blocks.tables_between(self._groups, 0, num_tokens, chunk.block_ids),
            )
        )
        self._apply_pending()

    def _issue(self, transfer_id: TransferId, request: Any, num_tokens: int) -> dict[str, Any]:
        address = self._shell.address
        assert address is not None, "a producer listens"
        transfer = params.RemotePrefill(
            transfer_id=transfer_id,
            incarnation=self._shell.incarnation,
            address=address,
            num_tokens=num_tokens,
            prompt_digest=requests.prompt_digest(request),
        )
        num_dp_ranks = self._vllm_config.parallel_config.data_parallel_size
        issued = params.issue(transfer, secret=self._config.secret, now_s=wall_s())
        return issued | ({"remote_dp_size": num_dp_ranks} if num_dp_ranks > 1 else {})

    def _apply_pending(self) -> None:
        """Do what the machines ask of this thread (pins, names); keep what is the workers' for the next step."""
        for action in self._shell.drain():
            match action:
                case actions.PinBlocks():
                    self._block_pins.pin(action.block_ids)
                case actions.UnpinBlocks():
                    self._block_pins.unpin(action.block_ids)
                case actions.NameTransfer():
                    self._offered[action.request_id] = _Offered(action.transfer_id, next(self._numbers))
                case _:
                    self._for_workers.append(action)


def _worker_step(pending: list[Any]) -> WorkerStep:
    by_kind: dict[type, list[Any]] = {}
    is_known: dict[str, bool] = {}
    for action in pending:
        by_kind.setdefault(type(action), []).append(action)
        if isinstance(action, actions.ShareLayout):
            is_known[action.peer.incarnation] = True
        elif isinstance(action, actions.ForgetLayout):
            is_known[action.incarnation] = False
    return WorkerStep(
        peers=tuple(action.peer for action in by_kind.get(actions.ShareLayout, ())),
        reads=tuple(action.order for action in by_kind.get(actions.OrderRead, ())),
        cancels=tuple(action.request_id for action in by_kind.get(actions.CancelRead, ())),
        # A worker forgets last: a peer that was forgotten and met again between two steps must not be among these.
        forget=tuple(Incarnation(incarnation) for incarnation, stays in is_known.items() if not stays),
    )
