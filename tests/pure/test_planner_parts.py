"""planner: its parts by themselves: pairing, merging, splitting, and the proof of the cover."""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.layout.plane import RankLayout, Region
from vllm_mooncake_ascend.layout.regions import RegionMap
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.planner.bounds import CopyBounds
from vllm_mooncake_ascend.planner.cover import cover_faults, region_faults
from vllm_mooncake_ascend.planner.instantiate import chopped, split_calls
from vllm_mooncake_ascend.planner.pairing import expected_readers, pair
from vllm_mooncake_ascend.planner.permute import find_parts
from vllm_mooncake_ascend.planner.plan import PeerPlan
from vllm_mooncake_ascend.planner.template import Runs
from vllm_mooncake_ascend.testing.layouts import EngineShape, LayerShape, Order, Packing, Storage, lay_out
from vllm_mooncake_ascend.testing.strategies import Transfer, transfers


def _engine(
    order: Order = "heads_major",
    packing: Packing = "keys_with_values",
    *,
    num_layers: int = 1,
    tp_size: int = 1,
    total_heads: int = 2,
    is_interleaved: bool = False,
) -> tuple[RankLayout, ...]:
    storage = Storage(
        kernel_tokens=4,
        kernel_blocks_per_block=1,
        num_blocks=16,
        window_tokens=0,
        has_recurrent_state=False,
        order=order,
        packing=packing,
        is_interleaved=is_interleaved,
        padding_bytes=(0, 0, 0),
    )
    model = [
        LayerShape(name=f"layer{n}", group_index=0, kind="attention", total_heads=total_heads, key_bytes=2, value_bytes=2)
        for n in range(num_layers)
    ]
    shape = EngineShape(
        name="host",
        tp_size=tp_size,
        layers_per_stage=(num_layers,),
        storages=(storage,),
        base_address=64,
        has_common_region=True,
    )
    return lay_out(model, shape)


def _lengths(
    local: RankLayout, remote: RankLayout, local_ids: tuple[int, ...], remote_ids: tuple[int, ...], first_token: int = 0
) -> list[int]:
    """Lengths of the descriptors of a read of all tokens of the given blocks."""
    calls = PeerPlan.build(local, (remote,)).calls(first_token, 4 * len(local_ids), (local_ids,), (remote_ids,))
    return [length for _, batch in calls for length in batch.lengths_bytes.tolist()]


# --- pairing ------------------------------------------------------------------------------------------------------------


@given(transfers())
def test_pairs_serve_every_head_of_every_plane_once(transfer: Transfer) -> None:
    """Goal: heads and layers tile, whatever the cut. Method: count (plane, head) over the pairs of each local rank."""
    for local in transfer.local_ranks:
        served = Counter(
            (one.target.name, head)
            for one in pair(local, transfer.remote_ranks)
            for head in range(one.target.first_head, one.target.first_head + one.target.num_heads)
        )
        expected = {
            (plane.name, head): 1
            for plane in local.planes
            for head in range(plane.first_head, plane.first_head + plane.num_heads)
        }
        assert expected == dict(served)


@given(transfers())
def test_a_producer_expects_the_readers_that_come(transfer: Transfer) -> None:
    """Goal: both sides find the same pairing. Method: what the producer counts beside the sources of each reader's plan."""
    coming = Counter(
        session for local in transfer.local_ranks for session in PeerPlan.build(local, transfer.remote_ranks).sources
    )
    expected = tuple(coming[rank.session] for rank in transfer.remote_ranks)
    assert expected == expected_readers(transfer.remote_ranks, transfer.local_ranks)


@pytest.mark.parametrize("total_heads", [1, 2, 8])
def test_engines_cut_alike_read_from_their_namesakes(total_heads: int) -> None:
    """Goal: equal engines pair rank by rank, copies or not. Method: 8 ranks with 1, 2 and 8 KV heads."""
    local = _engine(tp_size=8, total_heads=total_heads)
    assert [(rank.session,) for rank in local] == [PeerPlan.build(rank, local).sources for rank in local]


def test_readers_spread_over_copies() -> None:
    """Goal: no rank serves all readers while its copies idle. Method: 2 heads, 2 readers, 8 producers with 4 copies each."""
    counts = expected_readers(_engine(tp_size=8), _engine(tp_size=2))
    assert (1, 0, 0, 0, 0, 1, 0, 0) == counts


# --- merging ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "packing"),
    [
        ("heads_major", "keys_with_values"),
        ("heads_major", "values_after_keys"),
        ("tokens_major", "keys_with_values"),
    ],
)
def test_a_block_of_equal_layouts_is_one_run(order: Order, packing: Packing) -> None:
    """Goal: K, V, heads and tokens merge. Method: one scattered block, 4 tokens x 2 heads x (2 + 2) bytes."""
    (engine,) = _engine(order, packing)
    assert [32] == _lengths(engine, engine, (3,), (5,))


def test_neighbouring_blocks_merge_whatever_their_order() -> None:
    """Goal: one descriptor for a run of blocks on both sides, falling ids included. Method: four blocks in two runs."""
    (engine,) = _engine()
    assert [64, 64] == _lengths(engine, engine, (9, 8, 3, 2), (5, 4, 8, 7))


def test_blocks_that_are_neighbours_on_one_side_only_stay_apart() -> None:
    """Goal: merging needs both sides. Method: consecutive here, scattered there."""
    (engine,) = _engine()
    assert [32, 32, 32] == _lengths(engine, engine, (2, 3, 4), (2, 4, 6))


def test_interleaved_layers_are_one_run_a_block() -> None:
    """Goal: block-first buffers move by whole blocks of all layers. Method: three layers in each block."""
    (engine,) = _engine(num_layers=3, is_interleaved=True)
    assert [96] == _lengths(engine, engine, (3,), (5,))


def test_a_range_inside_a_block_leaves_its_head_alone_and_brings_its_tail() -> None:
    """Goal: a prefix in the same block is not touched, the last block comes whole. Method: tokens 6 and 7 of two blocks,
    tokens-major, so that a token is 8 bytes."""
    (engine,) = _engine("tokens_major")
    assert [16] == _lengths(engine, engine, (3, 4), (5, 6), first_token=6)


# --- splitting ----------------------------------------------------------------------------------------------------------

_batches = st.lists(st.integers(1, 40), min_size=0, max_size=12).map(
    lambda lengths: CopyBatch(
        np.cumsum([0, *lengths])[:-1] * 3, np.cumsum([0, *lengths])[:-1] + 1000, np.array(lengths, dtype=np.int64)
    )
)


def _bytes(batch: CopyBatch) -> list[tuple[int, int]]:
    return [
        (local + index, remote + index)
        for local, remote, length in zip(
            batch.local_addresses.tolist(), batch.remote_addresses.tolist(), batch.lengths_bytes.tolist(), strict=True
        )
        for index in range(length)
    ]


@given(_batches, st.integers(1, 50), st.integers(1, 5))
def test_calls_together_are_the_batch(batch: CopyBatch, max_bytes: int, max_descriptors: int) -> None:
    """Goal: splitting loses and doubles nothing, in order, within bounds. Method: compare byte by byte."""
    bounds = CopyBounds(max_call_bytes=max_bytes, max_call_descriptors=max_descriptors)
    calls = split_calls(batch, bounds)
    assert _bytes(batch) == [one for call in calls for one in _bytes(call)]
    assert all(call.num_bytes <= max_bytes and len(call) <= max_descriptors for call in calls)


@given(_batches, st.integers(1, 50))
def test_chopping_moves_the_same_bytes_in_short_descriptors(batch: CopyBatch, max_bytes: int) -> None:
    """Goal: no descriptor longer than allowed. Method: compare byte by byte."""
    short = chopped(batch, max_bytes)
    assert _bytes(batch) == _bytes(short)
    assert all(0 < length <= max_bytes for length in short.lengths_bytes.tolist())


# --- cover --------------------------------------------------------------------------------------------------------------


def _changed(runs: Runs, index: int, *, local: int = 0, length: int = 0) -> Runs:
    local_addresses, lengths = runs.local_addresses.copy(), runs.lengths_bytes.copy()
    local_addresses[index] += local
    lengths[index] += length
    return dataclasses.replace(runs, local_addresses=local_addresses, lengths_bytes=lengths)


@given(transfers(), st.data())
def test_the_proof_finds_runs_that_are_missing_moved_or_of_wrong_length(transfer: Transfer, data: st.DataObject) -> None:
    """Goal: the proof has teeth. Method: spoil one run of a good plan, in any of four ways."""
    local = transfer.local_ranks[0]
    plan = PeerPlan.build(local, transfer.remote_ranks)
    geometry = plan.source_plans[0].geometry
    planes = [plane for plane in local.planes if plane.group_index == geometry.group_index]
    all_runs = [runs for source in plan.source_plans if source.geometry == geometry for runs in source.runs]
    assert [] == list(cover_faults(planes, all_runs, geometry))
    which = data.draw(st.integers(0, len(all_runs) - 1))
    runs = all_runs[which]
    index = data.draw(st.integers(0, len(runs.lengths_bytes) - 1))
    spoiled = data.draw(
        st.sampled_from(
            [
                [_changed(runs, index, local=1)],
                [_changed(runs, index, length=1)],
                [_changed(runs, index, length=-1)],
                [runs, runs],
            ]
        )
    )
    assert [] != list(cover_faults(planes, all_runs[:which] + spoiled + all_runs[which + 1 :], geometry))


@given(transfers())
def test_the_proof_finds_runs_that_can_leave_their_regions(transfer: Transfer) -> None:
    """Goal: the outermost blocks count. Method: regions one byte shorter than what the planes reach."""
    local = transfer.local_ranks[0]
    plan = PeerPlan.build(local, transfer.remote_ranks)
    source = plan.source_plans[0]
    here, there = RegionMap.of(local), RegionMap.of(transfer.remote_ranks[source.source_index])
    assert [] == list(region_faults(source.runs, source.geometry, here, there))
    nowhere = RegionMap(starts=(0,), ends=(1,))
    assert "a run leaves the remote regions" in list(region_faults(source.runs, source.geometry, here, nowhere))
    assert "a run leaves the local regions" in list(region_faults(source.runs, source.geometry, nowhere, there))


def test_a_plan_that_fails_its_proof_is_never_handed_out() -> None:
    """Goal: the proof is run at every handshake. Method: the one layout that fools merging: planes of a single block that touch
    across two registered regions."""
    (engine,) = _engine("tokens_major", "apart")
    address = engine.planes[0].base_address
    length_bytes = 4 * 2 * 2
    planes = tuple(
        msgspec.structs.replace(plane, num_blocks=1, base_address=address + index * length_bytes)
        for index, plane in enumerate(engine.planes)
    )
    regions = tuple(Region(base_address=plane.base_address, length_bytes=length_bytes) for plane in planes)
    rank = msgspec.structs.replace(engine, planes=planes, regions=regions)
    with pytest.raises(LocalProtocolError, match="a run leaves the local regions"):
        PeerPlan.build(rank, (rank,))


# --- parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "is_interleaved", "expected"),
    [("keys_with_values", False, [32, 32]), ("apart", False, [16, 16, 16, 16]), ("apart", True, [64])],
)
def test_parts_are_the_runs_of_a_block(packing: Packing, is_interleaved: bool, expected: list[int]) -> None:
    """Goal: whole copies take few descriptors and no bytes of others. Method: two layers, packed, apart and interleaved."""
    (engine,) = _engine("tokens_major", packing, num_layers=2, is_interleaved=is_interleaved)
    parts = find_parts(pair(engine, (engine,)))
    assert parts is not None
    assert expected == [part.length_bytes for part in parts]


def test_blocks_that_lie_in_each_other_have_no_parts() -> None:
    """Goal: nothing of other requests is staged. Method: heads outside of blocks."""
    (engine,) = _engine("heads_outermost")
    assert find_parts(pair(engine, (engine,))) is None
