"""Taking samples: everything that is compared in turns, each round in an order of its own, noise measured around each.

Reads clocks and runs what it is given; decides nothing about what comes out.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from vllm_mooncake_ascend.cli.bench.foreign_cpu import ForeignCpu
from vllm_mooncake_ascend.cli.bench.report import Measure
from vllm_mooncake_ascend.cli.bench.samples import Sample

MIN_SAMPLE_S = 0.05
"""A sample of many calls takes at least this long: five of the kernel's ticks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """How to take one sample of something."""

    measure: Measure
    take: Callable[[], float]
    """Returns the value in the measure's unit. Called once before it counts."""


def take_rounds(
    probes: Sequence[Probe],
    *,
    num_rounds: int,
    order: random.Random,
    on_sample: Callable[[Measure], None] = lambda _: None,
) -> dict[Measure, list[Sample]]:
    """One sample of each probe a round."""
    samples: dict[Measure, list[Sample]] = {probe.measure: [] for probe in probes}
    assert len(samples) == len(probes), "two probes of one measure"
    for probe in probes:
        probe.take()
    for _ in range(num_rounds):
        for probe in order.sample(probes, k=len(probes)):
            noise = ForeignCpu()
            value = probe.take()
            samples[probe.measure].append(Sample(value=value, foreign_cores=noise.cores()))
            on_sample(probe.measure)
    return samples


def cpu_s_per_call(call: Callable[[], object], *, min_s: float = MIN_SAMPLE_S) -> float:
    """CPU seconds of this thread for one call: the mean of as many as take `min_s` of wall time."""
    started_s, started_cpu_s = time.monotonic(), time.thread_time()
    num_calls = 0
    while num_calls == 0 or time.monotonic() - started_s < min_s:
        call()
        num_calls += 1
    return (time.thread_time() - started_cpu_s) / num_calls


def wall_s_per_call(call: Callable[[], object], *, min_s: float = MIN_SAMPLE_S) -> float:
    """Seconds for one call: the mean of as many as take `min_s`."""
    started_s = time.monotonic()
    num_calls, elapsed_s = 0, 0.0
    while num_calls == 0 or elapsed_s < min_s:
        call()
        num_calls += 1
        elapsed_s = time.monotonic() - started_s
    return elapsed_s / num_calls
