"""Decode role of a simulated engine: a little vLLM with requests that wait for remote KV, and its Consumer machine.

As vLLM does, it dies of any report that is early, double or for nobody; here that is a Violation.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.settings import ConsumerSettings
from vllm_mooncake_ascend.testing.simulator.blocks import Violation
from vllm_mooncake_ascend.testing.simulator.plan import TOKENS_PER_BLOCK
from vllm_mooncake_ascend.types import PeerAddress, RequestId
from vllm_mooncake_ascend.wire import messages
from vllm_mooncake_ascend.wire.params import RemotePrefill
from vllm_mooncake_ascend.wire.steps import ReadEnded, Report

if TYPE_CHECKING:
    from vllm_mooncake_ascend.testing.simulator.engine import Engine
    from vllm_mooncake_ascend.testing.simulator.plan import Child


class Phase(enum.Enum):
    """Where vLLM has a request."""

    WAITING = "waiting"
    SCHEDULING = "scheduling"
    """Between vLLM's question and its allocation: only the control thread can come between."""
    REMOTE = "waiting for remote KV"
    RUNNING = "running"


@dataclasses.dataclass(slots=True)
class _Request:
    """One decode request."""

    request_id: RequestId
    child: Child
    prompt: int
    num_tokens: int
    must_succeed: bool
    phase: Phase = Phase.WAITING
    block_ids: list[int] = dataclasses.field(default_factory=list)
    num_local_blocks: int = 0
    is_aborted: bool = False
    has_looked: bool = False
    """It was answered once: it may not look for remote KV again."""
    run: int = 0
    """Counts starts of running: an end of an earlier run is void."""


class DecodeSide:
    """vLLM's side and the shell of one Consumer."""

    def __init__(self, engine: Engine) -> None:
        world, plan = engine.world, engine.world.plan
        self._engine = engine
        self._consumer = world.machines.consumer(
            engine.incarnation,
            world.fingerprint(engine.index),
            world.layouts[engine.index],
            ConsumerSettings(
                num_ranks=plan.num_ranks,
                fail_on_load_error=plan.fails_on_load_error,
                can_report_unknown_at_once=plan.reports_unknown_at_once,
                read_wait_s=plan.read_wait_s,
                streams=engine.index in plan.streaming,
            ),
            differences=world.differences,
        )
        self._requests: dict[RequestId, _Request] = {}
        self._pending: list[actions.ConsumerAction] = []
        self._for_workers: list[actions.ConsumerAction] = []
        self._in_place: set[RequestId] = set()
        """Requests that run on the blocks remote KV was written to: not one more byte may land there."""
        self._timer_at_s = 0.0
        self._step_arrives_at_s = 0.0
        """Steps reach the workers in order."""

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def is_reported_in_place(self, request_id: RequestId) -> bool:
        return request_id in self._in_place

    # --- vLLM's side --------------------------------------------------------------------------------------------------

    def admit(self, child: Child, transfer: RemotePrefill, prompt: int, num_tokens: int) -> None:
        """A request with do_remote_prefill enters the engine."""
        world = self._engine.world
        request_id = RequestId(f"d{world.number()}")
        request = _Request(request_id, child, prompt, num_tokens, must_succeed=world.plan.is_gentle)
        self._requests[request_id] = request
        self._feed_from_scheduler(
            events.RequestArrived(
                request_id=request_id,
                transfer=transfer,
                prompt_digest=world.digest(prompt, num_tokens),
                num_prompt_tokens=num_tokens,
            )
        )
        if child.leaves_at_s is not None:
            world.at(world.now + child.leaves_at_s, self._engine, self._abort, request)
        if child.is_preempted_at_s is not None:
            world.at(world.now + child.is_preempted_at_s, self._engine, self._preempt, request)
        self._engine.poke()

    def step(self) -> None:
        """One engine step: what the machine asked for, then the waiting requests, then the workers' part."""
        self.apply_pending()
        for request in list(self._requests.values()):
            if request.phase is Phase.WAITING and not request.is_aborted:
                self._schedule(request)
        self._flush()

    def _schedule(self, request: _Request) -> None:
        """Ask how much is remote, and take blocks if that is known."""
        world = self._engine.world
        num_local_blocks = min(request.child.num_local_blocks, (request.num_tokens - 1) // TOKENS_PER_BLOCK)
        num_local_tokens = num_local_blocks * TOKENS_PER_BLOCK
        num_remote_tokens = self._consumer.remote_tokens(request.request_id, num_local_tokens)
        if request.child.is_careless and not request.has_looked:
            is_beyond = num_remote_tokens is not None
            num_remote_tokens = request.num_tokens - num_local_tokens + is_beyond
        if num_remote_tokens is None:
            return
        if request.child.drops_match:
            num_remote_tokens = 0
        if request.has_looked and num_remote_tokens:
            raise Violation(f"{request.request_id} looks for remote KV again")
        if request.must_succeed and not num_remote_tokens and not request.has_looked:
            raise Violation(f"{request.request_id} got no remote KV though nothing was wrong")
        block_ids = self._engine.pool.allocate(-(-request.num_tokens // TOKENS_PER_BLOCK))
        if block_ids is None:
            return  # whoever gives blocks back pokes the engine
        request.block_ids, request.num_local_blocks = block_ids, num_local_blocks
        self._engine.pool.write(block_ids, request.prompt, 0, num_local_blocks)
        if num_remote_tokens and world.rng.random() < 0.1:
            request.phase = Phase.SCHEDULING
            world.at(world.now + world.rng.random() * 0.01, self._engine, self._allocated, request, num_remote_tokens)
        else:
            self._allocated(request, num_remote_tokens)

    def _allocated(self, request: _Request, num_remote_tokens: int) -> None:
        request.has_looked = True
        num_local_tokens = request.num_local_blocks * TOKENS_PER_BLOCK
        end = -(-(num_local_tokens + num_remote_tokens) // TOKENS_PER_BLOCK)
        request.phase = Phase.REMOTE if num_remote_tokens else Phase.RUNNING
        self._feed_from_scheduler(
            events.BlocksAllocated(
                request_id=request.request_id,
                num_local_tokens=num_local_tokens,
                num_remote_tokens=num_remote_tokens,
                block_ids=(tuple(request.block_ids),),
                loaded_block_ids=tuple(request.block_ids[request.num_local_blocks : end]) if num_remote_tokens else (),
            )
        )
        if request.phase is Phase.RUNNING:
            self._run(request, request.num_local_blocks)

    def _run(self, request: _Request, num_present_blocks: int) -> None:
        """Compute what is not there, and decode for a while."""
        world = self._engine.world
        self._engine.pool.write(request.block_ids, request.prompt, num_present_blocks, len(request.block_ids))
        request.phase = Phase.RUNNING
        request.run += 1
        world.at(world.now + 0.01 + world.rng.random() * 5.0, self._engine, self._finish, request, request.run)

    def _finish(self, request: _Request, run: int) -> None:
        if request.phase is not Phase.RUNNING or request.run != run or request.request_id not in self._requests:
            return
        if self._engine.pool.wrong(request.block_ids, request.prompt, 0):
            raise Violation(f"{request.request_id} was decoded with wrong KV")
        self._end(request)

    def _end(self, request: _Request) -> None:
        """vLLM is done with a request whose blocks it may free."""
        self._in_place.discard(request.request_id)
        self._feed_from_scheduler(events.RequestEnded(request_id=request.request_id))
        del self._requests[request.request_id]
        self._free(request)

    def _free(self, request: _Request) -> None:
        held, request.block_ids = request.block_ids, []
        self._engine.pool.release(held)
        self._engine.poke()

    def _abort(self, request: _Request) -> None:
        """The client has gone, at whatever moment."""
        if request.request_id not in self._requests or request.is_aborted:
            return
        if request.phase is Phase.SCHEDULING:
            world = self._engine.world
            world.at(world.now + 0.01, self._engine, self._abort, request)
        elif request.phase is Phase.REMOTE:
            request.is_aborted = True
            self._feed_from_scheduler(events.RequestEnded(request_id=request.request_id))
        else:
            self._end(request)

    def _preempt(self, request: _Request) -> None:
        if request.phase is Phase.RUNNING and request.request_id in self._requests:
            self._in_place.discard(request.request_id)
            request.phase = Phase.WAITING
            self._free(request)

    def _reported(self, report: Report) -> None:
        """The workers told vLLM that a receive has ended."""
        request = self._requests.get(report.request_id)
        if request is None or request.phase is not Phase.REMOTE:
            raise Violation(f"report of {report.request_id} that vLLM does not wait for")
        if request.is_aborted:
            del self._requests[request.request_id]
            self._free(request)
        elif report.ok:
            loaded = request.block_ids[request.num_local_blocks :]
            if self._engine.pool.wrong(loaded, request.prompt, request.num_local_blocks):
                raise Violation(f"{request.request_id} was reported received with wrong KV")
            self._continue_in_place(request, len(request.block_ids))
        else:
            self._load_failed(request)

    def _load_failed(self, request: _Request) -> None:
        """By vLLM's policy: an error, other blocks, or (before 0.30) the same blocks once more."""
        plan = self._engine.world.plan
        if request.must_succeed:
            raise Violation(f"{request.request_id} failed though nothing was wrong")
        if plan.fails_on_load_error:
            self._end(request)
        elif plan.reports_unknown_at_once:
            request.phase = Phase.WAITING
            self._free(request)
        else:
            self._continue_in_place(request, request.num_local_blocks)

    def _continue_in_place(self, request: _Request, num_present_blocks: int) -> None:
        self._in_place.add(request.request_id)
        self._run(request, num_present_blocks)
        self._feed_from_scheduler(
            events.BlocksAllocated(
                request_id=request.request_id,
                num_local_tokens=request.num_tokens,
                num_remote_tokens=0,
                block_ids=(tuple(request.block_ids),),
                loaded_block_ids=(),
            )
        )

    # --- the shell ----------------------------------------------------------------------------------------------------

    def hear(self, sender: int, message: messages.FromProducer) -> None:
        """A message arrives at the control thread."""
        self._feed(events.ProducerSpoke(peer=PeerAddress(f"engine:{sender}"), message=message))
        self._engine.poke()

    def disconnected(self, other: int) -> None:
        self._feed(events.PeerDisconnected(peer=PeerAddress(f"engine:{other}"), reason="broken"))
        self._engine.poke()

    def send_rank_ended(self, ended: ReadEnded) -> None:
        """A worker's result travels with the output of a step."""
        world = self._engine.world
        delay_s = world.rng.random() * 0.02
        if world.plan.reads.stuck and world.rng.random() < world.plan.reads.stuck:
            delay_s = world.rng.random() * 200.0
        world.at(world.now + delay_s, self._engine, self._feed_from_scheduler, events.RankReadEnded(ended=ended))

    def apply_pending(self) -> None:
        """The scheduler thread does what the machine asked of it, and keeps what is the workers'."""
        pending, self._pending = self._pending, []
        for action in pending:
            match action:
                case actions.PinBlocks():
                    self._engine.pool.touch(action.block_ids)
                case actions.UnpinBlocks():
                    self._engine.pool.release(action.block_ids)
                    self._engine.poke()
                case _:
                    self._for_workers.append(action)

    def check_at_rest(self) -> None:
        consumer = self._consumer
        left = (consumer.num_loads, consumer.num_pinned_blocks, consumer.num_peers, len(self._requests))
        if any(left) or consumer.next_timer() is not None:
            raise Violation(f"engine {self._engine.index}: consumer is not at rest: {left}, timer {consumer.next_timer()}")
        forgotten = {action.incarnation for action in self._for_workers if isinstance(action, actions.ForgetLayout)}
        if self._engine.workers.layouts - forgotten:
            raise Violation(f"engine {self._engine.index}: workers are left with the layout of a peer that is forgotten")

    def _flush(self) -> None:
        """Hand the workers their part of this step; vLLM hears reports with the step's output."""
        asked, self._for_workers = self._for_workers, []
        if not asked:
            return
        world = self._engine.world
        self._step_arrives_at_s = max(self._step_arrives_at_s, world.now + world.rng.random() * 0.005)
        world.at(
            self._step_arrives_at_s,
            self._engine.workers,
            self._engine.workers.step,
            tuple(action.peer for action in asked if isinstance(action, actions.ShareLayout)),
            tuple(action.order for action in asked if isinstance(action, actions.OrderRead)),
            tuple(action.request_id for action in asked if isinstance(action, actions.CancelRead)),
            self._to_forget(asked),
        )
        for action in asked:
            if isinstance(action, actions.ReportReceive):
                world.at(world.now + 0.005 + world.rng.random() * 0.02, self._engine, self._reported, action.report)

    def _to_forget(self, asked: list[actions.ConsumerAction]) -> tuple[str, ...]:
        """Layouts to forget in this step, in which workers forget last: not those that were shared again after it."""
        is_known: dict[str, bool] = {}
        for action in asked:
            if isinstance(action, actions.ForgetLayout):
                is_known[action.incarnation] = False
            elif isinstance(action, actions.ShareLayout) and not self._engine.world.machines.forgets_what_is_shared_again:
                is_known[action.peer.incarnation] = True
        return tuple(incarnation for incarnation, stays in is_known.items() if not stays)

    def _feed_from_scheduler(self, event: events.ConsumerEvent) -> None:
        self._feed(event)
        self.apply_pending()
        self._engine.poke()

    def _feed(self, event: events.ConsumerEvent) -> None:
        engine, world = self._engine, self._engine.world
        now = engine.now()
        for action in self._consumer.handle(event, now):
            match action:
                case actions.SendToProducer():
                    world.side_channel.to_producer(engine, int(action.peer.partition(":")[2]), action.message)
                case actions.Count() | actions.Note() | actions.ClosePeer():
                    pass
                case _:
                    self._pending.append(action)
                    engine.poke()
        if world.trace is not None:
            world.trace_event(engine, "consumer", event)
        next_s = self._consumer.next_timer()
        if next_s is not None and not now < self._timer_at_s <= next_s:
            if next_s <= now:
                raise Violation(f"engine {engine.index}: the consumer's timer does not advance")
            self._timer_at_s = next_s
            world.at(engine.at_own(next_s), engine, self._timer)

    def _timer(self) -> None:
        next_s = self._consumer.next_timer()
        self._timer_at_s = 0.0
        if next_s is not None:
            self._feed(events.TimerFired())
            self._engine.poke()
