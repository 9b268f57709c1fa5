"""Planning a read, and the buffers of a store call: 80 layers, block ids in no order, so that nothing can be merged.

Memory is imagined: planning is arithmetic on addresses.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from vllm_mooncake_ascend.cli.bench.report import Measure
from vllm_mooncake_ascend.cli.bench.rounds import Probe, cpu_s_per_call
from vllm_mooncake_ascend.cli.bench.samples import Goal
from vllm_mooncake_ascend.layout import families
from vllm_mooncake_ascend.layout.overlap import extent
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region
from vllm_mooncake_ascend.layout.ranks import head_share
from vllm_mooncake_ascend.planner.plan import PeerPlan
from vllm_mooncake_ascend.planner.store_batch import object_template, store_batch

BLOCK_TOKENS = 128
NUM_HEADS = 1
"""Of 8 on 8 ranks: a block of a layer is 64 KiB, all of them are 40 GiB a rank."""
HEAD_BYTES = 256
"""Of one token's key, and of its value: 128 numbers of two bytes."""
PACKED = "K and V packed"
APART = "K and V apart"
PLAN_GOAL_MS = 30.0


def planner_probes(*, num_blocks: int, num_layers: int, seed: int) -> list[Probe]:
    """Planning one read of all blocks, with K and V in one tensor and in two, and one store call of them."""
    probes = []
    for packing in (PACKED, APART):
        local = imagined_rank(num_layers, num_blocks, packing, base_address=1 << 44, session="decode:1")
        remote = imagined_rank(num_layers, num_blocks, packing, base_address=1 << 45, session="prefill:1")
        plan = PeerPlan.build(local, [remote])
        tables = [tuple(_shuffled(num_blocks, seed + side)) for side in range(2)]
        case = f"{num_blocks:,} blocks x {num_layers} layers, {packing}"
        probes.append(_plan_probe(plan, tables, num_blocks, case))
        probes.append(_store_probe(local, tables[0], case))
    return probes


def _plan_probe(plan: PeerPlan, tables: Sequence[tuple[int, ...]], num_blocks: int, case: str) -> Probe:
    def plan_all() -> None:
        plan.calls(0, num_blocks * BLOCK_TOKENS, (tables[0],), (tables[1],))

    measure = Measure(
        name="plan a read", case=case, subject="ours", unit="ms", clock="cpu", goal=Goal(limit=PLAN_GOAL_MS, is_ceiling=True)
    )
    return Probe(measure=measure, take=lambda: 1e3 * cpu_s_per_call(plan_all))


def _store_probe(rank: RankLayout, block_ids: tuple[int, ...], case: str) -> Probe:
    template = object_template(rank, 0)
    assert template is not None
    measure = Measure(name="plan a save", case=case, subject="ours", unit="ms", clock="cpu")
    return Probe(measure=measure, take=lambda: 1e3 * cpu_s_per_call(lambda: store_batch(template, block_ids)))


def imagined_rank(num_layers: int, num_blocks: int, packing: str, *, base_address: int, session: str) -> RankLayout:
    """One rank, each layer's tensors in regions of their own."""
    heads = head_share(NUM_HEADS, tp_rank=0, tp_size=1)
    token_bytes = NUM_HEADS * HEAD_BYTES
    planes: list[Plane] = []
    regions: list[Region] = []
    for layer in range(num_layers):
        for index in range(1 if packing == PACKED else 2):
            view = families.CacheView(
                layer_name=f"layers.{layer}",
                group_index=0,
                base_address=base_address,
                num_blocks=num_blocks + 1,
                tokens_per_block=BLOCK_TOKENS,
                block_stride_bytes=BLOCK_TOKENS * token_bytes * (2 if packing == PACKED else 1),
                token_stride_bytes=token_bytes,
                head_stride_bytes=HEAD_BYTES * (2 * BLOCK_TOKENS if packing == PACKED else 1),
            )
            placed: tuple[Plane, ...]
            if packing == PACKED:
                placed = families.values_after_keys(view, heads, key_bytes=HEAD_BYTES, value_bytes=HEAD_BYTES)
            else:
                placed = (families.part(view, "kv"[index], heads, bytes_per_token_head=HEAD_BYTES),)
            planes += placed
            end_address = max(extent(plane)[1] for plane in placed)
            regions.append(Region(base_address=base_address, length_bytes=end_address - base_address))
            base_address = end_address + (1 << 21)
    group = GroupLayout(tokens_per_block=BLOCK_TOKENS, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
    return RankLayout(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        session=session,
        groups=(group,),
        planes=tuple(planes),
        regions=tuple(regions),
    )


def _shuffled(num_blocks: int, seed: int) -> list[int]:
    """All block ids but the null block's, in no order."""
    ids = list(range(1, num_blocks + 1))
    random.Random(seed).shuffle(ids)
    return ids
