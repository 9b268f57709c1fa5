"""Proof that decode's KV comes over the wire from prefill's blocks, and is decode's own afterwards."""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, random_prompt

pytestmark = pytest.mark.engine

LOADED_TOKENS = "vllm:prompt_tokens_by_source_total{source=external_kv_transfer}"
NUM_TOKENS = 500


def test_decode_answers_from_the_bytes_in_prefill(pair: EnginePair) -> None:
    """Goal: the answer depends on prefill's memory, so decode did not compute it. Method: spoil the leased blocks before
    decode reads them; the answer must change."""
    prompt = random_prompt("spoiled before", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    pair.prefill.poison(pair.prefill.state().held_block_ids)

    spoiled = pair.decode_leg(prompt, params)

    assert pair.expected(prompt) != spoiled.text


def test_decode_keeps_its_own_copy(pair: EnginePair) -> None:
    """Goal: after the transfer nothing depends on prefill's memory. Method: spoil all of it, ask decode alone again."""
    prompt = random_prompt("spoiled after", NUM_TOKENS)
    first = pair.answer(prompt)
    pair.flush(pair.prefill)
    assert () == pair.prefill.state().held_block_ids
    pair.prefill.poison(range(1, pair.prefill.state().num_blocks + 1))
    pair.prefill.reset_cache()

    again = pair.decode.submit(prompt).result()

    expected = pair.expected(prompt)
    assert (expected, expected) == (first.text, again.text)
    assert 480 == again.num_cached_tokens


def test_metrics_tell_loaded_tokens_from_computed_ones(pair: EnginePair) -> None:
    """Goal: an operator sees whether transfers happen. Method: one request with a transfer, one without."""
    before = pair.decode.metric(LOADED_TOKENS)
    pair.answer(random_prompt("with transfer", NUM_TOKENS))
    with_transfer = pair.decode.metric(LOADED_TOKENS)
    pair.decode.submit(random_prompt("without transfer", NUM_TOKENS), Sampling()).result()
    without_transfer = pair.decode.metric(LOADED_TOKENS)

    # vLLM counts the whole prompt as loaded, though it computes the last token itself to have something to sample from.
    assert [NUM_TOKENS, 0] == [with_transfer - before, without_transfer - with_transfer]
