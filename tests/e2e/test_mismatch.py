"""Engines that do not fit together, and peers that may not be spoken with: refused by name, the request is answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, Reference, random_prompt
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, wait_all_ready

pytestmark = pytest.mark.engine

INCOMPATIBLE = "load_failures_total{reason=peer_incompatible}"
BAD_PARAMS = "requests_ignored_total{reason=bad_params}"
NUM_TOKENS = 300


@pytest.fixture(scope="module")
def misfit(start_for_module: Callable[..., EngineProcess]) -> EngineProcess:
    """A prefill engine with blocks of another size."""
    return start_for_module("misfit-prefill", "tiny-gqa", "kv_producer", block_size=64)


@pytest.fixture(scope="module")
def strict(start_for_module: Callable[..., EngineProcess]) -> EngineProcess:
    """A decode engine that fails requests whose KV does not come."""
    return start_for_module("strict-decode", "tiny-gqa", "kv_consumer", extra={"load_failure_policy": "fail"})


@pytest.fixture
def recomputing(pair: EnginePair, misfit: EngineProcess) -> EnginePair:
    """The misfit and the shared decode engine, which computes what it cannot load."""
    misfit.wait_ready()
    return EnginePair(misfit, pair.decode, pair.reference)


@pytest.fixture
def failing(strict: EngineProcess, misfit: EngineProcess, reference: Reference) -> EnginePair:
    """The misfit and the strict decode engine."""
    wait_all_ready([misfit, strict])
    return EnginePair(misfit, strict, reference)


def test_a_prefill_engine_with_other_blocks_is_refused_by_name(recomputing: EnginePair) -> None:
    """Goal: KV of another shape is never read; the log names the difference. Method: block size 64 before decode's 32."""
    prompt = random_prompt("other blocks", NUM_TOKENS)
    before = recomputing.decode.metric(INCOMPATIBLE)

    answer = recomputing.answer(prompt)

    assert recomputing.expected(prompt) == answer.text
    assert 1 == recomputing.decode.metric(INCOMPATIBLE) - before
    log = recomputing.decode.log_path.read_text()
    assert "block" in log
    assert "64" in log


def test_a_refused_prefill_engine_is_freed_at_once(recomputing: EnginePair) -> None:
    """Goal: a transfer decode refuses does not wait for its lease's end. Method: look at prefill after its next request."""
    recomputing.answer(random_prompt("refused and freed", NUM_TOKENS))

    recomputing.flush(recomputing.prefill)

    assert () == recomputing.prefill.state().held_block_ids


def test_policy_fail_ends_the_request_with_an_error(failing: EnginePair) -> None:
    """Goal: who asks for failures gets them, and the engine lives. Method: the misfit before a strict decode engine."""
    prompt = random_prompt("policy fail", NUM_TOKENS)

    answer = failing.answer(prompt)

    assert ("error", []) == (answer.finish_reason, answer.text.token_ids)
    assert failing.expected(prompt) == failing.decode.submit(prompt).result().text
    assert 0 == failing.decode.state().num_requests


def test_a_peer_outside_this_host_is_not_connected_to(pair: EnginePair) -> None:
    """Goal: a client cannot make decode connect to hosts of its choice. Method: real params with other addresses."""
    prompt = random_prompt("elsewhere", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    elsewhere = ["192.0.2.1", "2001:db8::1", "example.invalid", "10.0.0.1"]
    before = pair.decode.metric(BAD_PARAMS)

    texts = [pair.decode_leg(prompt, {**params, "remote_host": host}, Sampling()).text for host in elsewhere]

    assert [pair.expected(prompt)] * len(elsewhere) == texts
    assert len(elsewhere) == pair.decode.metric(BAD_PARAMS) - before
    pair.release(params)


def test_params_sent_to_the_wrong_role_are_ignored(pair: EnginePair) -> None:
    """Goal: a router that mixes up its lists gets right answers without transfer. Method: each leg to the other engine."""
    prompt = random_prompt("wrong role", NUM_TOKENS)
    params = pair.prefill_leg(prompt)

    on_prefill = pair.prefill.submit(prompt, params=params).result()
    on_decode = pair.decode.submit(prompt, params={"do_remote_decode": True}).result()

    expected = pair.expected(prompt)
    assert (expected, expected, None) == (on_prefill.text, on_decode.text, on_decode.kv_transfer_params)
    pair.release(params)


def test_policy_fail_loads_what_fits(pair: EnginePair, failing: EnginePair) -> None:
    """Goal: the policy changes failures only. Method: the shared prefill engine before the strict decode engine."""
    fitting = EnginePair(pair.prefill, failing.decode, failing.reference)

    assert {} == fitting.wrong_answers([random_prompt("policy fits", NUM_TOKENS)])
    fitting.decode.kill()  # and with it its connections to the shared engine
