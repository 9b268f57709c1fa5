"""Engines that run out of KV blocks while they save and load: what others find in the pool is right.

User pain rows H8, W10, W11, W12.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pool import LOADED_TOKENS, PoolEngines, results
from vllm_mooncake_ascend.testing.engine_process import EngineProcess
from vllm_mooncake_ascend.testing.engine_prompts import SHORT_GOLDEN_LENGTHS, random_prompt

pytestmark = pytest.mark.engine

PREEMPTIONS = "vllm:num_preemptions_total"
NUM_BLOCKS = 50


def test_preemption_under_saves_and_loads_stores_nothing_wrong(
    pool: PoolEngines, start_in_pool: Callable[..., EngineProcess]
) -> None:
    """Goal: blocks that vLLM takes from a request and gives to another are never stored under the first one's name. Method: six
    requests of 300 + 200 tokens on 49 blocks, which hold three of them; generated blocks are saved, too. Another engine loads
    all of it. Then it is loaded on the small engine, under the same need."""
    small = start_in_pool(
        "pool-small",
        extra={"save_decode": True, "max_saved_ratio": 0.9},
        num_gpu_blocks_override=NUM_BLOCKS,
        max_model_len=1024,
    )
    small.wait_ready()
    crowd = PoolEngines([small], pool.reference, golden_lengths=SHORT_GOLDEN_LENGTHS)
    crowd.warm_up()
    sampling = Sampling(max_tokens=200)
    prompts = [random_prompt(f"crowd {index}", 300 + index) for index in range(6)]

    assert {} == pool.wrong(results({prompt: small.submit(prompt, sampling) for prompt in prompts}), sampling)
    num_preempted = crowd.take_count(small, PREEMPTIONS)
    crowd.settle(small)
    pool.take_count(pool.first, LOADED_TOKENS)
    longer = [(*prompt, *pool.expected(prompt, sampling).token_ids, 77) for prompt in prompts]
    assert {} == pool.wrong_answers(pool.first, longer)
    num_loaded = pool.take_count(pool.first, LOADED_TOKENS)

    crowd.forget(small)
    crowd.take_count(small, LOADED_TOKENS)
    assert {} == pool.wrong(results({prompt: small.submit(prompt, sampling) for prompt in prompts}), sampling)
    assert crowd.take_count(small, LOADED_TOKENS) > 0
    assert num_preempted > 0
    assert num_loaded >= 6 * 288
    assert {} == crowd.remains()
