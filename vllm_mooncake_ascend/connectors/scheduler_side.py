"""The scheduler-role half of MooncakeConnectorV1: translates vLLM's hooks into events and actions into vLLM's terms.

Runs on the engine's one scheduler thread; nothing here waits but the bounded sleep of an empty step. All decisions are
the machines' (`p2p`), reached through `runtime.p2p_scheduler`.
"""

from __future__ import annotations

import collections
import logging
import uuid
from typing import Any

from vllm_mooncake_ascend.config import P2PConfig
from vllm_mooncake_ascend.connectors import queue_spin, requests
from vllm_mooncake_ascend.connectors.versions import HAS_FAILED_RECEIVES, BlockPins
from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.layout import blocks
from vllm_mooncake_ascend.layout.plane import GroupLayout, RankLayout
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.runtime.clock import wall_s
from vllm_mooncake_ascend.runtime.p2p_scheduler import P2PScheduler
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import params
from vllm_mooncake_ascend.wire.steps import EMPTY_STEP, WorkerResults, WorkerStep

logger = logging.getLogger(__name__)


class SchedulerSide:
    """One per engine (DP rank)."""

    def __init__(self, vllm_config: Any, config: P2PConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        self._vllm_config = vllm_config
        self._config = config
        self._shell = P2PScheduler(
            config=config,
            incarnation=Incarnation(uuid.uuid4().hex),
            produces=transfer.is_kv_producer,
            consumes=transfer.is_kv_consumer,
        )
        self._groups: tuple[GroupLayout, ...] = ()
        self._pins: BlockPins | None = None
        self._for_workers: list[Any] = []
        self._offered: dict[RequestId, TransferId] = {}
        """Prefill requests of this engine and the ids under which their KV will be offered."""
        self._wanted: dict[RequestId, int] = {}
        """Decode requests with a remote transfer, and the local hit vLLM found at its last question."""
        self._steps_in_flight: collections.deque[bool] = collections.deque(maxlen=64)
        """One entry a step whose output has not come back: whether it had anything to run."""
        self._may_sleep = vllm_config.parallel_config.data_parallel_size == 1

    # --- set-up ---------------------------------------------------------------------------------------------------

    def bind_block_pool(self, block_pool: Any) -> None:
        self._pins = BlockPins(block_pool)

    @property
    def _block_pins(self) -> BlockPins:
        assert self._pins is not None, "vLLM binds the block pool before it hands over handshake metadata and requests"
        return self._pins

    def start(self, ranks: tuple[RankLayout, ...], fingerprint: dict[str, str]) -> None:
        """Open the side channel. Called once, after all workers registered their memory, before the first request."""
        self._groups = ranks[0].groups
        self._shell.start(
            ranks,
            fingerprint,
            num_blocks=self._block_pins.num_blocks,
            can_report_unknown_at_once=HAS_FAILED_RECEIVES,
        )
        num_tamed = queue_spin.tame() if self._config.tame_queue_spin else 0
        logger.info(
            "KV transfer is ready: address=%s ranks=%d transfer_mode=%s protocol=%s load_failure_policy=%s queues_tamed=%d",
            self._shell.address,
            len(ranks),
            self._config.transfer_mode,
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

    def num_new_matched_tokens(self, request: Any, num_local_tokens: int) -> tuple[int | None, bool]:
        request_id = requests.request_id(request)
        if request_id not in self._wanted:
            return 0, False
        num_remote_tokens = self._shell.remote_tokens(request_id, num_local_tokens)
        if num_remote_tokens is None:
            return None, False
        self._wanted[request_id] = num_local_tokens
        return num_remote_tokens, num_remote_tokens > 0

    def update_state_after_alloc(self, request: Any, block_ids: events.BlockTable, num_remote_tokens: int) -> None:
        request_id = requests.request_id(request)
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

    def request_finished(self, request: Any, block_ids: events.BlockTable) -> tuple[bool, dict[str, Any] | None]:
        """Never delays vLLM's own freeing: what a reader still needs is pinned by a reference of ours."""
        request_id = requests.request_id(request)
        if self._wanted.pop(request_id, None) is not None:
            self._shell.feed_consumer(events.RequestEnded(request_id=request_id))
        transfer_id = self._offered.pop(request_id, None)
        if transfer_id is None:
            return False, None
        num_tokens = min(requests.num_written_tokens(request), requests.num_prompt_tokens(request))
        has_kv = requests.ended_with_kv(request) and num_tokens == requests.num_prompt_tokens(request)
        self._shell.feed_producer(
            events.PrefillEnded(
                request_id=request_id,
                has_kv=has_kv,
                num_tokens=num_tokens if has_kv else 0,
                block_ids=tuple(
                    tuple(table[: blocks.num_blocks_for(num_tokens, group.tokens_per_block)])
                    for group, table in zip(self._groups, block_ids, strict=True)
                )
                if has_kv
                else (),
                reason="" if has_kv else requests.end_reason(request),
            )
        )
        self._apply_pending()
        if not has_kv:
            return False, None
        return False, self._issue(transfer_id, request, num_tokens)

    # --- steps ----------------------------------------------------------------------------------------------------

    def build_step(self, scheduler_output: Any) -> WorkerStep:
        """The workers' part of this step; sleeps a moment where vLLM would spin for a request that waits for KV."""
        for request_id in getattr(scheduler_output, "preempted_req_ids", None) or ():
            if request_id in self._offered:
                self._shell.feed_producer(events.PrefillPreempted(request_id=RequestId(request_id)))
        runs_something = scheduler_output.total_num_scheduled_tokens > 0
        pending = self._take_for_workers()
        if not pending and not runs_something and self._is_waiting and not any(self._steps_in_flight):
            self._shell.wait(self._config.empty_step_wait_s)
            pending = self._take_for_workers()
        self._steps_in_flight.append(runs_something)
        return _worker_step(pending) if pending else EMPTY_STEP

    def update_results(self, results: WorkerResults | None) -> None:
        """The output of the oldest step in flight has come back."""
        if self._steps_in_flight:
            self._steps_in_flight.popleft()
        for ended in results.ended if results is not None else ():
            self._shell.feed_consumer(events.RankReadEnded(ended=ended))
        self._apply_pending()

    def release_pending_blocks(self) -> bool:
        """Carry out releases that have come in; True when that freed blocks, so that vLLM need not preempt."""
        num_before = self._block_pins.num_pinned
        self._apply_pending()
        return self._block_pins.num_pinned < num_before

    def reset_cache(self) -> bool:
        """vLLM drops its cached blocks (new weights, say): nobody may read them any more."""
        self._shell.feed_producer(events.LeasesRevoked(reason="reset"))
        self._apply_pending()
        return True

    def take_stats(self) -> dict[str, Any]:
        return self._shell.take_stats()

    def shutdown(self) -> None:
        self._shell.close()

    # --- inside ---------------------------------------------------------------------------------------------------

    @property
    def _is_waiting(self) -> bool:
        """vLLM steps again and again for requests that cannot run: their KV is not here, a read of an aborted one has not
        ended, or leases hold the blocks they need. Never on one rank of several that step together."""
        return self._may_sleep and bool(self._wanted or self._offered or self._shell.waits_for_peers())

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
        return params.issue(transfer, secret=self._config.secret, now_s=wall_s())

    def _apply_pending(self) -> None:
        """Do what the machines ask of this thread (pins, names); keep what is the workers' for the next step."""
        for action in self._shell.drain():
            match action:
                case actions.PinBlocks():
                    self._block_pins.pin(action.block_ids)
                case actions.UnpinBlocks():
                    self._block_pins.unpin(action.block_ids)
                case actions.NameTransfer():
                    self._offered[action.request_id] = action.transfer_id
                case _:
                    self._for_workers.append(action)

    def _take_for_workers(self) -> list[Any]:
        self._apply_pending()
        taken, self._for_workers = self._for_workers, []
        return taken


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
        reports=tuple(action.report for action in by_kind.get(actions.ReportReceive, ())),
    )
