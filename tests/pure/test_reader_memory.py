"""p2p.reader: which orders a worker takes for repeated."""

from __future__ import annotations

from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.reader import Reader
from vllm_mooncake_ascend.p2p.settings import ReaderSettings
from vllm_mooncake_ascend.types import Outcome, RequestId, TransferId


def _ends(reader: Reader, transfer: str, request: str) -> list[Outcome]:
    """Order a read of nothing; how it ended, nothing when the order was ignored."""
    order = events.ReadPlanned(transfer_id=TransferId(transfer), request_id=RequestId(request), session="", num_calls=0)
    return [action.ended.outcome for action in reader.handle(order, 0.0) if isinstance(action, actions.EndRead)]


def test_a_request_id_comes_again_with_another_transfer() -> None:
    """Goal: vLLM's request ids may repeat, and an order without an answer hangs its request. Method: one id, two transfers."""
    reader = Reader(0, ReaderSettings())
    assert [[Outcome.DONE]] * 2 == [_ends(reader, transfer, "r") for transfer in ("t1", "t2")]


def test_an_order_that_comes_again_is_answered_once() -> None:
    """Goal: one answer to an order, however often it comes. Method: the same transfer for the same request."""
    reader = Reader(0, ReaderSettings())
    assert [[Outcome.DONE], []] == [_ends(reader, "t1", "r") for _ in range(2)]


def test_an_order_cancelled_before_it_came_is_refused() -> None:
    """Goal: no call for a read nobody wants. Method: the cancel first."""
    reader = Reader(0, ReaderSettings())
    reader.handle(events.ReadCancelled(request_id=RequestId("r")), 0.0)
    assert [[Outcome.REFUSED], []] == [_ends(reader, "t1", "r") for _ in range(2)]
