"""Running the worlds of the pool: results, what a smaller plan is, and which moves of the laws were made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from vllm_mooncake_ascend.pool.breaker import BREAKER_LAW
from vllm_mooncake_ascend.pool.fence import FENCE_LAW
from vllm_mooncake_ascend.pool.gets import GET_LAW
from vllm_mooncake_ascend.pool.loads import LOAD_LAW
from vllm_mooncake_ascend.pool.lookups import LOOKUP_LAW
from vllm_mooncake_ascend.pool.puts import PUT_LAW
from vllm_mooncake_ascend.pool.saves import SAVE_LAW
from vllm_mooncake_ascend.pool.scheduler import PoolScheduler, SchedulerLaws
from vllm_mooncake_ascend.pool.worker import PoolWorker, WorkerLaws
from vllm_mooncake_ascend.testing.pool_simulator.plan import Job, PoolPlan, draw
from vllm_mooncake_ascend.testing.pool_simulator.store import StoreFaults
from vllm_mooncake_ascend.testing.pool_simulator.world import Machines, World
from vllm_mooncake_ascend.testing.seeds import CountingLaw, Failure, MovesMade, Simulator, coverage_lines, shrink

Item = TypeVar("Item")
_UNDISTURBED: tuple[dict[str, Any], ...] = (
    {"is_aborted_after_s": None},
    {"is_preempted_after_s": None},
    {"is_careless": False},
)


def fails(plan: PoolPlan, machines: Machines, story: list[str] | None = None) -> str:
    """What went wrong in the world of a plan, "" when nothing did. Any exception of a machine counts."""
    try:
        World(plan, machines, story).run()
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


def explain(plan: PoolPlan, machines: Machines | None = None) -> str:
    """A plan and all that its scheduler met, for a person."""
    story: list[str] = []
    text = fails(plan, machines or Machines(), story)
    return "\n".join([f"plan: {plan}", *story, f"failed: {text}"])


def shrunk(plan: PoolPlan, machines: Machines) -> PoolPlan:
    """The smallest plan that still fails."""
    return shrink(plan, _smaller, lambda smaller: fails(smaller, machines) != "")


def _smaller(plan: PoolPlan) -> Iterator[PoolPlan]:
    """Plans that are one step simpler; none is drawn from a seed any more."""
    for jobs in _fewer_jobs(plan.jobs):
        yield dataclasses.replace(plan, jobs=jobs)
    for index in range(len(plan.clears_cache_at_s)):
        yield dataclasses.replace(plan, clears_cache_at_s=_without(plan.clears_cache_at_s, index))
    for index in range(len(plan.resets_at_s)):
        yield dataclasses.replace(plan, resets_at_s=_without(plan.resets_at_s, index))
    simpler: list[dict[str, Any]] = [{"num_ranks": 1}, {"crowded_s": (0.0, 0.0)}]
    for field in dataclasses.fields(StoreFaults):
        change: dict[str, Any] = {field.name: field.default}
        simpler.append({"faults": dataclasses.replace(plan.faults, **change)})
    for change in simpler:
        changed = dataclasses.replace(plan, **change)
        if changed != plan:
            yield changed


def _fewer_jobs(jobs: tuple[Job, ...]) -> Iterator[tuple[Job, ...]]:
    """One job less, but never none, or one that is disturbed less."""
    for index, job in enumerate(jobs):
        if len(jobs) > 1:
            yield _without(jobs, index)
        for change in _UNDISTURBED:
            calmer = dataclasses.replace(job, **change)
            if calmer != job:
                yield (*jobs[:index], calmer, *jobs[index + 1 :])


def _without(items: tuple[Item, ...], index: int) -> tuple[Item, ...]:
    return items[:index] + items[index + 1 :]


# --- the laws --------------------------------------------------------------------------------------------------------------


class Coverage(MovesMade):
    """Machines that count the moves of all seven laws together; the breaker's is that of both machines."""

    def __init__(self) -> None:
        breaker, lookup, load, save = (
            CountingLaw(BREAKER_LAW),
            CountingLaw(LOOKUP_LAW),
            CountingLaw(LOAD_LAW),
            CountingLaw(SAVE_LAW),
        )
        fence, get, put = CountingLaw(FENCE_LAW), CountingLaw(GET_LAW), CountingLaw(PUT_LAW)
        super().__init__((breaker, lookup, load, save, fence, get, put))
        scheduler_laws = SchedulerLaws(breaker=breaker, lookup=lookup, load=load, save=save)
        worker_laws = WorkerLaws(breaker=breaker, fence=fence, get=get, put=put)
        self.machines = Machines(
            scheduler=lambda settings: PoolScheduler(settings, scheduler_laws),
            worker=lambda rank, settings: PoolWorker(rank, settings, worker_laws),
        )


def _coverage(num_seeds: int) -> str:
    coverage = Coverage()
    return coverage_lines(range(num_seeds), coverage, lambda seed: fails(draw(seed), coverage.machines))


SIMULATOR = Simulator(
    name="pool",
    first_failure=first_failure,
    story=lambda seed: explain(draw(seed)),
    shrunk_story=lambda seed: explain(shrunk(draw(seed), Machines())),
    coverage=_coverage,
)
