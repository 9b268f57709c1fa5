"""Running many worlds: results, progress, the smallest plan that still fails, and which cells of the laws were reached."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from vllm_mooncake_ascend.law import Law, State, What
from vllm_mooncake_ascend.p2p.consumer import Consumer
from vllm_mooncake_ascend.p2p.fetches import FETCH_LAW
from vllm_mooncake_ascend.p2p.leases import TRANSFER_LAW
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.reader import READ_LAW, Reader
from vllm_mooncake_ascend.testing.simulator.plan import Network, Plan, ReadFaults
from vllm_mooncake_ascend.testing.simulator.themes import draw
from vllm_mooncake_ascend.testing.simulator.world import Machines, World

_SIMPLER: tuple[dict[str, Any], ...] = (
    {"num_strangers": 0},
    {"odd_engine": None},
    {"lying_engine": None},
    {"num_ranks": 1},
    {"is_lazy": False},
    {"pins_on_progress": False},
    {"fails_on_load_error": False},
)
_BATCH = 250
"""Seeds a process runs between two words of progress."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """One seed whose world went wrong."""

    seed: int
    text: str


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


def shrink(plan: Plan, machines: Machines) -> Plan:
    """The plan with everything left out that is not needed to make it fail (in whatever way)."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(plan):
            if fails(smaller, machines):
                plan, is_smaller = smaller, True
                break
    return plan


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


# --- many seeds ------------------------------------------------------------------------------------------------------------


def run_many(start: int, num_seeds: int, num_jobs: int) -> Failure | None:
    """Run seeds in `num_jobs` processes, with progress on stderr; the first failure ends it."""
    batches = [range(first, min(first + _BATCH, start + num_seeds)) for first in range(start, start + num_seeds, _BATCH)]
    started_s = time.monotonic()
    num_done = 0
    for batch, failure in _each_batch(batches, num_jobs):
        num_done += len(batch)
        rate = num_done / max(time.monotonic() - started_s, 1e-9)
        sys.stderr.write(f"\r{num_done} of {num_seeds} seeds, {rate:.0f} seeds/s")
        sys.stderr.flush()
        if failure is not None:
            sys.stderr.write("\n")
            return failure
    sys.stderr.write("\n")
    return None


def _each_batch(batches: list[range], num_jobs: int) -> Iterator[tuple[range, Failure | None]]:
    if num_jobs == 1:
        for batch in batches:
            yield batch, _first_failure(batch)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        try:
            yield from zip(batches, pool.map(_first_failure, batches), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _first_failure(seeds: range) -> Failure | None:
    return next(run_seeds(seeds), None)


# --- coverage --------------------------------------------------------------------------------------------------------------


Move = tuple[str, str, str, str]
"""Which machine's states, before, what happened, after; all by name."""


class CountingLaw(Law[State, What]):
    """A law that also counts which moves were made."""

    def __init__(self, law: Law[State, What]) -> None:
        super().__init__(law.cells)
        self.num_moves: dict[tuple[State, What, State], int] = {}

    def check(self, before: State, what: What, after: State) -> None:
        super().check(before, what, after)
        move = (before, what, after)
        self.num_moves[move] = self.num_moves.get(move, 0) + 1

    def moves(self) -> set[Move]:
        """Every move the law allows."""
        return {
            (type(before).__name__, before.name, what.name, after.name)
            for before, row in self.cells.items()
            for what, cell in row.items()
            for after in cell.to
        }


class Coverage:
    """Machines that count the moves of all three laws together."""

    def __init__(self) -> None:
        self.transfers = CountingLaw(TRANSFER_LAW)
        self.fetches = CountingLaw(FETCH_LAW)
        self.reads = CountingLaw(READ_LAW)
        self.machines = Machines(
            producer=functools.partial(Producer, law=self.transfers),
            consumer=functools.partial(Consumer, law=self.fetches),
            reader=functools.partial(Reader, law=self.reads),
        )

    @property
    def laws(self) -> tuple[CountingLaw[Any, Any], ...]:
        return (self.transfers, self.fetches, self.reads)

    def moves(self) -> set[Move]:
        """Every move made so far."""
        return {(type(b).__name__, b.name, what.name, a.name) for law in self.laws for b, what, a in law.num_moves}

    def unreached(self) -> set[Move]:
        """Moves of the laws that were not made."""
        return set().union(*(law.moves() for law in self.laws)) - self.moves()


def first_seeds(num_seeds: int) -> dict[Move, int]:
    """Which seed below `num_seeds` is the first to make each move."""
    coverage = Coverage()
    found: dict[Move, int] = {}
    for seed in range(num_seeds):
        fails(draw(seed), coverage.machines)
        if len(coverage.moves()) > len(found):
            found |= {move: seed for move in coverage.moves() if move not in found}
    return found
