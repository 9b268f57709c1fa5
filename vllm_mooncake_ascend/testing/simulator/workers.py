"""Workers of one simulated engine: one Reader machine a rank, and the engine calls it asks for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.settings import ReaderSettings
from vllm_mooncake_ascend.testing.simulator.blocks import Violation
from vllm_mooncake_ascend.testing.simulator.plan import TOKENS_PER_BLOCK
from vllm_mooncake_ascend.types import Outcome, RequestId
from vllm_mooncake_ascend.wire.steps import PeerRanks, ReadOrder

if TYPE_CHECKING:
    from vllm_mooncake_ascend.testing.simulator.engine import Engine

_BLOCKS_PER_CALL = 2


@dataclasses.dataclass(slots=True)
class Call:
    """One engine call under way."""

    workers: Workers
    rank: int
    request_id: RequestId
    call_index: int
    source: int
    pairs: list[tuple[int, int]]
    """Source block and target block."""
    epochs: list[int]
    """Of the target blocks, when the read was ordered."""
    num_moved: int = 0
    served_by: Engine | None = None
    """Who answered at the source's session when the call began."""

    @property
    def engine(self) -> Engine:
        return self.workers.engine

    def end(self, outcome: Outcome) -> None:
        """Tell the reader machine."""
        self.workers.call_ended(self, outcome)


@dataclasses.dataclass(slots=True)
class _Plan:
    """What one rank has to read for one request."""

    source: int
    calls: list[tuple[list[tuple[int, int]], list[int]]] = dataclasses.field(default_factory=list)
    """Pairs of blocks and epochs of the targets, of all parts."""

    def add(self, pairs: list[tuple[int, int]], epochs: list[int]) -> int:
        """Plan one more part; returns its number of calls."""
        starts = range(0, len(pairs), _BLOCKS_PER_CALL)
        self.calls += [(pairs[at : at + _BLOCKS_PER_CALL], epochs[at : at + _BLOCKS_PER_CALL]) for at in starts]
        return len(starts)


class Workers:
    """All ranks of one start of one engine. The scheduler may be frozen while they go on, and the other way round."""

    def __init__(self, engine: Engine, num_ranks: int) -> None:
        self.engine = engine
        self.alive = True
        self.frozen_until_s = 0.0
        self._readers = [
            engine.world.machines.reader(rank, ReaderSettings(read_wait_s=engine.world.plan.read_wait_s))
            for rank in range(num_ranks)
        ]
        self._plans: list[dict[RequestId, _Plan]] = [{} for _ in range(num_ranks)]
        self._calls: list[Call | None] = [None] * num_ranks
        self._layouts: dict[str, int] = {}
        self._timer_at_s = [0.0] * num_ranks

    @property
    def num_reads(self) -> int:
        """Reads that have not ended."""
        return sum(reader.num_reads for reader in self._readers)

    @property
    def layouts(self) -> frozenset[str]:
        """Incarnations whose layout is known."""
        return frozenset(self._layouts)

    def step(
        self,
        peers: tuple[PeerRanks, ...],
        reads: tuple[ReadOrder, ...],
        cancels: tuple[RequestId, ...],
        forget: tuple[str, ...],
    ) -> None:
        """Carry out what one engine step asks, in the order that `wire.steps.WorkerStep` promises."""
        for peer in peers:
            self._layouts[peer.incarnation] = int(peer.ranks[0].session)
        for order in reads:
            for rank in range(len(self._readers)):
                self._plan(rank, order)
        for request_id in cancels:
            for rank in range(len(self._readers)):
                self._feed(rank, events.ReadCancelled(request_id=request_id))
        for incarnation in forget:
            self._layouts.pop(incarnation, None)

    def call_ended(self, call: Call, outcome: Outcome) -> None:
        """An engine call is over."""
        self._calls[call.rank] = None
        self._feed(
            call.rank,
            events.CallEnded(
                request_id=call.request_id,
                call_index=call.call_index,
                outcome=outcome,
                reason="",
                num_bytes=len(call.pairs),
                num_descriptors=1,
            ),
        )

    def _plan(self, rank: int, order: ReadOrder) -> None:
        if order.incarnation not in self._layouts:
            raise Violation(f"read of {order.request_id} was ordered before the layout of its source was shared")
        if order.part and order.request_id not in self._plans[rank]:
            return  # its read has ended
        world = self.engine.world
        if world.rng.random() < world.plan.reads.unplannable:
            self._feed(
                rank,
                events.ReadRefused(
                    transfer_id=order.transfer_id,
                    request_id=order.request_id,
                    reason="too many descriptors",
                    part=order.part,
                ),
            )
            return
        first = (order.first_token - order.table_token) // TOKENS_PER_BLOCK
        end = -(-(order.end_token - order.table_token) // TOKENS_PER_BLOCK)
        tables = (*order.remote_block_ids, *order.local_block_ids)
        pairs = list(zip(*(table[first:end] for table in tables), strict=True))
        epochs = [self.engine.pool.epochs[target] for _, target in pairs]
        plan = self._plans[rank].setdefault(order.request_id, _Plan(self._layouts[order.incarnation]))
        self._feed(
            rank,
            events.ReadPlanned(
                transfer_id=order.transfer_id,
                request_id=order.request_id,
                session=str(self._layouts[order.incarnation]),
                num_calls=plan.add(pairs, epochs),
                part=order.part,
                generation=order.generation,
                is_last=order.is_last,
            ),
        )

    def _feed(self, rank: int, event: events.ReaderEvent) -> None:
        world = self.engine.world
        now = world.now
        reader = self._readers[rank]
        for action in reader.handle(event, now):
            match action:
                case actions.StartCall():
                    self._start(rank, action)
                case actions.EndRead():
                    self._plans[rank].pop(action.ended.request_id, None)
                    self.engine.decode.send_rank_ended(action.ended)
        next_s = reader.next_timer()
        if next_s is not None and not now < self._timer_at_s[rank] <= next_s:
            self._timer_at_s[rank] = next_s
            world.at(next_s, self, self._timer, rank)

    def _timer(self, rank: int) -> None:
        next_s = self._readers[rank].next_timer()
        if next_s is not None:
            self._timer_at_s[rank] = 0.0
            self._feed(rank, events.TimerFired())

    def _start(self, rank: int, action: actions.StartCall) -> None:
        if self._calls[rank] is not None:
            raise Violation(f"rank {rank} started an engine call while another was under way")
        plan = self._plans[rank][action.request_id]
        pairs, epochs = plan.calls[action.call_index]
        call = Call(self, rank, action.request_id, action.call_index, plan.source, pairs, epochs)
        self._calls[rank] = call
        self.engine.world.data_plane.start(call)
