"""ReadPlans: what a worker knows of producers, and the engine calls of the reads under way. Used by one thread.

A peer is planned once, at its first read, and forgotten when the scheduler says so. A read's calls are kept until it has
ended.
"""

from __future__ import annotations

from vllm_mooncake_ascend.errors import LocalProtocolError, RemoteProtocolError
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.planner.plan import PeerPlan
from vllm_mooncake_ascend.types import Incarnation, RequestId, Session
from vllm_mooncake_ascend.wire.steps import PeerRanks, ReadOrder

Call = tuple[Session, CopyBatch]


class ReadPlans:
    """Of the worker with this layout."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._ranks: dict[Incarnation, tuple[RankLayout, ...]] = {}
        self._plans: dict[Incarnation, PeerPlan] = {}
        self._calls: dict[RequestId, list[Call]] = {}

    def learn(self, peer: PeerRanks) -> None:
        """The layout of a producer; a new one replaces the old one."""
        self._ranks[peer.incarnation] = peer.ranks
        self._plans.pop(peer.incarnation, None)

    def forget(self, incarnation: Incarnation) -> None:
        """Nothing will be read from this producer any more. Reads under way keep their calls."""
        self._ranks.pop(incarnation, None)
        self._plans.pop(incarnation, None)

    def plan(self, order: ReadOrder) -> list[Call]:
        """The calls that carry out one part of a read, added to those of its other parts; kept until `drop`. Empty: nothing of
        it is this rank's.

        Raises:
            MooncakeAscendError: the order, or the layout of its producer, cannot be planned.
        """
        ranks = self._ranks.get(order.incarnation)
        if ranks is None:
            raise LocalProtocolError(f"no layout of the producer {order.incarnation} was shared with this worker")
        plan = self._plans.get(order.incarnation)
        if plan is None:
            plan = self._plans[order.incarnation] = PeerPlan.build(self._layout, ranks)
        if order.first_token == order.end_token:
            return []
        first_token, end_token = order.first_token - order.table_token, order.end_token - order.table_token
        try:
            calls = plan.calls(first_token, end_token, order.local_block_ids, order.remote_block_ids)
        except (LocalProtocolError, RemoteProtocolError) as error:
            raise type(error)(f"{error} (tables and tokens counted from prompt token {order.table_token} on)") from error
        self._calls.setdefault(order.request_id, []).extend(calls)
        return calls

    def call(self, request_id: RequestId, call_index: int) -> Call:
        """One call of a planned read, counted through all its parts."""
        return self._calls[request_id][call_index]

    def drop(self, request_id: RequestId) -> None:
        """The read has ended."""
        self._calls.pop(request_id, None)
