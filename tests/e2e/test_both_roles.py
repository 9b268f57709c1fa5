"""Two engines with one configuration that both prefill and decode: started at once, each the other's peer.

User case R17, and the liveness of engines that wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, Reference, random_prompt
from vllm_mooncake_ascend.testing.engine_process import EngineFailed, EngineProcess, wait_all_ready

pytestmark = pytest.mark.engine

NUM_TOKENS = 500
ENDED_S = 30.0
"""To end takes a process of vLLM some seconds."""


@pytest.fixture(scope="module")
def twins(start_for_module: Callable[..., EngineProcess], reference: Reference) -> tuple[EnginePair, EnginePair]:
    """Both engines as a pair, and the other way round. They are started at the same instant with the same settings."""
    first, second = (start_for_module(f"twin-{index}", "tiny-gqa", "kv_both") for index in range(2))
    wait_all_ready([first, second])
    pairs = EnginePair(first, second, reference), EnginePair(second, first, reference)
    for pair in pairs:
        pair.warm_up()
    for pair in pairs:
        pair.remember(pair.prefill)
        pair.remember(pair.decode)
    return pairs


def test_two_engines_with_one_configuration_start_at_once(twins: tuple[EnginePair, EnginePair]) -> None:
    """Goal: no port is derived, none collides. Method: start both at once (the fixture), use both directions."""
    prompts = [random_prompt("one configuration", NUM_TOKENS)]

    assert [{}, {}] == [pair.wrong_answers(prompts) for pair in twins]
    assert [{}, {}] == [pair.remains() for pair in twins]


def test_engines_that_wait_for_each_other_both_answer(twins: tuple[EnginePair, EnginePair]) -> None:
    """Goal: leases in both directions at once do not lock the engines up. Method: both are full of leases for the other when
    both decode legs start."""
    prompts = [[random_prompt(f"crossed {side} {index}", 1000) for index in range(4)] for side in range(2)]
    params = [[pair.prefill_leg(prompt) for prompt in side] for pair, side in zip(twins, prompts, strict=True)]

    requests = [
        [pair.decode.submit(prompt, params=found) for prompt, found in zip(side, known, strict=True)]
        for pair, side, known in zip(twins, prompts, params, strict=True)
    ]
    texts = [[running.result().text for running in side] for side in requests]

    assert [[twins[0].expected(prompt) for prompt in side] for side in prompts] == texts
    assert [{}, {}] == [pair.remains() for pair in twins]


def test_an_engine_given_its_own_transfer_answers_right(twins: tuple[EnginePair, EnginePair]) -> None:
    """Goal: a router that picks one engine for both legs does no harm. Method: decode leg to the prefill engine itself."""
    pair = twins[0]
    prompt = random_prompt("own transfer", NUM_TOKENS)

    answer = pair.prefill.submit(prompt, Sampling(), params=pair.prefill_leg(prompt)).result()

    assert pair.expected(prompt) == answer.text
    assert [{}, {}] == [pair.remains() for pair in twins]


def test_a_side_channel_port_that_is_taken_ends_the_start(
    twins: tuple[EnginePair, EnginePair], start: Callable[..., EngineProcess]
) -> None:
    """Goal: never a server that is up with its KV transfer dead. Method: start an engine on the port that another one's side
    channel has; the start must end and name the port."""
    params = twins[0].prefill_leg(random_prompt("port owner", NUM_TOKENS))
    port = params["remote_port"]
    second = start("port-taken", "tiny-gqa", "kv_producer", extra={"side_channel_port": port})

    with pytest.raises(EngineFailed, match=str(port)):
        second.wait_ready()

    assert 0 != second.wait_ended(ENDED_S)
    twins[0].release(params)


def test_an_engine_that_shuts_down_says_goodbye(twins: tuple[EnginePair, EnginePair]) -> None:
    """Goal: a polite end is clean, and decode learns of it at once, not after a silence. Method: shut prefill down while
    decode waits for it, and time the answer. (The last test here: one twin is gone then.)"""
    pair = twins[0]
    prompt = random_prompt("goodbye", NUM_TOKENS)
    running = pair.decode.submit(prompt, params=pair.early_params("goodbye"))

    exit_code = pair.prefill.close()

    assert (0, pair.expected(prompt)) == (exit_code, running.result(timeout_s=limits.PEER_ANSWER_S).text)
