"""Engines that run out of KV blocks: what was loaded or leased is preempted, computed again, and answered right.

User case R09.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, Reference, random_prompt
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, wait_all_ready

pytestmark = pytest.mark.engine

PREEMPTIONS = "vllm:num_preemptions_total"


@pytest.fixture(scope="module")
def small(start_for_module: Callable[..., EngineProcess], reference: Reference) -> EnginePair:
    """A pair with few blocks on either side: 49 on prefill, 95 on decode."""
    engines = [
        start_for_module("small-prefill", "tiny-gqa", "kv_producer", num_gpu_blocks_override=50, max_model_len=1536),
        start_for_module("small-decode", "tiny-gqa", "kv_consumer", num_gpu_blocks_override=96, max_model_len=1536),
    ]
    wait_all_ready(engines)
    prefill, decode = engines
    small = EnginePair(prefill, decode, reference)
    small.warm_up()
    return small


def test_decode_preempted_after_its_load_computes_locally(small: EnginePair) -> None:
    """Goal: a preempted request whose KV came from prefill neither loads twice nor answers wrong. Method: six requests of
    400 + 300 tokens on 95 blocks, which hold four of them."""
    sampling = Sampling(max_tokens=300)
    prompts = [random_prompt(f"preempted {index}", 400) for index in range(6)]
    before = small.decode.metrics()

    requests = [small.decode.submit(prompt, sampling, params=small.prefill_leg(prompt)) for prompt in prompts]
    texts = [running.result().text for running in requests]

    after = small.decode.metrics()
    assert [small.expected(prompt, sampling) for prompt in prompts] == texts
    assert after[PREEMPTIONS] > before.get(PREEMPTIONS, 0)
    loads = "mooncake_ascend:reads_ordered_total"
    assert len(prompts) == after[loads] - before.get(loads, 0)
    assert {} == small.remains()


def test_prefill_preempted_before_its_end_offers_the_whole_prompt(small: EnginePair) -> None:
    """Goal: blocks of a preempted prefill are never offered, those of its second run are. Method: two prefills that go on to
    answer 150 tokens fill 49 blocks, so that one must give way."""
    prompts = [random_prompt(f"giving way {index}", 700) for index in range(2)]
    before = small.prefill.metric(PREEMPTIONS)
    prefills = [small.start_prefill(prompt, sampling=Sampling(max_tokens=150)) for prompt in prompts]
    params = [running.result().kv_transfer_params for running in prefills]

    texts = [small.decode_leg(prompt, found).text for prompt, found in zip(prompts, params, strict=True)]

    assert [small.expected(prompt) for prompt in prompts] == texts
    assert small.prefill.metric(PREEMPTIONS) > before
    assert {} == small.remains()


def test_leases_on_a_full_prefill_engine_give_way(small: EnginePair) -> None:
    """Goal: leases that nobody reads do not stop prefill. Method: more leased prompts than prefill has blocks for; the
    newest one still loads, the oldest ones are computed by decode."""
    prompts = [random_prompt(f"leased {index}", 500) for index in range(6)]
    params = [small.prefill_leg(prompt) for prompt in prompts]

    texts = [small.decode_leg(prompt, found).text for prompt, found in zip(prompts, params, strict=True)]

    assert [small.expected(prompt) for prompt in prompts] == texts
    assert {} == small.remains()
