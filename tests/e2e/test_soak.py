"""Rounds of random faults at random moments, run by `make soak`. A round is found again by its seed, the test's parameter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, Prompt, random_prompt
from vllm_mooncake_ascend.testing.engine_process import Running

pytestmark = [pytest.mark.engine, pytest.mark.soak]

FIRST_SEED = 20_261_129
NUM_ROUNDS = 20
NUM_REQUESTS = 4
LONGEST_PROMPT = 700
LONGEST_DELAY_S = 1.5
"""The requests of a round are loaded, or in early rounds prefilled and loaded, within about two seconds."""
SAMPLING = Sampling(max_tokens=24)
ANSWER_S = 90.0

Fault = Callable[[EnginePair, random.Random, list[Running]], None]


def _kill_prefill(pair: EnginePair, _source: random.Random, _requests: list[Running]) -> None:
    pair.prefill.kill()


def _restart_prefill(pair: EnginePair, _source: random.Random, _requests: list[Running]) -> None:
    pair.prefill.restart()


def _kill_decode(pair: EnginePair, _source: random.Random, _requests: list[Running]) -> None:
    pair.decode.kill()


def _freeze_prefill(pair: EnginePair, source: random.Random, _requests: list[Running]) -> None:
    pair.prefill.freeze()
    time.sleep(source.choice((0.1, 1.0, 4.0, 15.0)))
    pair.prefill.thaw()


def _freeze_decode(pair: EnginePair, source: random.Random, _requests: list[Running]) -> None:
    pair.decode.freeze()
    time.sleep(source.choice((0.1, 1.0, 4.0)))
    pair.decode.thaw()


def _leave(_pair: EnginePair, source: random.Random, requests: list[Running]) -> None:
    for running in source.sample(requests, source.randint(1, len(requests))):
        running.abort()
        requests.remove(running)


def _reset_prefill(pair: EnginePair, _source: random.Random, _requests: list[Running]) -> None:
    pair.prefill.reset_cache(reset_connector=True)
    pair.prefill.reset_cache(reset_connector=True)


FAULTS: tuple[Fault, ...] = (
    _kill_prefill,
    _restart_prefill,
    _kill_decode,
    _freeze_prefill,
    _freeze_decode,
    _leave,
    _reset_prefill,
)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_ROUNDS))
def test_a_fault_at_a_random_moment_leaves_right_answers_and_nothing_else(fat: EnginePair, seed: int) -> None:
    """Goal: no moment of any fault gives a wrong token or leaves anything behind. Method: four requests, decode's legs after
    or beside prefill's, a random delay, a random fault; every answer that comes must be right, and the engines as at their
    start (the fixture)."""
    source = random.Random(seed)
    fault = source.choice(FAULTS)
    prompts = [random_prompt(f"soak {seed} {index}", source.randint(100, LONGEST_PROMPT)) for index in range(NUM_REQUESTS)]
    expected = {prompt: fat.expected(prompt, SAMPLING) for prompt in prompts}
    params = source.choice((_after_prefill, _beside_prefill))(fat, seed, prompts)
    requests = [
        (prompt, fat.decode.submit(prompt, SAMPLING, params=found)) for prompt, found in zip(prompts, params, strict=True)
    ]

    time.sleep(source.uniform(0.0, LONGEST_DELAY_S))
    staying = [running for _, running in requests]
    fault(fat, source, staying)
    answers = {
        prompt: running.result(timeout_s=ANSWER_S).text
        for prompt, running in requests
        if running in staying and fat.decode.is_alive
    }

    assert {prompt: expected[prompt] for prompt in answers} == answers


def _after_prefill(pair: EnginePair, _seed: int, prompts: list[Prompt]) -> list[Any]:
    """Params as a router has them, once prefill has answered."""
    return [pair.prefill_leg(prompt) for prompt in prompts]


def _beside_prefill(pair: EnginePair, seed: int, prompts: list[Prompt]) -> list[Any]:
    """Params as a proxy has them that sends both legs at once; prefill has just been given its own."""
    known = pair.early_params("")
    params = [{**known, "transfer_id": f"soak {seed} {index}"} for index in range(len(prompts))]
    for prompt, found in zip(prompts, params, strict=True):
        pair.start_prefill(prompt, transfer_id=found["transfer_id"])
    return params
