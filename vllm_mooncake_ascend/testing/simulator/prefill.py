"""Prefill role of a simulated engine: a little vLLM that computes prompts step by step, and its Producer machine."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import msgspec

from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.settings import ProducerSettings
from vllm_mooncake_ascend.testing.simulator.blocks import Violation
from vllm_mooncake_ascend.testing.simulator.plan import TOKENS_PER_BLOCK
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages

if TYPE_CHECKING:
    from vllm_mooncake_ascend.testing.simulator.client import Client
    from vllm_mooncake_ascend.testing.simulator.engine import Engine

_RETRY_S = 1.0


@dataclasses.dataclass(slots=True)
class _Prefill:
    """One running prefill."""

    request_id: RequestId
    client: Client
    num_blocks: int
    transfer_id: TransferId | None = None
    block_ids: list[int] = dataclasses.field(default_factory=list)
    num_computed: int = 0
    """Blocks whose KV is written."""
    preempt_after: int | None = None
    run: int = 0
    """Counts restarts: steps of an earlier run are void."""


class PrefillSide:
    """vLLM's side and the shell of one Producer."""

    def __init__(self, engine: Engine) -> None:
        world, plan = engine.world, engine.world.plan
        self._engine = engine
        self._producer = world.machines.producer(
            engine.incarnation,
            world.fingerprint(engine.index),
            world.layouts[engine.index],
            ProducerSettings(
                lease_ttl_s=plan.lease_ttl_s,
                lease_max_s=plan.lease_max_s,
                max_pinned_blocks=plan.max_pinned_blocks,
                streams=engine.index in plan.streaming,
            ),
        )
        self._requests: dict[RequestId, _Prefill] = {}
        self._computed: dict[int, list[int]] = {}
        """Where the KV of each prompt was computed last: the prefix cache, if it is still there."""
        self._named: dict[RequestId, TransferId] = {}
        self._pending: list[actions.PinBlocks | actions.UnpinBlocks] = []
        self._pinned: dict[TransferId, list[tuple[int, ...]]] = {}
        self._prompts: dict[TransferId, int] = {}
        self._ended: set[TransferId] = set()
        """Transfers whose blocks were given back."""
        self._told: dict[tuple[bytes, TransferId, RequestId], tuple[int, tuple[int, ...]]] = {}
        """What each reader was told last of a table, and of which generation."""
        self._judged: dict[tuple[TransferId, Incarnation, RequestId], bool] = {}
        self._timer_at_s = 0.0

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    # --- vLLM's side --------------------------------------------------------------------------------------------------

    def admit(self, client: Client) -> None:
        """A request with do_remote_decode enters the engine."""
        world = self._engine.world
        request_id = RequestId(f"p{world.number()}")
        prefill = _Prefill(
            request_id, client, -(-client.job.num_tokens // TOKENS_PER_BLOCK), preempt_after=client.job.is_preempted_after
        )
        self._requests[request_id] = prefill
        self._feed_from_scheduler(
            events.PrefillArrived(
                request_id=request_id,
                wanted_id=None if client.job.transfer_id is None else TransferId(client.job.transfer_id),
                fresh_id=TransferId(f"fresh{world.number()}"),
                prompt_digest=world.digest(client.prompt, client.job.num_tokens),
                num_prompt_tokens=client.job.num_tokens,
            )
        )
        prefill.transfer_id = self._named.get(request_id)
        if prefill.transfer_id is not None:
            self._prompts[prefill.transfer_id] = client.prompt
        client.on_admitted(request_id)
        self._begin(prefill)

    def abort(self, request_id: RequestId) -> None:
        """The client has gone."""
        if request_id in self._requests:
            self._finish(self._requests[request_id], has_kv=False)

    def _begin(self, prefill: _Prefill) -> None:
        """Take blocks and compute, or try again later."""
        if prefill.request_id not in self._requests:
            return
        world, pool = self._engine.world, self._engine.pool
        cached = pool.still_right(self._computed.get(prefill.client.prompt, []), prefill.client.prompt)
        cached = cached[: prefill.num_blocks - 1]
        block_ids = pool.allocate(prefill.num_blocks - len(cached))
        if block_ids is None:
            world.at(world.now + _RETRY_S, self._engine, self._begin, prefill)
            return
        pool.touch(cached)
        prefill.block_ids, prefill.num_computed = cached + block_ids, len(cached)
        self._computed[prefill.client.prompt] = prefill.block_ids
        prefill.run += 1
        self._next_step(prefill)

    def _next_step(self, prefill: _Prefill) -> None:
        world = self._engine.world
        if world.machines.publishes_scheduled_progress and prefill.num_computed < prefill.num_blocks - 1:
            self._tell_progress(prefill, prefill.num_computed + 1)
        if world.machines.publishes_scheduled_steps and prefill.num_computed == prefill.num_blocks - 1:
            self._tell_end(prefill, has_kv=True)
        world.at(world.now + prefill.client.job.step_s, self._engine, self._step_done, prefill, prefill.run)

    def _step_done(self, prefill: _Prefill, run: int) -> None:
        """The output of one step has come back."""
        if prefill.request_id not in self._requests or prefill.run != run:
            return
        world = self._engine.world
        if prefill.num_computed < prefill.num_blocks:
            self._engine.pool.write(prefill.block_ids, prefill.client.prompt, prefill.num_computed, prefill.num_computed + 1)
            prefill.num_computed += 1
            is_over = prefill.num_computed == prefill.num_blocks and not prefill.client.job.lingers
        else:
            is_over = True
        if is_over:
            self._finish(prefill, has_kv=prefill.client.job.end == "kv")
        elif prefill.preempt_after == prefill.num_computed:
            prefill.preempt_after = None
            held, prefill.block_ids = prefill.block_ids, []
            self._engine.pool.release(held)
            self._feed_from_scheduler(events.PrefillPreempted(request_id=prefill.request_id))
            world.at(world.now + 0.02, self._engine, self._begin, prefill)
        else:
            self._tell_progress(prefill, min(prefill.num_computed, prefill.client.job.num_tokens // TOKENS_PER_BLOCK))
            self._next_step(prefill)

    def _tell_progress(self, prefill: _Prefill, num_blocks: int) -> None:
        self._feed_from_scheduler(
            events.PrefillProgressed(
                request_id=prefill.request_id,
                num_tokens=num_blocks * TOKENS_PER_BLOCK,
                block_ids=(tuple(prefill.block_ids[:num_blocks]),),
            )
        )

    def _finish(self, prefill: _Prefill, *, has_kv: bool) -> None:
        if has_kv and self._engine.world.machines.treats_stop_as_failure and prefill.client.job.num_tokens % 2:
            has_kv = False
        self._tell_end(prefill, has_kv=has_kv)
        del self._requests[prefill.request_id]
        self._engine.pool.release(prefill.block_ids)
        self._engine.poke()
        prefill.client.on_finished(prefill.transfer_id, has_kv=has_kv)

    def _tell_end(self, prefill: _Prefill, *, has_kv: bool) -> None:
        self._feed_from_scheduler(
            events.PrefillEnded(
                request_id=prefill.request_id,
                has_kv=has_kv,
                num_tokens=prefill.client.job.num_tokens if has_kv else 0,
                block_ids=(tuple(prefill.block_ids),) if has_kv else (),
                reason="" if has_kv else "abort",
            )
        )

    # --- the shell ----------------------------------------------------------------------------------------------------

    def hear(self, sender: Engine, message: messages.FromReader) -> None:
        """A message arrives at the control thread."""
        self.hear_from(sender.incarnation.encode(), message)

    def hear_from(self, peer: bytes, message: messages.FromReader) -> None:
        """A message of somebody who need not be an engine."""
        self._feed(events.ReaderSpoke(peer=peer, message=message))

    def revoke(self) -> None:
        self._feed_from_scheduler(events.LeasesRevoked(reason="reset"))

    def apply_pending(self) -> None:
        """The scheduler thread does what the machine asked of it."""
        for action in self._pending:
            if isinstance(action, actions.PinBlocks):
                self._engine.pool.touch(action.block_ids)
                self._pinned.setdefault(action.transfer_id, []).append(action.block_ids)
            else:
                self._unpin(action)
        if self._pending:
            self._pending.clear()
            pinned = {block_id for pins in self._pinned.values() for pin in pins for block_id in pin}
            if len(pinned) != self._producer.num_pinned_blocks:
                raise Violation(f"{len(pinned)} blocks are pinned, {self._producer.num_pinned_blocks} are counted")
            self._engine.poke()

    def check_at_rest(self) -> None:
        producer = self._producer
        left = (
            producer.num_leases,
            producer.num_pinned_blocks,
            producer.num_kept_blocks,
            producer.num_waiting_readers,
            len(self._requests),
        )
        if any(left) or producer.next_timer() is not None:
            raise Violation(f"engine {self._engine.index}: producer is not at rest: {left}, timer {producer.next_timer()}")

    def _unpin(self, action: actions.UnpinBlocks) -> None:
        pins = self._pinned.get(action.transfer_id, [])
        if action.block_ids not in pins:
            raise Violation(f"transfer {action.transfer_id} gave back pins it does not have")
        pins.remove(action.block_ids)
        self._engine.pool.release(action.block_ids)

    def _feed_from_scheduler(self, event: events.ProducerEvent) -> None:
        self._feed(event)
        self.apply_pending()

    def _feed(self, event: events.ProducerEvent) -> None:
        engine, world = self._engine, self._engine.world
        now = engine.now()
        for action in self._producer.handle(event, now):
            match action:
                case actions.SendToReader():
                    self._send(action)
                case actions.PinBlocks():
                    self._pending.append(action)
                    self._ended.discard(action.transfer_id)
                case actions.UnpinBlocks():
                    self._pending.append(action)
                    self._ended.add(action.transfer_id)
                    engine.poke()
                case actions.NameTransfer():
                    self._named[action.request_id] = action.transfer_id
        if world.trace is not None:
            world.trace_event(engine, "producer", event)
        if self._producer.num_kept_blocks > world.plan.max_pinned_blocks:
            raise Violation(f"engine {engine.index}: {self._producer.num_kept_blocks} blocks are kept for leases")
        next_s = self._producer.next_timer()
        if next_s is not None and not now < self._timer_at_s <= next_s:
            if next_s <= now:
                raise Violation(f"engine {engine.index}: the producer's timer does not advance")
            self._timer_at_s = next_s
            world.at(engine.at_own(next_s), engine, self._timer)

    def _timer(self) -> None:
        next_s = self._producer.next_timer()
        self._timer_at_s = 0.0
        if next_s is not None:
            self._feed(events.TimerFired())

    def _send(self, action: actions.SendToReader) -> None:
        message = action.message
        world = self._engine.world
        if isinstance(message, messages.Offer):
            self._check_offer(action.peer, message)
            if message.block_ids and world.plan.lying_engine == self._engine.index and world.rng.random() < 0.5:
                lie = world.rng.choice(({"block_ids": ((),)}, {"block_ids": (), "num_known_blocks": ()}))
                message = msgspec.structs.replace(message, **lie)
        if isinstance(message, messages.Verdict):
            self._check_verdict(action.peer, message)
        reader = world.by_incarnation.get(action.peer.decode())
        if reader is not None:
            world.side_channel.to_reader(self._engine, reader, message)

    def _check_offer(self, peer: bytes, offer: messages.Offer) -> None:
        """What is offered is there, is right, and will stay: pinned, or about to be by this very event. What it leaves out
        was told to this reader."""
        key = (peer, offer.transfer_id, offer.request_id)
        generation, told = self._told.get(key, (offer.generation, ()))
        num_known = sum(offer.num_known_blocks)
        if num_known > (len(told) if generation == offer.generation else 0):
            raise Violation(f"an offer of {offer.transfer_id} leaves out {num_known} blocks that its reader was not told of")
        block_ids = told[:num_known] + (offer.block_ids[0] if offer.block_ids else ())
        self._told[key] = (offer.generation, block_ids)
        if not block_ids:
            return
        pinned = {block_id for pin in self._pinned.get(offer.transfer_id, ()) for block_id in pin}
        for pending in self._pending:
            if isinstance(pending, actions.PinBlocks) and pending.transfer_id == offer.transfer_id:
                pinned.update(pending.block_ids)
        if not pinned.issuperset(block_ids) or offer.transfer_id in self._ended:
            raise Violation(f"transfer {offer.transfer_id} offers blocks {block_ids} that are not pinned")
        if self._engine.pool.wrong(block_ids, self._prompts[offer.transfer_id], 0):
            raise Violation(f"transfer {offer.transfer_id} offers blocks {block_ids} that do not hold its KV")

    def _check_verdict(self, peer: bytes, verdict: messages.Verdict) -> None:
        """What a reader of ours was told first is what it is told ever after."""
        key = (verdict.transfer_id, Incarnation(peer.decode()), verdict.request_id)
        if key[1] not in self._engine.world.by_incarnation:
            return
        before = self._judged.setdefault(key, verdict.held)
        if before is False and verdict.held:
            raise Violation(f"verdict of {key} changed to held")
