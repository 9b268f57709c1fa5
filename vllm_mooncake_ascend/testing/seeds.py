"""Many seeds: what the simulators share. A seed is one plan for ever; a plan is one world; a world goes wrong or does not.

Progress over several processes, the smallest plan that still fails, and which moves of the machines' laws were made.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from vllm_mooncake_ascend.law import Law, State, What

_BATCH = 250
"""Seeds a process runs between two words of progress."""
Plan = TypeVar("Plan")
Move = tuple[str, str, str, str]
"""Which machine's states, before, what happened, after; all by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """One seed whose world went wrong."""

    seed: int
    text: str


FirstFailure = Callable[[range], Failure | None]
"""Runs seeds up to the first that fails; a function of a module, as it crosses to other processes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Simulator:
    """What the command line needs of one simulator."""

    name: str
    first_failure: FirstFailure
    story: Callable[[int], str]
    """The plan of a seed and all that happens in its world."""
    shrunk_story: Callable[[int], str]
    """The same of the smallest plan that still fails, for a seed that does."""
    coverage: Callable[[int], str]
    """Which of the first seeds make which move of the laws, a line each."""


def run_many(first_failure: FirstFailure, start: int, num_seeds: int, num_jobs: int) -> Failure | None:
    """Run seeds in `num_jobs` processes, with progress on stderr; the first failure ends it."""
    batches = [range(first, min(first + _BATCH, start + num_seeds)) for first in range(start, start + num_seeds, _BATCH)]
    started_s = time.monotonic()
    num_done = 0
    for batch, failure in _each_batch(first_failure, batches, num_jobs):
        num_done += len(batch)
        rate = num_done / max(time.monotonic() - started_s, 1e-9)
        sys.stderr.write(f"\r{num_done} of {num_seeds} seeds, {rate:.0f} seeds/s")
        sys.stderr.flush()
        if failure is not None:
            sys.stderr.write("\n")
            return failure
    sys.stderr.write("\n")
    return None


def _each_batch(first_failure: FirstFailure, batches: list[range], num_jobs: int) -> Iterator[tuple[range, Failure | None]]:
    if num_jobs == 1:
        for batch in batches:
            yield batch, first_failure(batch)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_jobs, mp_context=context) as pool:
        try:
            yield from zip(batches, pool.map(first_failure, batches), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def shrink(plan: Plan, smaller: Callable[[Plan], Iterator[Plan]], is_failing: Callable[[Plan], bool]) -> Plan:
    """The plan with everything left out that is not needed to make it fail (in whatever way)."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in smaller(plan):
            if is_failing(candidate):
                plan, is_smaller = candidate, True
                break
    return plan


# --- coverage --------------------------------------------------------------------------------------------------------------


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


class MovesMade:
    """Of several laws together."""

    def __init__(self, laws: Iterable[CountingLaw[Any, Any]]) -> None:
        self._laws = tuple(laws)

    def moves(self) -> set[Move]:
        """Every move made so far."""
        return {(type(b).__name__, b.name, what.name, a.name) for law in self._laws for b, what, a in law.num_moves}

    def unreached(self) -> set[Move]:
        """Moves of the laws that were not made."""
        return set().union(*(law.moves() for law in self._laws)) - self.moves()


def first_seeds(seeds: range, made: MovesMade, run: Callable[[int], object]) -> dict[Move, int]:
    """Which seed is the first to make each move; `run` runs one with the laws of `made`."""
    found: dict[Move, int] = {}
    for seed in seeds:
        run(seed)
        if len(made.moves()) > len(found):
            found |= {move: seed for move in made.moves() if move not in found}
    return found


def coverage_lines(seeds: range, made: MovesMade, run: Callable[[int], object]) -> str:
    """The same for a person, with the moves that no seed makes."""
    found = first_seeds(seeds, made, run)
    lines = [f"{seed:7} {' '.join(move)}" for move, seed in sorted(found.items(), key=lambda item: item[1])]
    return "\n".join([*lines, *(f"  never {' '.join(move)}" for move in sorted(made.unreached())), ""])
