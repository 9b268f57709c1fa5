"""Clients that leave, at every stage of a request: both engines are free again at once, and go on answering right.

User case R01 without servers: an engine is held between two steps, and the request is aborted right there.
"""

from __future__ import annotations

import time

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, random_prompt

pytestmark = pytest.mark.engine

NUM_TOKENS = 1024
FREED_S = 5.0
"""Releases and short reads take milliseconds, on a busy host seconds; a send lease takes thirty."""
POLL_S = 0.05


def _still_held(pair: EnginePair) -> list[tuple[int, ...]]:
    """What decode and prefill hold after some more requests each, and time for a read that is under way to end."""
    deadline_s = time.monotonic() + FREED_S
    for engine in (pair.decode, pair.prefill):
        engine.release()
    while True:
        held = []
        for engine in (pair.decode, pair.prefill):
            pair.flush(engine)
            held.append(engine.state().held_block_ids)
        if not any(held) or time.monotonic() > deadline_s:
            return held
        time.sleep(POLL_S)


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_client_leaves_during_prefill(pair: EnginePair, num_chunks: int) -> None:
    """Goal: an aborted prefill holds nothing. Method: abort it after so many of its three chunks."""
    pair.prefill.hold()
    running = pair.start_prefill(random_prompt(f"leaves in chunk {num_chunks}", 1400))
    if num_chunks:
        pair.prefill.step(num_chunks)

    running.abort()

    assert () == pair.prefill.state().held_block_ids


def test_client_leaves_between_prefill_and_decode(pair: EnginePair) -> None:
    """Goal: leases of prefills that nobody continues end at the proxy's word, so that prefill never fills up.

    Method: twelve prompts, together more than prefill's cache; each is released instead of decoded.
    """
    for index in range(12):
        pair.release(pair.prefill_leg(random_prompt(f"leaves between {index}", NUM_TOKENS)))

    assert [(), ()] == _still_held(pair)


def test_client_leaves_before_decode_takes_a_step(pair: EnginePair) -> None:
    """Goal: a request aborted before its first step releases prefill. Method: decode is held, the request comes and goes."""
    prompt = random_prompt("leaves before step", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    pair.decode.hold()
    running = pair.decode.submit(prompt, params=params)

    running.abort()

    assert [(), ()] == _still_held(pair)


def test_decode_rejects_the_request_before_admission(pair: EnginePair) -> None:
    """Goal: what the API server refuses releases prefill (vLLM 0.30+). Method: the hook vLLM calls then."""
    params = pair.prefill_leg(random_prompt("rejected", NUM_TOKENS))

    pair.decode.reject(params, request_id="rejected")

    assert [(), ()] == _still_held(pair)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_client_leaves_while_decode_waits_for_prefill(pair: EnginePair, num_steps: int) -> None:
    """Goal: a waiting request that goes leaves no wait behind, whatever prefill does. Method: prefill is held mid-way and
    goes on after decode's client has left."""
    prompt = random_prompt(f"leaves waiting {num_steps}", 1400)
    transfer_id = f"left {num_steps}"
    params = pair.early_params(transfer_id)
    pair.prefill.hold()
    prefill = pair.start_prefill(prompt, transfer_id=transfer_id)
    pair.prefill.step(1)
    pair.decode.hold()
    decode = pair.decode.submit(prompt, params=params)
    pair.decode.step(num_steps)

    decode.abort()
    pair.prefill.release()
    prefill.result()

    assert [(), ()] == _still_held(pair)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5])
def test_client_leaves_in_the_first_steps_of_decode(pair: EnginePair, num_steps: int) -> None:
    """Goal: no moment of a load is a bad one to leave. Method: abort after so many steps of a held decode engine: before the
    offer, with blocks allocated, in mid-read, with the read reported, after the first token."""
    prompt = random_prompt(f"leaves in step {num_steps}", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    pair.decode.hold()
    running = pair.decode.submit(prompt, params=params)
    pair.decode.step(num_steps)

    running.abort()

    assert [(), ()] == _still_held(pair)


def test_client_leaves_after_the_first_token(pair: EnginePair) -> None:
    """Goal: a client that leaves while decode answers costs prefill nothing. Method: abort at the first token of many."""
    prompt = random_prompt("leaves after token", NUM_TOKENS)
    running = pair.decode.submit(prompt, Sampling(max_tokens=2000), params=pair.prefill_leg(prompt))
    running.wait_tokens(1)

    running.abort()

    assert [(), ()] == _still_held(pair)


def test_decode_rejects_what_prefill_accepted(pair: EnginePair) -> None:
    """Goal: prefill is freed when decode's engine refuses the request (user case R02 at the engine). Method: the refusal
    and the notice vLLM's server sends then, ten times over."""
    for index in range(10):
        params = pair.prefill_leg(random_prompt(f"accepted {index}", 2000))
        pair.decode.reject(params, request_id=f"refused-{index}")

    assert [(), ()] == _still_held(pair)
