"""planner: whatever the cut and the layout of two engines, a read moves the right bytes to the right places, once."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure import oracle
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.layout.plane import RankLayout, Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.planner.bounds import CopyBounds
from vllm_mooncake_ascend.planner.permute import Round, permute
from vllm_mooncake_ascend.planner.pieces import ReadRange
from vllm_mooncake_ascend.planner.plan import PeerPlan
from vllm_mooncake_ascend.testing.layouts import EngineShape, LayerShape, Storage, lay_out
from vllm_mooncake_ascend.testing.strategies import Transfer, transfers
from vllm_mooncake_ascend.types import Session

_TINY = CopyBounds(max_merged_bytes=5, max_call_bytes=7, max_call_descriptors=3)
_NO_BUDGET = CopyBounds(max_request_descriptors=0)
_STAGING_ADDRESS = 1 << 16


def _calls(transfer: Transfer, local: RankLayout, bounds: CopyBounds | None = None) -> list[tuple[Session, CopyBatch]]:
    plan = PeerPlan.build(local, transfer.remote_ranks, bounds=bounds)
    return plan.calls(transfer.first_token, transfer.end_token, transfer.local_block_ids, transfer.remote_block_ids)


def _remote_memories(transfer: Transfer) -> dict[str, oracle.Memory]:
    memories = {}
    for number, rank in enumerate(transfer.remote_ranks):
        memories[rank.session] = oracle.Memory(rank, seed=31 + number)
        oracle.fill(memories[rank.session], rank, transfer.remote_block_ids, transfer.end_token)
    return memories


def _moved_bytes(calls: Iterable[tuple[Session, CopyBatch]]) -> dict[int, tuple[str, int]]:
    return {
        local + index: (session, remote + index)
        for session, batch in calls
        for local, remote, length in zip(
            batch.local_addresses.tolist(), batch.remote_addresses.tolist(), batch.lengths_bytes.tolist(), strict=True
        )
        for index in range(length)
    }


@settings(max_examples=300)
@given(transfers())
def test_every_wanted_byte_is_written_once_and_is_the_right_one(transfer: Transfer) -> None:
    """Goal: the whole point of the planner. Method: carry out each local rank's calls byte by byte on memories filled by the
    oracle; nothing else may change, nothing may leave a region, nothing may be written twice."""
    remotes = _remote_memories(transfer)
    for local in transfer.local_ranks:
        before, after = oracle.Memory(local, seed=1), oracle.Memory(local, seed=1)
        oracle.carried_out(_calls(transfer, local), after, remotes)
        span = (transfer.first_token, transfer.end_token)
        assert oracle.problems(before, after, local, transfer.local_block_ids, span) == []


@given(transfers())
def test_splitting_and_merging_move_the_same_bytes(transfer: Transfer) -> None:
    """Goal: bounds shape calls, never content. Method: compare the byte-to-byte map of a plan in tiny calls with the usual."""
    for local in transfer.local_ranks:
        assert _moved_bytes(_calls(transfer, local)) == _moved_bytes(_calls(transfer, local, _TINY))


@given(transfers())
def test_calls_keep_to_their_bounds(transfer: Transfer) -> None:
    """Goal: no engine call is larger than allowed. Method: plan with tiny bounds and look at every call."""
    for local in transfer.local_ranks:
        for _, batch in _calls(transfer, local, _TINY):
            assert 0 < len(batch) <= 3
            assert 0 < batch.num_bytes <= 7
            assert 0 < batch.lengths_bytes.min() <= batch.lengths_bytes.max() <= 5


@given(transfers())
def test_sources_are_the_sessions_that_calls_name(transfer: Transfer) -> None:
    """Goal: a worker may open connections ahead of a read. Method: each session of a call is among the plan's sources."""
    for local in transfer.local_ranks:
        plan = PeerPlan.build(local, transfer.remote_ranks)
        named = {session for session, _ in _calls(transfer, local)}
        assert named <= set(plan.sources)
        assert len(set(plan.sources)) == len(plan.sources)


@settings(max_examples=150)
@given(transfers(), st.integers(1, 3))
def test_permutations_of_whole_copies_equal_direct_copies(transfer: Transfer, num_slots: int) -> None:
    """Goal: the fall-back moves the same KV. Method: force it with a budget of 0 and staging memory for a few blocks, carry
    out its rounds in order, and judge the outcome by the oracle."""
    remotes = _remote_memories(transfer)
    wanted = ReadRange(
        first_token=transfer.first_token,
        end_token=transfer.end_token,
        local_block_ids=transfer.local_block_ids,
        remote_block_ids=transfer.remote_block_ids,
    )
    for local in transfer.local_ranks:
        before, after = oracle.Memory(local, seed=1), oracle.Memory(local, seed=1)
        plan = PeerPlan.build(local, transfer.remote_ranks, bounds=_NO_BUDGET)
        slot_bytes = max(sum(part.length_bytes for part in source.parts or ()) for source in plan.source_plans)
        staging = Region(base_address=_STAGING_ADDRESS, length_bytes=num_slots * slot_bytes)
        for one in plan.rounds(wanted, staging=staging):
            _carry_out(one, after, remotes, staging)
        span = (transfer.first_token, transfer.end_token)
        assert oracle.problems(before, after, local, transfer.local_block_ids, span) == []


def _carry_out(one: Round, memory: oracle.Memory, remotes: dict[str, oracle.Memory], staging: Region) -> None:
    """Calls into one array that holds cache and staging memory, then the permutations on it."""
    whole = memory.array(staging.base_address + staging.length_bytes)
    for address, (session, remote_address) in oracle.copied(one.calls, remotes).items():
        assert address in memory.bytes or 0 <= address - staging.base_address < staging.length_bytes
        whole[address] = remotes[session].bytes[remote_address]
    for permutation in one.permutations:
        permute(permutation, whole, whole)
    memory.take(whole)


def _unequal_tokens_major() -> tuple[RankLayout, tuple[RankLayout, ...]]:
    """One rank with two heads, and two ranks with one each; blocks of 4 tokens."""
    model = [LayerShape(name="layer", group_index=0, kind="attention", total_heads=2, key_bytes=3, value_bytes=2)]
    storage = Storage(
        kernel_tokens=4,
        kernel_blocks_per_block=1,
        num_blocks=4,
        window_tokens=0,
        has_recurrent_state=False,
        order="tokens_major",
        packing="keys_with_values",
        is_interleaved=False,
        padding_bytes=(0, 0, 0),
    )
    engines = [
        EngineShape(
            name=f"tp{tp_size}",
            tp_size=tp_size,
            layers_per_stage=(1,),
            storages=(storage,),
            base_address=64,
            has_common_region=True,
        )
        for tp_size in (1, 2)
    ]
    (local,), remotes = (lay_out(model, engine) for engine in engines)
    return local, remotes


def test_a_read_over_the_budget_is_refused_where_only_staging_would_help() -> None:
    """Goal: millions of tiny descriptors never reach the engine. Method: tokens-major caches cut for TP 1 and TP 2."""
    local, remotes = _unequal_tokens_major()
    plan = PeerPlan.build(local, remotes, bounds=CopyBounds(max_request_descriptors=7))
    with pytest.raises(ConfigError, match="takes 16 descriptors, the limit is 7"):
        plan.calls(0, 8, ((1, 2),), ((1, 2),))


def test_staging_memory_below_one_block_is_refused() -> None:
    """Goal: every round makes progress. Method: one byte less than a block of the peer has."""
    local, remotes = _unequal_tokens_major()
    plan = PeerPlan.build(local, remotes, bounds=_NO_BUDGET)
    wanted = ReadRange(first_token=0, end_token=8, local_block_ids=((1, 2),), remote_block_ids=((1, 2),))
    with pytest.raises(ConfigError, match="a block of the peer has 20 bytes, the staging memory 19"):
        plan.rounds(wanted, staging=Region(base_address=_STAGING_ADDRESS, length_bytes=19))


@pytest.mark.parametrize(("max_merged_bytes", "expected"), [(100, 2), (7, 12)])
def test_a_read_over_the_budget_goes_ahead_where_nothing_would_make_it_smaller(max_merged_bytes: int, expected: int) -> None:
    """Goal: the budget chooses a way, it does not forbid scattered or long blocks. Method: equal layouts, blocks of 40 bytes,
    in one descriptor each and in six."""
    local, _ = _unequal_tokens_major()
    bounds = CopyBounds(max_request_descriptors=1, max_merged_bytes=max_merged_bytes)
    plan = PeerPlan.build(local, (local,), bounds=bounds)
    ((_, batch),) = plan.calls(0, 8, ((1, 3),), ((3, 1),))
    assert expected == len(batch)
