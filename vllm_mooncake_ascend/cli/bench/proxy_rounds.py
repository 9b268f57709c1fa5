"""Samples of `bench proxy`: every way in turns, each round in an order of its own; of each load its rate, its latencies, and
the CPU of the proxy's process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from vllm_mooncake_ascend.cli import cpu_use
from vllm_mooncake_ascend.cli.bench.foreign_cpu import ForeignCpu
from vllm_mooncake_ascend.cli.bench.proxy_load import Ask, Client, Load, run_load
from vllm_mooncake_ascend.cli.bench.proxy_ways import CONCURRENT, DIRECT, ROUTER, SEQUENTIAL, Way
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.samples import Clock, Sample

PERCENTS = (50, 99)


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of all loads."""

    nums_at_once: tuple[int, ...]
    seconds: float
    """Of one load."""
    prompt_chars: int
    num_rounds: int


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """One load of one way."""

    load: Load
    cpu_s: float | None
    """Of the proxy's process."""
    foreign_cores: float


Samples = dict[Measure, list[Sample]]


async def measure(
    ways: Sequence[Way], prefill_url: str, sizes: Sizes, order: random.Random, on_case: Callable[[str], None]
) -> Samples:
    """All cases, one after the other; in a case all ways take turns.

    Raises:
        ProxyBenchFailed: somebody answers wrongly.
    """
    samples: Samples = {}
    for is_streamed in (False, True):
        async with contextlib.AsyncExitStack() as open_clients:
            asks: dict[Way, Ask] = {}
            for way in ways:
                client = Client(way.url, prompt="x " * (sizes.prompt_chars // 2), is_streamed=is_streamed)
                await open_clients.enter_async_context(client)
                asks[way] = client.ask if way.kind == "one leg" else partial(client.ask_both_legs, prefill_url)
            for num_at_once in sizes.nums_at_once:
                case = f"{num_at_once} at once, {'streamed' if is_streamed else 'whole'}"
                await _measure_case(asks, sizes, order, samples, (case, num_at_once, on_case))
    return samples


async def _measure_case(
    asks: Mapping[Way, Ask],
    sizes: Sizes,
    order: random.Random,
    samples: Samples,
    which: tuple[str, int, Callable[[str], None]],
) -> None:
    case, num_at_once, on_case = which
    for number in range(sizes.num_rounds + 1):
        on_case(f"{case}, round {number} of {sizes.num_rounds}" if number else f"{case}, warming up")
        taken = {}
        for way in order.sample(list(asks), k=len(asks)):
            taken[way] = await _take(way, asks[way], num_at_once=num_at_once, seconds=sizes.seconds)
        if number:
            for found, sample in _values(case, taken):
                samples.setdefault(found, []).append(sample)


async def _take(way: Way, ask: Ask, *, num_at_once: int, seconds: float) -> Taken:
    noise = ForeignCpu()
    before_s = 0.0 if way.pid is None else cpu_use.total_cpu_seconds(way.pid)
    load = await run_load(ask, num_at_once=num_at_once, seconds=seconds)
    cpu_s = None if way.pid is None else cpu_use.total_cpu_seconds(way.pid) - before_s
    return Taken(load=load, cpu_s=cpu_s, foreign_cores=noise.cores())


def _values(case: str, taken: Mapping[Way, Taken]) -> Iterator[tuple[Measure, Sample]]:
    """What a round says of each way; added latency is that of the way less that of no proxy in the same round."""
    direct = next(found for way, found in taken.items() if way.subject == DIRECT)
    for way, found in sorted(taken.items(), key=lambda item: item[0].subject):
        yield _value("requests a second", case, way, "1/s", found, found.load.rate)
        for percent in PERCENTS:
            latency_ms = found.load.latency_ms(percent)
            if found is direct:
                yield _value(f"latency p{percent}", case, way, "ms", found, latency_ms)
            else:
                added_ms = latency_ms - direct.load.latency_ms(percent)
                foreign_cores = max(found.foreign_cores, direct.foreign_cores)
                both = msgspec.structs.replace(found, foreign_cores=foreign_cores)
                yield _value(f"added latency p{percent}", case, way, "ms", both, added_ms)
        if found.cpu_s is not None:
            yield _value("CPU of a request", case, way, "ms", found, 1e3 * found.cpu_s / found.load.num_requests)


def _value(name: str, case: str, way: Way, unit: str, found: Taken, value: float) -> tuple[Measure, Sample]:
    clock: Clock = "cpu" if name == "CPU of a request" else "wall"
    measure = Measure(name=name, case=case, subject=way.subject, unit=unit, clock=clock)
    return measure, Sample(value=value, foreign_cores=found.foreign_cores)


def comparisons(samples: Samples) -> list[Comparison]:
    """Rates beside no proxy, and rates and CPU of ours beside the router's, if that was more than a tick of the kernel's clock
    in every sample."""
    is_counted = {one: all(sample.value > 0 for sample in found) for one, found in samples.items()}
    by_key = {(one.name, one.case, one.subject): one for one in samples if is_counted[one]}
    found = []
    for (name, case, subject), one in by_key.items():
        wanted = {"requests a second": (DIRECT, ROUTER), "CPU of a request": (ROUTER,)}.get(name, ())
        if subject in (SEQUENTIAL, CONCURRENT):
            found += [Comparison(above=one, below=by_key[name, case, who]) for who in wanted if (name, case, who) in by_key]
    return found
