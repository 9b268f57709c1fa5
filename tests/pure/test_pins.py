"""p2p.pins and what the producer makes of it: a block that many transfers share is pinned, and counted, once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.pins import Pins
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.settings import ProducerSettings
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId

_HOLDINGS = st.lists(st.sets(st.integers(1, 12)).map(tuple), max_size=8)


@given(_HOLDINGS, st.sets(st.integers(1, 12)).map(tuple))
def test_pins_count_each_held_block_once(holdings: list[tuple[int, ...]], more: tuple[int, ...]) -> None:
    """Goal: `len` and `would_be` are sizes of unions. Method: random holdings, added, looked at, and taken away again."""
    pins = Pins()
    for block_ids in holdings:
        pins.add(block_ids)
    held = {block_id for block_ids in holdings for block_id in block_ids}
    assert (len(held), len(held | set(more))) == (len(pins), pins.would_be(more))
    for block_ids in holdings:
        pins.remove(block_ids)
    assert 0 == len(pins)


def test_letting_go_of_what_nobody_holds_is_a_bug() -> None:
    """Goal: an unpin without its pin is found at once. Method: remove twice what was added once."""
    pins = Pins()
    pins.add((3,))
    pins.remove((3,))
    with pytest.raises(AssertionError, match="more blocks were unpinned than pinned"):
        pins.remove((3,))


def _ends(producer: Producer, name: str, block_ids: tuple[int, ...], now: float) -> list[actions.ProducerAction]:
    """A prefill comes and ends with KV in these blocks."""
    request_id = RequestId(name)
    arrived = events.PrefillArrived(
        request_id=request_id,
        wanted_id=TransferId(name),
        fresh_id=TransferId(f"{name}-fresh"),
        prompt_digest=name.encode(),
        num_prompt_tokens=16 * len(block_ids),
    )
    ended = events.PrefillEnded(
        request_id=request_id, has_kv=True, num_tokens=16 * len(block_ids), block_ids=(block_ids,), reason=""
    )
    return producer.handle(arrived, now) + producer.handle(ended, now)


def _producer(max_pinned_blocks: int) -> Producer:
    settings = ProducerSettings(lease_ttl_s=30.0, lease_max_s=300.0, max_pinned_blocks=max_pinned_blocks)
    return Producer(Incarnation("p"), {}, (), settings)


def test_leases_of_one_long_prefix_all_fit() -> None:
    """Goal: a system prompt shared by all costs its blocks once. Method: eight leases of eight blocks and one own, bound 16."""
    producer = _producer(16)
    for index in range(8):
        _ends(producer, f"t{index}", (*range(1, 9), 9 + index), now=float(index))
    assert (8, 16) == (producer.num_leases, producer.num_pinned_blocks)


def test_a_full_bound_gives_up_the_oldest_until_the_new_one_fits() -> None:
    """Goal: ending a lease frees only what no other holds. Method: two that share, then one that needs their shared block."""
    producer = _producer(4)
    _ends(producer, "first", (1, 2), now=0.0)
    _ends(producer, "second", (1, 3), now=1.0)

    done = _ends(producer, "third", (4, 5, 6), now=2.0)

    unpinned = [action.transfer_id for action in done if isinstance(action, actions.UnpinBlocks)]
    assert (["first", "second"], 1, 3) == (unpinned, producer.num_leases, producer.num_pinned_blocks)
