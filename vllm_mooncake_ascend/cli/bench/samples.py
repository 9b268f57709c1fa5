"""From samples to what may be said of them: medians, spread, intervals of ratios, goals, and what the noise swallows.

Pure. A sample carries the noise that was measured around it: cores that other processes used meanwhile.

    figure   median and quartiles of one thing's samples. On the wall clock only quiet samples count, if there are enough of
             them. Marked as noise when there are not, or when the quartiles are far apart.
    ratio    median over interleaved pairs of one thing's sample over the other's, with a bootstrap interval over the pairs.
             What disturbs both members of a pair cancels, so it is marked by the width of its interval alone.

What is marked is not a result: show it as noise, and quote it nowhere.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

BOOTSTRAP_DRAWS = 2_000
CONFIDENCE = 0.95

Clock = Literal["wall", "cpu", "count"]
"""What the samples are seconds of; `count`: of nothing, they are numbers of things that no noise changes."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    value: float
    foreign_cores: float
    """Cores that processes other than ours kept busy while it was taken."""


class NoiseRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a result is noise."""

    max_foreign_cores: float = 0.25
    """A sample with more is not quiet. On two cores our two sides then lose an eighth of their time to others."""
    min_quiet: int = 5
    """A median of fewer samples moves with each of them."""
    max_spread: float = 0.3
    """Quartiles further apart than this share of the median say nothing about a difference of ten or twenty percent."""
    max_interval: float = 1.3
    """Upper over lower end of a ratio's interval."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A bound that a result is to keep."""

    limit: float
    is_ceiling: bool
    """True: at most `limit`. False: at least."""

    def is_met_by(self, value: float) -> bool:
        return value <= self.limit if self.is_ceiling else value >= self.limit

    def __str__(self) -> str:
        return f"{'≤' if self.is_ceiling else '≥'} {self.limit:g}"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """What the samples of one thing say."""

    median: float
    low_quartile: float
    high_quartile: float
    num_samples: int
    num_quiet: int
    foreign_cores: float
    """Median over all samples."""
    noise: str
    """Why it is no result; empty when it is one."""


class RatioSpread(msgspec.Struct, frozen=True, kw_only=True):
    """What interleaved pairs say."""

    median: float
    low: float
    high: float
    """Ends of the interval at CONFIDENCE."""
    num_pairs: int
    noise: str
    """Why it is no result; empty when it is one."""


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper one, both the value itself where there is one only."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def spread_of(samples: Sequence[Sample], rules: NoiseRules, *, clock: Clock) -> Spread:
    """Of the samples of one thing, at least one. CPU time goes on being ours when others run, so all its samples
    count, and counts are what they are."""
    quiet = [sample for sample in samples if sample.foreign_cores <= rules.max_foreign_cores]
    has_quiet = len(quiet) >= min(rules.min_quiet, len(samples))
    counted = quiet if clock == "wall" and has_quiet else samples
    values = [sample.value for sample in counted]
    median, (low, high) = statistics.median(values), quartiles(values)
    foreign_cores = statistics.median(sample.foreign_cores for sample in samples)
    noise = ""
    if clock == "wall" and not has_quiet:
        noise = f"{len(quiet)} of {len(samples)} samples were quiet, others used {foreign_cores:.1f} cores"
    elif high - low > rules.max_spread * abs(median):
        noise = f"quartiles {low:.3g} and {high:.3g}"
    return Spread(
        median=median,
        low_quartile=low,
        high_quartile=high,
        num_samples=len(samples),
        num_quiet=len(quiet),
        foreign_cores=foreign_cores,
        noise=noise,
    )


def ratio_of(numerators: Sequence[Sample], denominators: Sequence[Sample], rules: NoiseRules, *, seed: int) -> RatioSpread:
    """Sample i of both was taken in the same round. Quiet pairs alone, if there are enough."""
    pairs = list(zip(numerators, denominators, strict=True))
    quiet = [pair for pair in pairs if max(sample.foreign_cores for sample in pair) <= rules.max_foreign_cores]
    counted = quiet if len(quiet) >= rules.min_quiet else pairs
    ratios = [above.value / below.value for above, below in counted]
    low, high = bootstrap_interval(ratios, seed=seed)
    return RatioSpread(
        median=statistics.median(ratios),
        low=low,
        high=high,
        num_pairs=len(counted),
        noise=f"interval {low:.3g} to {high:.3g}" if high > rules.max_interval * low else "",
    )


def bootstrap_interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Of the median: percentiles of medians of as many values drawn again and again, with replacement."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(BOOTSTRAP_DRAWS))
    cut = round((1 - CONFIDENCE) / 2 * BOOTSTRAP_DRAWS)
    return medians[cut], medians[-1 - cut]


def figure_verdict(spread: Spread, goal: Goal | None) -> str:
    """met, missed, noise, or nothing to say."""
    if spread.noise:
        return "noise"
    if goal is None:
        return ""
    return "met" if goal.is_met_by(spread.median) else "missed"


def ratio_verdict(spread: RatioSpread, goal: Goal | None) -> str:
    """As `figure_verdict`; open: the goal lies inside the interval."""
    if spread.noise:
        return "noise"
    if goal is None:
        return ""
    ends = {goal.is_met_by(spread.low), goal.is_met_by(spread.high)}
    return "open" if len(ends) == 2 else ("met" if ends == {True} else "missed")
