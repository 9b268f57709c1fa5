"""cli.bench.hits: what is compared, and what is refused before any server starts. The command itself needs real engines."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli import main
from vllm_mooncake_ascend.cli.bench import hits_sets
from vllm_mooncake_ascend.cli.bench.report import compared
from vllm_mooncake_ascend.cli.bench.samples import Sample


@pytest.mark.parametrize(("kind", "has_goals"), [("ours", True), ("vllm", False)])
def test_what_is_compared(kind: str, has_goals: bool) -> None:
    """Goal: ratios only within a set, its plain engine and a length, with goals for ours. Method: two lengths, all ways."""
    sample = [Sample(value=1.0, foreign_cores=0.0)]
    this = hits_sets.KINDS[kind]
    both = (hits_sets.COLD, hits_sets.LOCAL)
    wanted = [(way, length, this.plain) for way in both for length in (516, 2053)]
    wanted += [(way, length, this.subject) for way in (*both, hits_sets.POOL) for length in (516, 2053)]
    samples = {hits_sets._measure(*one): sample for one in wanted}
    samples |= {hits_sets._decode_measure(subject): sample for subject in (this.subject, this.plain)}

    found = hits_sets._comparisons(this, samples)

    assert all(one.below in samples for one in found)
    told = [(one.above.case, one.above.name, compared(one.above, one.below), one.goal is not None) for one in found]
    beside = f"{this.subject} / {this.plain}"
    expected = [
        (case, f"time to first token, {way}", beside, has_goals) for way in both for case in ("516 tokens", "2,053 tokens")
    ]
    for case in ("516 tokens", "2,053 tokens"):
        expected += [
            (case, "time to first token, pool hit", f"{this.subject}: pool hit / {way}", has_goals and way == hits_sets.LOCAL)
            for way in both
        ]
    expected.append(("8 requests of 96 tokens", "decode", beside, has_goals))
    assert expected == told


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
