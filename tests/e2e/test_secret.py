"""Engines with a cluster secret: transfers are signed and encrypted, and who has not the secret gets nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import zmq

from vllm_mooncake_ascend.testing.engine_pair import EnginePair, Reference, random_prompt
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, wait_all_ready
from vllm_mooncake_ascend.types import Incarnation
from vllm_mooncake_ascend.wire import codec, messages

pytestmark = pytest.mark.engine

BAD_PARAMS = "requests_ignored_total{reason=bad_params}"
SECRET = "a secret of the tests alone"
NUM_TOKENS = 300
SILENCE_MS = 1_000


@pytest.fixture(scope="module")
def secured(start_for_module: Callable[..., EngineProcess], reference: Reference) -> EnginePair:
    """A pair that shares a secret."""
    extra = {"cluster_secret": SECRET}
    engines = [
        start_for_module("secured-prefill", "tiny-gqa", "kv_producer", extra=extra),
        start_for_module("secured-decode", "tiny-gqa", "kv_consumer", extra=extra),
    ]
    wait_all_ready(engines)
    prefill, decode = engines
    return EnginePair(prefill, decode, reference)


def test_engines_with_one_secret_transfer(secured: EnginePair) -> None:
    """Goal: signing and encryption get in nobody's way. Method: prompts around a block's edge, all loaded."""
    prompts = [random_prompt("secret", length) for length in (31, 32, 33, NUM_TOKENS)]
    before = secured.decode.metric("loads_done_total{reason=held}")

    assert {} == secured.wrong_answers(prompts)
    assert len(prompts) == secured.decode.metric("loads_done_total{reason=held}") - before


@pytest.mark.parametrize(
    "forged",
    [
        {"signature": None},
        {"signature": "0" * 64},
        {"remote_port": 9},
        {"remote_incarnation": "another"},
        {"transfer_id": "another"},
        {"issued_at_s": 1},
    ],
    ids=lambda forged: next(iter(forged)),
)
def test_params_not_issued_by_an_engine_with_the_secret_are_ignored(secured: EnginePair, forged: dict[str, Any]) -> None:
    """Goal: a client cannot make up or change a transfer. Method: real params with one field changed."""
    prompt = random_prompt(f"forged {forged}", NUM_TOKENS)
    params = secured.prefill_leg(prompt)
    before = secured.decode.metric(BAD_PARAMS)

    answer = secured.decode_leg(prompt, {**params, **forged})

    assert secured.expected(prompt) == answer.text
    assert 1 == secured.decode.metric(BAD_PARAMS) - before


def test_a_stranger_gets_no_answer_from_the_side_channel(secured: EnginePair) -> None:
    """Goal: without the secret nobody speaks with an engine. Method: a well-formed Hello over an unencrypted socket."""
    params = secured.prefill_leg(random_prompt("stranger", NUM_TOKENS))
    hello = messages.Hello(incarnation=Incarnation("stranger"), version=messages.PROTOCOL_VERSION)

    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(f"tcp://{params['remote_host']}:{params['remote_port']}")
        stranger.send(codec.encode(hello))
        answered = stranger.poll(SILENCE_MS)

    assert 0 == answered
