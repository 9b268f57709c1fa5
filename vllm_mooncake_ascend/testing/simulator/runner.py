"""Running the worlds of transfers: results, what a smaller plan is, and which moves of the laws were made."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from vllm_mooncake_ascend.p2p.consumer import Consumer
from vllm_mooncake_ascend.p2p.fetches import FETCH_LAW
from vllm_mooncake_ascend.p2p.leases import TRANSFER_LAW
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.reader import READ_LAW, Reader
from vllm_mooncake_ascend.testing.seeds import CountingLaw, Failure, MovesMade, Simulator, coverage_lines, shrink
from vllm_mooncake_ascend.testing.simulator.plan import Network, Plan, ReadFaults
from vllm_mooncake_ascend.testing.simulator.themes import draw
from vllm_mooncake_ascend.testing.simulator.world import Machines, World

_SIMPLER: tuple[dict[str, Any], ...] = (
    {"num_strangers": 0},
    {"odd_engine": None},
    {"lying_engine": None},
    {"num_ranks": 1},
    {"is_lazy": False},
    {"streaming": ()},
    {"fails_on_load_error": False},
)


def fails(plan: Plan, machines: Machines, trace: list[str] | None = None) -> str:
    """What went wrong in the world of a plan, "" when nothing did. Any exception of a machine counts."""
    try:
        World(plan, machines, trace).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_seeds(seeds: Iterable[int], machines: Machines | None = None, theme: str = "") -> Iterator[Failure]:
    """Failures among `seeds`, as they come."""
    used = machines or Machines()
    for seed in seeds:
        text = fails(draw(seed, theme), used)
        if text:
            yield Failure(seed, text)


def first_failure(seeds: range) -> Failure | None:
    """The first of these seeds that goes wrong."""
    return next(run_seeds(seeds), None)


def shrunk(plan: Plan, machines: Machines) -> Plan:
    """The smallest plan that still fails."""
    return shrink(plan, _smaller, lambda smaller: fails(smaller, machines) != "")


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that are one step simpler; none is drawn from a seed any more."""
    for index in range(len(plan.accidents)):
        yield dataclasses.replace(plan, accidents=plan.accidents[:index] + plan.accidents[index + 1 :])
    for index in range(len(plan.jobs)):
        yield dataclasses.replace(plan, jobs=plan.jobs[:index] + plan.jobs[index + 1 :])
    for index, job in enumerate(plan.jobs):
        for number in range(len(job.children)):
            fewer = dataclasses.replace(job, children=job.children[:number] + job.children[number + 1 :])
            yield dataclasses.replace(plan, jobs=(*plan.jobs[:index], fewer, *plan.jobs[index + 1 :]))
    for index in range(len(plan.hogs)):
        yield dataclasses.replace(plan, hogs=plan.hogs[:index] + plan.hogs[index + 1 :])
    if plan.network != Network():
        yield dataclasses.replace(plan, network=Network())
    if plan.reads != ReadFaults():
        yield dataclasses.replace(plan, reads=ReadFaults())
    for change in _SIMPLER:
        simpler = dataclasses.replace(plan, **change)
        if simpler != plan:
            yield simpler


def explain(plan: Plan, machines: Machines) -> str:
    """A failing plan and all its events, for a person."""
    trace: list[str] = []
    text = fails(plan, machines, trace)
    return "\n".join([f"plan: {plan}", *trace, f"failed: {text}"])


# --- the laws --------------------------------------------------------------------------------------------------------------


class Coverage(MovesMade):
    """Machines that count the moves of all three laws together."""

    def __init__(self) -> None:
        transfers, fetches, reads = CountingLaw(TRANSFER_LAW), CountingLaw(FETCH_LAW), CountingLaw(READ_LAW)
        super().__init__((transfers, fetches, reads))
        self.machines = Machines(
            producer=functools.partial(Producer, law=transfers),
            consumer=functools.partial(Consumer, law=fetches),
            reader=functools.partial(Reader, law=reads),
        )


def _coverage(num_seeds: int) -> str:
    coverage = Coverage()
    return coverage_lines(range(num_seeds), coverage, lambda seed: fails(draw(seed), coverage.machines))


SIMULATOR = Simulator(
    name="transfer",
    first_failure=first_failure,
    story=lambda seed: explain(draw(seed), Machines()),
    shrunk_story=lambda seed: explain(shrunk(draw(seed), Machines()), Machines()),
    coverage=_coverage,
)
