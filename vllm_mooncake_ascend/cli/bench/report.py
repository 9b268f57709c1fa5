"""What a run of `bench` found out, as values: what was measured, how it came out, and on what. Written as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_mooncake_ascend.cli.bench.samples import (
    Clock,
    Goal,
    NoiseRules,
    RatioSpread,
    Sample,
    Spread,
    ratio_of,
    spread_of,
)


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is measured. Things that are compared have two of name, case and subject in common."""

    name: str
    """What: `planner`, `read`."""
    case: str
    """Under which circumstances: `8,192 blocks`, `64 MB, fragmented`."""
    subject: str
    """Of whom: `ours`, `raw Mooncake`."""
    unit: str
    """Of a sample: ms, us, GB/s."""
    clock: Clock
    goal: Goal | None = None


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    measure: Measure
    samples: tuple[Sample, ...]
    spread: Spread


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A wish for a ratio of two things that were measured in turns."""

    above: Measure
    below: Measure
    goal: Goal | None = None


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    comparison: Comparison
    spread: RatioSpread


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    command: str
    seed: int
    """Of the order of the samples, and of the bootstrap."""
    started_utc: str
    seconds: float
    versions: Mapping[str, str]
    machine: Mapping[str, str]
    rules: NoiseRules
    figures: tuple[Figure, ...]
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...] = ()
    """What a reader must know: what was left out, and why."""


def compared(above: Measure, below: Measure) -> str:
    """What a ratio is of, in words: subjects, or what one subject did in two ways, or in two cases."""
    if above.subject == below.subject and above.name == below.name:
        return f"{above.subject}: {above.case} / {below.case}"
    if above.subject == below.subject:
        return f"{above.subject}: {above.name.rpartition(', ')[2]} / {below.name.rpartition(', ')[2]}"
    return f"{above.subject} / {below.subject}"


def figures_of(samples: Mapping[Measure, Sequence[Sample]], rules: NoiseRules) -> list[Figure]:
    """In the order of the mapping."""
    return [
        Figure(measure=measure, samples=tuple(found), spread=spread_of(found, rules, clock=measure.clock))
        for measure, found in samples.items()
    ]


def ratios_of(
    comparisons: Sequence[Comparison], samples: Mapping[Measure, Sequence[Sample]], rules: NoiseRules, *, seed: int
) -> list[Ratio]:
    """In the order of the comparisons."""
    return [
        Ratio(comparison=one, spread=ratio_of(samples[one.above], samples[one.below], rules, seed=seed)) for one in comparisons
    ]


def write(report: Report, path: Path) -> None:
    """All of it, samples included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
