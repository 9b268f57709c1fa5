"""cli.bench.hits: what is compared, and what is refused before any server starts. The command itself needs real engines."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli import main
from vllm_mooncake_ascend.cli.bench import hits_sets
from vllm_mooncake_ascend.cli.bench.report import compared
from vllm_mooncake_ascend.cli.bench.samples import Sample


def test_pool_hits_are_compared_with_what_the_same_engines_did() -> None:
    """Goal: ratios only within a set and a length. Method: two lengths, all ways; a set without a pool."""
    sample = [Sample(value=1.0, foreign_cores=0.0)]
    ways = (hits_sets.COLD, hits_sets.POOL, hits_sets.LOCAL)
    samples = {hits_sets._measure(way, length, "ours"): sample for way in ways for length in (516, 2053)}
    found = hits_sets._comparisons(samples)
    assert [
        ("516 tokens", "ours: pool hit / cold"),
        ("516 tokens", "ours: pool hit / local hit"),
        ("2,053 tokens", "ours: pool hit / cold"),
        ("2,053 tokens", "ours: pool hit / local hit"),
    ] == [(one.below.case, compared(one.above, one.below)) for one in found]
    alone = {hits_sets._measure(way, 516, "no connector"): sample for way in (hits_sets.COLD, hits_sets.LOCAL)}
    assert [] == hits_sets._comparisons(alone)


def test_prompts_are_new_and_the_seed_s() -> None:
    """Goal: nothing is cached before it is asked, and a run can be repeated."""
    first, second = (hits_sets._prompt(random.Random(seed), 600) for seed in (1, 1))
    draw = random.Random(1)
    blocks = [tuple(hits_sets._prompt(draw, 600)[:16]) for _ in range(50)]
    assert first == second
    assert 50 == len(set(blocks))


@pytest.mark.parametrize("words", [("--model", "nowhere"), ("--set", "theirs"), ("--length", "4000")])
def test_misuse_is_refused_before_anything_starts(words: tuple[str, ...]) -> None:
    """Goal: status 2, at once."""
    assert 2 == CliRunner().invoke(main.build_app(), ["bench", "hits", *words]).exit_code
