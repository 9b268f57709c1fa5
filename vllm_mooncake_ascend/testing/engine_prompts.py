"""Prompts of engine tests, and the answers that vLLM without us gives to them."""

from __future__ import annotations

import random

from vllm_mooncake_ascend.testing.engine_answer import Text
from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_process import EngineProcess

VOCABULARY = range(3, 49_000)
"""Token ids of the test models, special tokens left out."""
GOLDEN_LENGTHS = (5, 32, 65, 300, 700, 31, 33, 128, 513, 1100)
SHORT_GOLDEN_LENGTHS = (5, 32, 65, 100, 200, 31, 33, 64, 96, 130)
"""For a model whose prefill is slow."""
NUM_KEPT_GOLDEN = 5
"""So many of the golden prompts are the same every time, and so are cached; the others are new every time."""

Prompt = tuple[int, ...]


def random_prompt(seed: object, num_tokens: int) -> Prompt:
    """A prompt that no other seed gives."""
    source = random.Random(f"{seed}/{num_tokens}")
    return tuple(source.choice(VOCABULARY) for _ in range(num_tokens))


def golden_prompts(lengths: tuple[int, ...], check: int) -> list[Prompt]:
    """The prompts of one check: half of them those of every check, half new."""
    seeds = ["golden"] * NUM_KEPT_GOLDEN + [f"golden {check}"] * (len(lengths) - NUM_KEPT_GOLDEN)
    return [random_prompt(seed, length) for seed, length in zip(seeds, lengths, strict=True)]


class Reference:
    """Answers of a plain engine, asked once for each prompt."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self._known: dict[tuple[Prompt, Sampling], Text] = {}

    def text(self, prompt: Prompt, sampling: Sampling) -> Text:
        """What vLLM without us answers."""
        key = (prompt, sampling)
        if key not in self._known:
            self._known[key] = self.engine.submit(prompt, sampling).result().text
        return self._known[key]
