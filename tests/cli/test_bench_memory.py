"""cli.bench.transfer_memory: both sides of `bench transfer` have the same bytes in the layout that they say they have."""

from __future__ import annotations

import numpy as np

from vllm_mooncake_ascend.cli.bench import transfer_memory
from vllm_mooncake_ascend.cli.bench.transfer_memory import NUM_LAYERS, STEP_BYTES
from vllm_mooncake_ascend.layout.validity import rank_flaws
from vllm_mooncake_ascend.planner.plan import PeerPlan


def test_equal_seeds_make_equal_memory() -> None:
    """Goal: what a read brings can be compared without asking the source."""
    first, again, other = (transfer_memory.make_memory(1 << 16, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_layout_is_valid_and_merges_as_its_name_says() -> None:
    """Goal: neighbours merge into one run a layer, scattered blocks into one each, unless two happen to be neighbours."""
    memory = transfer_memory.make_memory(9 * STEP_BYTES, seed=1)
    region = transfer_memory.region_of(memory)
    rank = transfer_memory.layout_of(region, "here:1")
    plan = PeerPlan.build(rank, [rank])
    assert [] == list(rank_flaws(rank))
    for is_fragmented, most in ((False, NUM_LAYERS), (True, 4 * NUM_LAYERS)):
        ids = [transfer_memory.block_ids(4 * STEP_BYTES, region, is_fragmented=is_fragmented, seed=seed) for seed in (1, 2)]
        calls = plan.calls(0, 4 * transfer_memory.BLOCK_TOKENS, (ids[0],), (ids[1],))
        assert 4 * STEP_BYTES == sum(batch.num_bytes for _, batch in calls)
        assert NUM_LAYERS <= sum(len(batch) for _, batch in calls) <= most


def test_block_ids_are_whole_and_never_null() -> None:
    """Goal: every size up to the memory's can be asked for."""
    memory = transfer_memory.make_memory(9 * STEP_BYTES, seed=1)
    region = transfer_memory.region_of(memory)
    for is_fragmented in (False, True):
        ids = transfer_memory.block_ids(8 * STEP_BYTES, region, is_fragmented=is_fragmented, seed=1)
        assert set(range(1, 9)) == set(ids)
