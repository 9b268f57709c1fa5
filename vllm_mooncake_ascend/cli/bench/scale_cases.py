"""What `bench scale` makes of its loads: samples, counts at both ends of each series, ratios of the ends, a profile of them.

A series is flat where what grows is not the request itself: its largest load over its smallest is to stay below FLAT. The cost
of a prompt may grow as its length does: of the two longest ones the ratio is to stay below that of their lengths and a little.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

import numpy as np

from vllm_mooncake_ascend.cli.bench import scale_profile
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.rounds import Probe
from vllm_mooncake_ascend.cli.bench.run import Run
from vllm_mooncake_ascend.cli.bench.samples import Goal, Sample
from vllm_mooncake_ascend.cli.bench.scale_fleet import Counts
from vllm_mooncake_ascend.cli.bench.scale_loads import Load

FLAT = 1.3
"""Largest over smallest load of a series that is to be flat: what colder caches make of the same work is not what is sought."""
FLAT_CALLS = 1.02
"""The same of calls, which no cache changes."""
LINEAR = 1.1
"""On top of the ratio of two lengths."""

PROFILE_SAMPLES = 4
"""A profile takes as long as so many samples."""


def measure_series(this: Run, name: str, loads: Sequence[Load], *, grows_with_size: bool = False) -> None:
    """Measure loads in turns, and compare those of one subject."""
    measures = {load: _measure(name, load) for load in loads}
    by_subject: dict[str, list[Load]] = {}
    for load in sorted(loads, key=lambda load: load.size):
        by_subject.setdefault(load.subject, []).append(load)
    comparisons = [
        _comparison(measures, found, grows_with_size=grows_with_size) for found in by_subject.values() if len(found) > 1
    ]
    gc.collect()
    gc.freeze()  # as vLLM's engine does once it has started
    try:
        this.measure([Probe(measure=measures[load], take=load.take) for load in loads], comparisons)
    finally:
        gc.unfreeze()
    for subject, found in by_subject.items():
        _count_ends(this, name, subject, found, is_flat=not grows_with_size)


def _measure(name: str, load: Load) -> Measure:
    return Measure(name=name, case=load.case, subject=load.subject, unit="us", clock="cpu")


def _comparison(measures: Mapping[Load, Measure], loads: Sequence[Load], *, grows_with_size: bool) -> Comparison:
    below, above = (loads[-2] if grows_with_size else loads[0]), loads[-1]
    limit = LINEAR * above.size / below.size if grows_with_size else FLAT
    return Comparison(above=measures[above], below=measures[below], goal=Goal(limit=limit, is_ceiling=True))


def _count_ends(this: Run, name: str, subject: str, loads: Sequence[Load], *, is_flat: bool) -> None:
    """Counts, and a profile, of the smallest and the largest load of a subject."""
    ends = [loads[0], loads[-1]] if len(loads) > 1 else [loads[0]]
    costs, sent, calls = [], [], {}
    for load in ends:
        counts = _counts(load)
        costs.append(
            scale_profile.profiled(
                load.serve, load.num_requests, renew_state=load.renew_state, min_s=PROFILE_SAMPLES * load.sample_s
            )
        )
        found = {
            "messages": counts.messages / load.num_requests,
            "actions": counts.actions / load.num_requests,
        }
        for unit, count in found.items():
            this.add({_counted(name, load, unit): [_exactly(count)]})
        calls[_counted(f"{name}, calls", load, "calls")] = [_exactly(scale_profile.num_calls(costs[-1]))]
        sent.append(
            f"{counts.message_bytes / load.num_requests:,.0f} bytes in messages, "
            f"{counts.order_blocks / load.num_requests:,.0f} block ids in orders to workers"
        )
    below, *above = calls
    goal = Goal(limit=FLAT_CALLS, is_ceiling=True) if is_flat else None
    this.add(calls, [Comparison(above=one, below=below, goal=goal) for one in above])
    if len(ends) == 2:
        path = f"{name}, {subject}, {ends[0].case} -> {ends[1].case}"
        if sent[0] != sent[1]:
            this.note(f"Sent for {path}: {sent[0]} -> {sent[1]}.")
        if scale_profile.own_us(costs[1]) > FLAT * scale_profile.own_us(costs[0]):
            this.note(f"Profile of {path}, own time in so many calls: {scale_profile.dearest(*costs)}.")


def _counted(name: str, load: Load, unit: str) -> Measure:
    return Measure(name=name, case=load.case, subject=load.subject, unit=unit, clock="count")


def _exactly(count: float) -> Sample:
    return Sample(value=count, foreign_cores=0.0)


def _counts(load: Load) -> Counts:
    load.renew_state()
    load.fleet.counts = Counts()
    load.serve()
    counts, load.fleet.counts = load.fleet.counts, Counts()
    return counts


def note_slopes(this: Run, name: str) -> None:
    """A straight line through the medians of each subject, and how the last part of the way compares with it."""
    figures = [one for one in this.report().figures if (one.measure.name, one.measure.clock) == (name, "cpu")]
    for subject in dict.fromkeys(figure.measure.subject for figure in figures):
        points = [
            (int(figure.measure.case.partition(" ")[0].replace(",", "")), figure.spread.median)
            for figure in figures
            if figure.measure.subject == subject
        ]
        if len(points) > 2:
            this.note(f"Slope, {name}, {subject}: {slope_text(sorted(points))}.")


def slope_text(points: Sequence[tuple[int, float]]) -> str:
    """Of points (tokens, us): least squares of the relative errors, and what the first and last thousand tokens add."""
    tokens, costs = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    slope, fixed = np.polyfit(tokens, costs, 1, w=1 / costs)
    first = (costs[1] - costs[0]) / (tokens[1] - tokens[0])
    last = (costs[-1] - costs[-2]) / (tokens[-1] - tokens[-2])
    return (
        f"{fixed:,.0f} us and {1_024 * slope:,.1f} us for each 1,024 tokens by the line that fits best; "
        f"{1_024 * first:,.1f} us between the two shortest, {1_024 * last:,.1f} us between the two longest"
    )
