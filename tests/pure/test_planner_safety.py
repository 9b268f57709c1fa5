"""planner: wrong ids and wrong layouts end as errors of the right side, never as addresses outside registered memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mooncake_ascend.errors import ConfigError, LocalProtocolError, MooncakeAscendError, RemoteProtocolError
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.planner.plan import PeerPlan
from vllm_mooncake_ascend.testing.layouts import EngineShape, LayerShape, Storage, lay_out
from vllm_mooncake_ascend.testing.strategies import Transfer, spoiled_ranks, transfers

_STORAGE = Storage(
    kernel_tokens=4,
    kernel_blocks_per_block=1,
    num_blocks=8,
    window_tokens=0,
    has_recurrent_state=False,
    order="heads_major",
    packing="keys_with_values",
    is_interleaved=False,
    padding_bytes=(0, 0, 0),
)
_LAYER = LayerShape(name="layer", group_index=0, kind="attention", total_heads=2, key_bytes=2, value_bytes=2)


def _engine(*, layer: dict[str, Any] | None = None, **storage: Any) -> RankLayout:
    shape = EngineShape(
        name="host",
        tp_size=1,
        layers_per_stage=(1,),
        storages=(msgspec.structs.replace(_STORAGE, **storage),),
        base_address=64,
        has_common_region=False,
    )
    (rank,) = lay_out([msgspec.structs.replace(_LAYER, **(layer or {}))], shape)
    return rank


def _plan(local: RankLayout | None = None) -> PeerPlan:
    return PeerPlan.build(local or _engine(), (_engine(),))


_WRONG_TABLES = [
    ((), "of 0 KV cache groups"),
    (((1,),), "has 1 blocks, the tokens to read need 2"),
    (((1, 0),), "null block at position 1"),
    (((0, 1),), "null block at position 0"),
    (((1, 8),), "ids from 1 to 8, there are 8 blocks"),
    (((-1, 2),), "ids from -1 to 2"),
    (((1, 1),), "names a block twice"),
    (((1, 1 << 62),), "ids from 1 to 4611686018427387904"),
    (((1, 1 << 64),), "beyond 64 bits"),
]


@pytest.mark.parametrize(("block_ids", "words"), _WRONG_TABLES)
def test_a_wrong_remote_block_table_is_the_peers_fault(block_ids: tuple[tuple[int, ...], ...], words: str) -> None:
    """Goal: a hostile or confused peer fails its read. Method: one wrong table at a time."""
    with pytest.raises(RemoteProtocolError, match=words):
        _plan().calls(0, 8, ((1, 2),), block_ids)


@pytest.mark.parametrize(("block_ids", "words"), _WRONG_TABLES)
def test_a_wrong_local_block_table_is_our_fault(block_ids: tuple[tuple[int, ...], ...], words: str) -> None:
    """Goal: our own bug is called one. Method: the same tables on the local side."""
    with pytest.raises(LocalProtocolError, match=words):
        _plan().calls(0, 8, block_ids, ((1, 2),))


@pytest.mark.parametrize("span", [(-1, 4), (5, 4)])
def test_a_range_that_is_none_is_our_fault(span: tuple[int, int]) -> None:
    """Goal: bad token numbers never become offsets. Method: a negative and a reversed range."""
    with pytest.raises(LocalProtocolError, match="that is no range"):
        _plan().calls(*span, ((1, 2),), ((1, 2),))


def test_an_empty_range_needs_no_calls_and_no_blocks() -> None:
    """Goal: nothing to read is an ordinary answer. Method: first = end, empty tables."""
    assert [] == _plan().calls(4, 4, ((),), ((),))


def test_null_blocks_in_front_of_the_range_are_not_looked_at() -> None:
    """Goal: a prefix hit or a window leaves null blocks behind. Method: null first blocks on both sides, range after them."""
    ((_, batch),) = _plan().calls(4, 8, ((0, 3),), ((0, 5),))
    assert 32 == batch.num_bytes


def test_ids_are_bounded_by_the_smallest_plane_of_the_group() -> None:
    """Goal: a plane with fewer blocks than its neighbours is not overrun. Method: V of the peer is one block short."""
    remote = _engine()
    keys, values = remote.planes
    remote = msgspec.structs.replace(remote, planes=(keys, msgspec.structs.replace(values, num_blocks=7)))
    plan = PeerPlan.build(_engine(), (remote,))
    with pytest.raises(RemoteProtocolError, match="there are 7 blocks"):
        plan.calls(0, 4, ((1,),), ((7,),))


def test_a_range_cannot_start_inside_a_row() -> None:
    """Goal: opaque blocks are never written over a prefix that is there. Method: token 2 of blocks of 4."""
    opaque = _engine(layer={"kind": "opaque"})
    plan = PeerPlan.build(opaque, (opaque,))
    with pytest.raises(LocalProtocolError, match="moves 4 tokens at once, the range starts 2 tokens into them"):
        plan.calls(2, 8, ((1, 2),), ((1, 2),))


def test_the_block_at_the_edge_of_a_window_comes_if_both_sides_have_it() -> None:
    """Goal: the last token, computed again, sees one token more than the next one. Method: window 4 at 8 tokens: token 4 and
    up for the next token, token 4 for the last one; at 7 and window 4 token 3 is the edge, in a block of its own."""
    windowed = _engine(window_tokens=4)
    plan = PeerPlan.build(windowed, (windowed,))
    tokens = {
        "both": sum(batch.num_bytes for _, batch in plan.calls(0, 7, ((1, 2),), ((1, 2),))) // 8,
        "null here": sum(batch.num_bytes for _, batch in plan.calls(0, 7, ((0, 2),), ((1, 2),))) // 8,
        "null there": sum(batch.num_bytes for _, batch in plan.calls(0, 7, ((1, 2),), ((0, 2),))) // 8,
    }
    assert {"both": 8, "null here": 4, "null there": 4} == tokens


def test_a_window_that_needs_nothing_of_a_short_read_makes_no_calls() -> None:
    """Goal: a window of one token sees only itself. Method: the peer has dropped its only block."""
    windowed = _engine(window_tokens=1, kernel_tokens=1)
    assert [] == PeerPlan.build(windowed, (windowed,)).calls(0, 1, ((1,),), ((0,),))


def test_layouts_that_do_not_fit_are_refused_when_the_plan_is_built() -> None:
    """Goal: a mismatch shows at the handshake. Method: other bytes per head, and a layer the peer lacks."""
    with pytest.raises(ConfigError, match="bytes per token and head 2 here, 3 there"):
        PeerPlan.build(_engine(), (_engine(layer={"key_bytes": 3}),))
    with pytest.raises(ConfigError, match="no rank of the peer holds its KV head 0"):
        PeerPlan.build(_engine(), (_engine(layer={"name": "other"}),))


def test_a_peer_with_half_its_ranks_is_refused() -> None:
    """Goal: no plan from a layout that is wrong in itself. Method: one rank that says it is one of two."""
    with pytest.raises(RemoteProtocolError, match="1 ranks announced, 2 x 1 needed"):
        PeerPlan.build(_engine(), (msgspec.structs.replace(_engine(), tp_size=2),))


def test_our_own_broken_layout_is_our_fault() -> None:
    """Goal: blame the right side. Method: a local plane outside its region."""
    local = _engine()
    with pytest.raises(LocalProtocolError, match="our own KV layout cannot be used"):
        PeerPlan.build(msgspec.structs.replace(local, regions=local.regions[:0]), (_engine(),))


@settings(max_examples=300)
@given(transfers(), st.data())
def test_no_layout_and_no_ids_lead_outside_the_announced_regions(transfer: Transfer, data: st.DataObject) -> None:
    """Goal: whatever a peer sends, a read stays in memory that both sides registered. Method: odd numbers in a good layout and
    any remote ids; each descriptor of what can still be planned must lie in one region of either side."""
    remotes = data.draw(spoiled_ranks(transfer.remote_ranks))
    ids = st.lists(st.integers(-1, 16), max_size=16).map(tuple)
    remote_block_ids = tuple(data.draw(st.one_of(st.just(table), ids)) for table in transfer.remote_block_ids)
    for local in transfer.local_ranks:
        try:
            plan = PeerPlan.build(local, remotes)
            calls = plan.calls(transfer.first_token, transfer.end_token, transfer.local_block_ids, remote_block_ids)
        except MooncakeAscendError:
            continue
        by_session = {remote.session: remote for remote in remotes}
        for session, batch in calls:
            lengths = batch.lengths_bytes.tolist()
            assert _are_inside(local, batch.local_addresses.tolist(), lengths)
            assert _are_inside(by_session[session], batch.remote_addresses.tolist(), lengths)


def _are_inside(rank: RankLayout, addresses: list[int], lengths: list[int]) -> bool:
    return all(
        any(
            region.base_address <= address and address + length <= region.base_address + region.length_bytes
            for region in rank.regions
        )
        for address, length in zip(addresses, lengths, strict=True)
    )
