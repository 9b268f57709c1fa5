"""A transfer is bound to its prompt: whatever params a request brings, it gets its own prompt's KV or computes it.

vLLM copies one kv_transfer_params to all prompts of a list and all n answers; clients and routers may mix up anything.
"""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, random_prompt

pytestmark = pytest.mark.engine

OTHER_PROMPT = "load_failures_total{reason=other_prompt}"
NUM_TOKENS = 400


def test_a_prompt_that_differs_on_decode_is_computed_there(pair: EnginePair) -> None:
    """Goal: a template or tokenizer that differs between the engines never serves another prompt's KV.

    Method: one token in the middle of the prompt differs; then one at its end; then a token more.
    """
    prompt = random_prompt("template", NUM_TOKENS)
    others = [
        (*prompt[:200], 7, *prompt[201:]),
        (*prompt[:-1], 7),
        (*prompt, 7),
    ]
    before = pair.decode.metric(OTHER_PROMPT)
    params = [pair.prefill_leg(prompt) for _ in others]

    texts = [pair.decode_leg(other, found).text for other, found in zip(others, params, strict=True)]

    assert [pair.expected(other) for other in others] == texts
    assert len(others) == pair.decode.metric(OTHER_PROMPT) - before
    for unread in params:  # decode says nothing of them: one of several prompts that share params may read them
        pair.release(unread)


def test_a_list_of_prompts_with_one_transfer_is_answered_right(pair: EnginePair) -> None:
    """Goal: prompts of a list get right answers though they share params. Method: both engines get three prompts, decode
    all three with the params of the first response, as routers that see one response do."""
    prompts = [random_prompt(f"list {index}", NUM_TOKENS) for index in range(3)]
    prefills = [pair.start_prefill(prompt) for prompt in prompts]
    params = [running.result().kv_transfer_params for running in prefills]

    decodes = [pair.decode.submit(prompt, params=params[0]) for prompt in prompts]

    assert [pair.expected(prompt) for prompt in prompts] == [running.result().text for running in decodes]
    for unread in params[1:]:
        pair.release(unread)


def test_one_transfer_id_for_two_prompts_is_answered_right(pair: EnginePair) -> None:
    """Goal: a transfer id announced twice never joins two prompts. Method: two live prefills under one id; each decode leg
    gets the params of its own prefill."""
    prompts = [random_prompt(f"same id {index}", NUM_TOKENS) for index in range(2)]
    prefills = [pair.start_prefill(prompt, transfer_id="twice") for prompt in prompts]
    params = [running.result().kv_transfer_params for running in prefills]
    assert params[0]["transfer_id"] != params[1]["transfer_id"]

    texts = [pair.decode_leg(prompt, found).text for prompt, found in zip(prompts, params, strict=True)]

    assert [pair.expected(prompt) for prompt in prompts] == texts


def test_one_transfer_id_for_two_prompts_sent_early_is_answered_right(pair: EnginePair) -> None:
    """Goal: as above where decode cannot know the fresh id. Method: both decode legs are sent under the shared id before
    prefill has answered."""
    prompts = [random_prompt(f"same early id {index}", NUM_TOKENS) for index in range(2)]
    params = pair.early_params("twice and early")
    prefills = [pair.start_prefill(prompt, transfer_id="twice and early") for prompt in prompts]

    decodes = [pair.decode.submit(prompt, params=params) for prompt in prompts]

    assert [pair.expected(prompt) for prompt in prompts] == [running.result().text for running in decodes]
    pair.release(prefills[1].result().kv_transfer_params)
    prefills[0].result()


def test_two_answers_to_one_prompt_share_the_transfer(pair: EnginePair) -> None:
    """Goal: n=2 loads for both children and frees prefill once. Method: n=2 with one answer of prefill."""
    prompt = random_prompt("two answers", NUM_TOKENS)

    answer = pair.decode_leg(prompt, pair.prefill_leg(prompt), Sampling(n=2))

    assert {0: pair.expected(prompt), 1: pair.expected(prompt)} == answer.texts


def test_two_answers_asked_of_prefill_offer_one_transfer_that_decode_can_read(pair: EnginePair) -> None:
    """Goal: a router that passes n on to prefill does no harm. Method: n=2 on prefill, the offered params to decode."""
    prompt = random_prompt("two prefills", NUM_TOKENS)
    prefill = pair.start_prefill(prompt, sampling=Sampling(max_tokens=1, n=2), transfer_id="children")
    params = prefill.result().kv_transfer_params

    answer = pair.decode_leg(prompt, params)

    assert pair.expected(prompt) == answer.text
    pair.prefill.reset_cache(reset_connector=True)  # ends the lease of the other child, whose params no response shows


def test_params_used_again_after_the_transfer_are_answered_right(pair: EnginePair) -> None:
    """Goal: a retry with params of a transfer long read gets a right answer. Method: decode forgets its cache between."""
    prompt = random_prompt("used again", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    first = pair.decode_leg(prompt, params).text
    pair.decode.reset_cache()

    second = pair.decode_leg(prompt, params).text

    assert [pair.expected(prompt)] * 2 == [first, second]


def test_params_read_by_two_requests_at_once_are_answered_right(pair: EnginePair) -> None:
    """Goal: two readers of one transfer, as a router's retry makes them, both get right answers. Method: two requests."""
    prompt = random_prompt("two readers", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    pair.decode.hold()
    requests = [pair.decode.submit(prompt, params=params) for _ in range(2)]
    pair.decode.release()

    assert [pair.expected(prompt)] * 2 == [request.result().text for request in requests]
