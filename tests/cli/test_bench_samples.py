"""cli.bench.samples: medians, intervals, goals, and what is called noise."""

from __future__ import annotations

import random

import pytest

from vllm_mooncake_ascend.cli.bench.samples import (
    Goal,
    NoiseRules,
    Sample,
    bootstrap_interval,
    figure_verdict,
    quartiles,
    ratio_of,
    ratio_verdict,
    spread_of,
)

RULES = NoiseRules(max_foreign_cores=0.25, min_quiet=5, max_spread=0.3, max_interval=1.3)


def samples(*values: float, foreign_cores: float = 0.0) -> list[Sample]:
    return [Sample(value=value, foreign_cores=foreign_cores) for value in values]


def test_median_and_quartiles_of_quiet_samples() -> None:
    """Goal: the plain case. Method: five values whose quartiles are values."""
    spread = spread_of(samples(10.0, 12.0, 11.0, 9.0, 13.0), RULES, clock="wall")
    assert (11.0, 10.0, 12.0, "") == (spread.median, spread.low_quartile, spread.high_quartile, spread.noise)


def test_quartiles_of_one_value_are_the_value() -> None:
    """Goal: one round is allowed."""
    assert (7.0, 7.0) == quartiles([7.0])


def test_noisy_samples_on_the_wall_clock_do_not_count() -> None:
    """Goal: a busy moment moves nothing. Method: five quiet samples, and four slow ones beside a foreign core."""
    found = samples(1.0, 1.0, 1.0, 1.0, 1.0) + samples(9.0, 9.0, 9.0, 9.0, foreign_cores=1.0)
    spread = spread_of(found, RULES, clock="wall")
    assert (1.0, 9, 5, "") == (spread.median, spread.num_samples, spread.num_quiet, spread.noise)


def test_too_few_quiet_samples_are_noise() -> None:
    """Goal: no result without enough quiet samples, and the reason is told."""
    found = samples(1.0, 1.0, 1.0, 1.0) + samples(1.0, 1.0, 1.0, foreign_cores=0.8)
    spread = spread_of(found, RULES, clock="wall")
    assert "4 of 7 samples were quiet, others used 0.0 cores" == spread.noise
    assert "noise" == figure_verdict(spread, Goal(limit=2.0, is_ceiling=True))


def test_cpu_time_counts_beside_others() -> None:
    """Goal: CPU time is not wall time. Method: the same samples on either clock, all beside a foreign core."""
    found = samples(1.0, 1.0, 1.0, 1.0, 1.0, foreign_cores=1.5)
    assert "" == spread_of(found, RULES, clock="cpu").noise
    assert "" != spread_of(found, RULES, clock="wall").noise


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_a_wide_spread_is_noise(clock) -> None:
    """Goal: a median that every sample moves is none. Method: quartiles 1 and 3 around 2."""
    assert "quartiles 1 and 3" == spread_of(samples(0.5, 1.0, 2.0, 3.0, 4.0), RULES, clock=clock).noise


def test_a_ratio_is_of_pairs() -> None:
    """Goal: a drift that both sides feel does not show. Method: values that grow tenfold, always in the ratio of two."""
    below = samples(*(float(10**power) for power in range(6)))
    above = samples(*(2.0 * sample.value for sample in below))
    found = ratio_of(above, below, RULES, seed=1)
    assert (2.0, 2.0, 2.0, 6, "") == (found.median, found.low, found.high, found.num_pairs, found.noise)


def test_a_ratio_takes_quiet_pairs_where_it_can() -> None:
    """Goal: a pair is quiet when both its samples are. Method: five quiet pairs of ratio one, three others of ratio nine."""
    above = samples(1.0, 1.0, 1.0, 1.0, 1.0) + samples(9.0, 9.0, 9.0)
    below = samples(1.0, 1.0, 1.0, 1.0, 1.0) + samples(1.0, 1.0, 1.0, foreign_cores=2.0)
    found = ratio_of(above, below, RULES, seed=1)
    assert (1.0, 1.0, 1.0, 5) == (found.median, found.low, found.high, found.num_pairs)


def test_a_wide_interval_is_noise() -> None:
    """Goal: a ratio that may be anything is none. Method: ratios from a half to two."""
    below = samples(*[1.0] * 8)
    found = ratio_of(samples(0.5, 2.0, 0.5, 2.0, 0.5, 2.0, 0.5, 2.0), below, RULES, seed=1)
    assert "interval 0.5 to 2" == found.noise
    assert "noise" == ratio_verdict(found, Goal(limit=0.1, is_ceiling=False))


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    """Goal: 95 percent. Method: 200 sets of 25 normal values around 1; a bootstrap of a median is a little generous."""
    draw = random.Random(7)
    num_covered = 0
    for seed in range(200):
        low, high = bootstrap_interval([draw.gauss(1.0, 0.1) for _ in range(25)], seed=seed)
        num_covered += low <= 1.0 <= high
    assert 180 <= num_covered <= 200


def test_the_interval_is_the_same_for_the_same_seed() -> None:
    """Goal: a report can be made again from its samples."""
    values = [1.0, 1.1, 0.9, 1.3, 0.8]
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [((0.95, 0.96, 0.97), "met"), ((0.85, 0.9, 0.95), "open"), ((0.8, 0.81, 0.82), "missed")],
)
def test_a_goal_is_met_by_the_whole_interval(ratios: tuple[float, ...], verdict: str) -> None:
    """Goal: luck meets no goal. Method: at least 0.9, with intervals above, around and below it."""
    found = ratio_of(samples(*ratios), samples(*[1.0] * 3), RULES, seed=1)
    assert verdict == ratio_verdict(found, Goal(limit=0.9, is_ceiling=False))


@pytest.mark.parametrize(("value", "verdict"), [(29.0, "met"), (30.0, "met"), (31.0, "missed")])
def test_a_figure_meets_its_goal_by_its_median(value: float, verdict: str) -> None:
    """Goal: at most means at most."""
    spread = spread_of(samples(value, value, value), RULES, clock="cpu")
    assert verdict == figure_verdict(spread, Goal(limit=30.0, is_ceiling=True))
    assert "" == figure_verdict(spread, None)
