"""Cache resets and pauses, as a weight update makes them, while KV is leased or awaited."""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend.testing import engine_messages as messages
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, random_prompt
from vllm_mooncake_ascend.testing.engine_process import RequestRefused

pytestmark = pytest.mark.engine

NUM_TOKENS = 600
REVOKED = "leases_ended_total{reason=revoked}"


def test_a_reset_with_the_connector_revokes_leases(pair: EnginePair) -> None:
    """Goal: KV of old weights is never read after a reset. Method: reset between the legs; decode must compute itself."""
    prompt = random_prompt("revoked", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    before = pair.prefill.metric(REVOKED)

    pair.prefill.reset_cache(reset_connector=True)
    pair.prefill.poison(range(1, pair.prefill.state().num_blocks + 1))
    second_reset = pair.prefill.reset_cache(reset_connector=True)

    assert (True, pair.expected(prompt)) == (second_reset, pair.decode_leg(prompt, params).text)
    pair.flush(pair.prefill)  # metrics are told with a step
    assert 1 == pair.prefill.metric(REVOKED) - before


def test_a_reset_of_the_local_cache_alone_leaves_leases_alone(pair: EnginePair) -> None:
    """Goal: reset_prefix_cache refuses while blocks are leased, as it does for running requests, and the transfer goes on.

    Method: reset without the connector between the legs.
    """
    prompt = random_prompt("not revoked", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    before = pair.decode.metric("loads_done_total{reason=held}")

    was_reset = pair.prefill.reset_cache()

    assert (False, pair.expected(prompt)) == (was_reset, pair.decode_leg(prompt, params).text)
    assert 1 == pair.decode.metric("loads_done_total{reason=held}") - before


def test_a_pause_with_leases_held_fails_and_the_engine_lives(pair: EnginePair) -> None:
    """Goal: the documented order is drain, then reset: a pause that clears the cache says so and harms nothing; after the
    leases were reset it succeeds. Method: pause, reset with the connector, pause again, resume."""
    prompt = random_prompt("paused", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    pause = messages.Pause(mode="abort", clear_cache=True)

    with pytest.raises(RequestRefused, match="RuntimeError"):
        pair.prefill.call(pause)
    pair.prefill.call(messages.Unpause())
    pair.prefill.reset_cache(reset_connector=True)
    pair.prefill.call(pause)
    pair.prefill.call(messages.Unpause())

    assert pair.expected(prompt) == pair.decode_leg(prompt, params).text


def test_a_pause_of_decode_keeps_requests_that_wait_for_kv(pair: EnginePair) -> None:
    """Goal: a load and its lease survive a pause that keeps requests. Method: pause decode after its first step."""
    prompt = random_prompt("kept", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    before = pair.decode.metric("loads_done_total{reason=held}")
    pair.decode.hold()
    running = pair.decode.submit(prompt, params=params)
    pair.decode.step(1)
    pair.decode.call(messages.Pause(mode="keep", clear_cache=False))
    pair.decode.release()
    pair.flush(pair.prefill)
    assert (1, []) == (pair.decode.state().num_requests, running.answer.text.token_ids)

    pair.decode.call(messages.Unpause())

    assert pair.expected(prompt) == running.result().text
    assert 1 == pair.decode.metric("loads_done_total{reason=held}") - before


def test_a_pause_of_decode_that_aborts_releases_prefill(pair: EnginePair) -> None:
    """Goal: aborted loads release their leases. Method: pause with mode abort while decode waits for prefill."""
    prompt = random_prompt("paused and aborted", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    pair.decode.hold()
    running = pair.decode.submit(prompt, params=params)
    pair.decode.step(1)

    pair.decode.call(messages.Pause(mode="abort", clear_cache=False))
    pair.decode.call(messages.Unpause())
    pair.decode.forget(running.request_id)
    pair.decode.release()
    pair.flush(pair.decode)
    pair.flush(pair.prefill)

    assert [(), ()] == [engine.state().held_block_ids for engine in (pair.decode, pair.prefill)]


def test_a_reset_of_decode_with_a_load_under_way_is_answered_right(pair: EnginePair) -> None:
    """Goal: a reset that preempts everything on decode, with one request waiting for KV, harms no answer. Method: hold
    decode with the load under way, reset, go on."""
    prompt = random_prompt("decode reset", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    pair.decode.hold()
    running = pair.decode.submit(prompt, params=params)
    pair.decode.step(2)

    pair.decode.reset_cache()
    pair.decode.release()

    assert pair.expected(prompt) == running.result().text
