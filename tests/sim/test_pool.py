"""The pool's machines come through every simulated world, make every move of their laws there, and planted bugs are found.

A failing seed is told with its violation; `explain(draw(seed, theme))` of the simulator tells its story.
"""

from __future__ import annotations

from typing import Any

import pytest

from vllm_mooncake_ascend.law import Law, State, What
from vllm_mooncake_ascend.pool.breaker import BREAKER_LAW
from vllm_mooncake_ascend.pool.fence import FENCE_LAW
from vllm_mooncake_ascend.pool.gets import GET_LAW
from vllm_mooncake_ascend.pool.loads import LOAD_LAW
from vllm_mooncake_ascend.pool.lookups import LOOKUP_LAW
from vllm_mooncake_ascend.pool.puts import PUT_LAW
from vllm_mooncake_ascend.pool.saves import SAVE_LAW
from vllm_mooncake_ascend.pool.scheduler import PoolScheduler, SchedulerLaws
from vllm_mooncake_ascend.pool.worker import PoolWorker, WorkerLaws
from vllm_mooncake_ascend.testing.pool_simulator.bugs import POOL_BUGS, PoolBug
from vllm_mooncake_ascend.testing.pool_simulator.plan import THEMES, draw
from vllm_mooncake_ascend.testing.pool_simulator.world import Machines, explain, run_seeds

Move = tuple[str, str, str]
LAWS: dict[str, Law[Any, Any]] = {
    "breaker": BREAKER_LAW,
    "lookup": LOOKUP_LAW,
    "load": LOAD_LAW,
    "save": SAVE_LAW,
    "fence": FENCE_LAW,
    "get": GET_LAW,
    "put": PUT_LAW,
}
NUM_SEEDS = 30
RARE_SEEDS = (
    ("wild", 199),
    ("dead", 314),
    ("slow", 78),
    ("slow", 621),
    ("reset", 60),
)
"""They make moves that the first seeds do not; when a theme changes, others do."""

NOT_SIMULATED: set[tuple[str, Move]] = {
    # Two calls that find the store dead while a probe takes its millisecond.
    ("breaker", ("PROBING", "LOST", "PROBING")),
    # A rank that never ends its load: the simulated ones do, within every bound they have.
    ("load", ("STOPPING", "LATE", "STOPPING")),
    # Orders that are not this rank's, or were cancelled before they came, are made by shells.
    ("get", ("UNKNOWN", "PLANNED", "UNKNOWN")),
}


class CountingLaw(Law[State, What]):
    """A law that remembers which moves were made."""

    def __init__(self, name: str, law: Law[State, What]) -> None:
        super().__init__(law.cells)
        self.made: set[tuple[str, Move]] = set()
        self._name = name

    def check(self, before: State, what: What, after: State) -> None:
        super().check(before, what, after)
        self.made.add((self._name, (before.name, what.name, after.name)))

    def possible(self) -> set[tuple[str, Move]]:
        """Every move of the table."""
        return {
            (self._name, (before.name, what.name, after.name))
            for before, row in self.cells.items()
            for what, cell in row.items()
            for after in cell.to
        }


def test_no_world_goes_wrong_and_every_move_is_made() -> None:
    """Goal: safe and live under every fault, and no rule untried. Method: the first seeds of each theme, and rare ones."""
    laws = {name: CountingLaw(name, law) for name, law in LAWS.items()}
    scheduler_laws = SchedulerLaws(breaker=laws["breaker"], lookup=laws["lookup"], load=laws["load"], save=laws["save"])
    worker_laws = WorkerLaws(breaker=laws["breaker"], fence=laws["fence"], get=laws["get"], put=laws["put"])
    machines = Machines(
        scheduler=lambda settings: PoolScheduler(settings, scheduler_laws),
        worker=lambda rank, settings: PoolWorker(rank, settings, worker_laws),
    )

    failures = [one for theme in THEMES for one in run_seeds(range(NUM_SEEDS), machines, theme)]
    failures += [one for theme, seed in RARE_SEEDS for one in run_seeds([seed], machines, theme)]

    assert [] == failures
    assert NOT_SIMULATED == {move for law in laws.values() for move in law.possible() - law.made}


def test_a_seed_is_one_world_for_ever() -> None:
    """Goal: a failing seed can be replayed. Method: two runs of a busy world tell the same story."""
    assert explain(draw(3, "wild")) == explain(draw(3, "wild"))


@pytest.mark.parametrize("bug", POOL_BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_of_the_pool_is_found(bug: PoolBug) -> None:
    """Goal: this mistake cannot come back unseen. Method: run seeds of its theme until one fails."""
    assert None is not next(run_seeds(range(bug.max_seeds), bug.machines, bug.theme), None)
