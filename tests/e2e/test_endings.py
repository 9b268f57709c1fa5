"""Prefills that end early, and requests whose match vLLM discards: KV is offered where it is whole, released at once where
nobody needs it."""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, Prompt, random_prompt

pytestmark = pytest.mark.engine

LOADED = "loads_done_total{reason=held}"
NUM_TOKENS = 300


def _first_token(pair: EnginePair, prompt: Prompt) -> int:
    return pair.expected(prompt, Sampling(max_tokens=1)).token_ids[0]


def test_a_prefill_that_stops_at_its_first_token_offers_its_kv(pair: EnginePair) -> None:
    """Goal: a stop is an end with KV, not a failure. Method: the first token is a stop token on prefill and decode."""
    prompt = random_prompt("stop", NUM_TOKENS)
    stop = (_first_token(pair, prompt),)
    prefill = pair.start_prefill(prompt, sampling=Sampling(max_tokens=1, stop_token_ids=stop)).result()
    assert "stop" == prefill.finish_reason
    before = pair.decode.metric(LOADED)

    sampling = Sampling(stop_token_ids=stop)
    answer = pair.decode_leg(prompt, prefill.kv_transfer_params, sampling)

    assert (pair.expected(prompt, sampling), "stop") == (answer.text, answer.finish_reason)
    assert 1 == pair.decode.metric(LOADED) - before


def test_a_prefill_that_computes_more_tokens_than_one_offers_its_prompt(pair: EnginePair) -> None:
    """Goal: routers that do not cut max_tokens work too. Method: prefill answers 40 tokens, beyond a block's edge."""
    prompt = random_prompt("long prefill", NUM_TOKENS)
    params = pair.start_prefill(prompt, sampling=Sampling(max_tokens=40)).result().kv_transfer_params
    before = pair.decode.metric(LOADED)

    answer = pair.decode_leg(prompt, params)

    assert pair.expected(prompt) == answer.text
    assert (NUM_TOKENS, 1) == (params["remote_num_tokens"], pair.decode.metric(LOADED) - before)


def test_an_aborted_prefill_offers_nothing_and_holds_nothing(pair: EnginePair) -> None:
    """Goal: decode that waits for a prefill whose client left computes at once. Method: abort prefill after its second
    chunk while decode waits."""
    prompt = random_prompt("aborted prefill", 1400)
    params = pair.early_params("aborted")
    pair.prefill.hold()
    prefill = pair.start_prefill(prompt, transfer_id="aborted")
    pair.prefill.step(2)
    decode = pair.decode.submit(prompt, params=params)
    prefill.abort()
    assert () == pair.prefill.state().held_block_ids
    pair.prefill.release()

    answer = decode.result(timeout_s=20)

    assert pair.expected(prompt) == answer.text


def test_prompt_logprobs_on_decode_release_the_lease(pair: EnginePair) -> None:
    """Goal: vLLM discards our match for prompt_logprobs; prefill's blocks are freed at once, not after the lease's time.

    Method: such a request, then a look at prefill after its next request.
    """
    prompt = random_prompt("prompt logprobs", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    assert pair.prefill.state().held_block_ids

    sampling = Sampling(prompt_logprobs=1)
    answer = pair.decode_leg(prompt, params, sampling)

    assert (pair.expected(prompt, sampling), NUM_TOKENS) == (answer.text, answer.num_prompt_logprobs)
    pair.flush(pair.prefill)
    assert () == pair.prefill.state().held_block_ids


def test_prompt_logprobs_on_prefill_offer_the_kv(pair: EnginePair) -> None:
    """Goal: prompt_logprobs on prefill change nothing for decode. Method: such a prefill, an ordinary decode."""
    prompt = random_prompt("prefill logprobs", NUM_TOKENS)
    prefill = pair.start_prefill(prompt, sampling=Sampling(max_tokens=1, prompt_logprobs=1)).result()

    answer = pair.decode_leg(prompt, prefill.kv_transfer_params)

    assert pair.expected(prompt) == answer.text


def test_a_prompt_decode_has_already_releases_the_lease(pair: EnginePair) -> None:
    """Goal: a local hit that leaves less than a block frees prefill soon. Method: decode computed the prompt before."""
    prompt = random_prompt("has it all", 10 * 32 + 1)
    pair.decode.submit(prompt).result()

    answer = pair.answer(prompt)

    assert pair.expected(prompt) == answer.text
    pair.flush(pair.prefill)
    assert () == pair.prefill.state().held_block_ids
