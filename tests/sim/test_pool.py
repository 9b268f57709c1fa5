"""The pool's machines come through every simulated world, make every move of their laws there, and planted bugs are found.

A failing seed is told with its violation; `explain(draw(seed, theme))` of the simulator tells its story.
"""

from __future__ import annotations

import dataclasses

import pytest

from vllm_mooncake_ascend.testing.pool_simulator.bugs import POOL_BUGS, PoolBug
from vllm_mooncake_ascend.testing.pool_simulator.plan import THEMES, draw
from vllm_mooncake_ascend.testing.pool_simulator.runner import Coverage, explain, fails, run_seeds, shrunk
from vllm_mooncake_ascend.testing.seeds import Move

NUM_SEEDS = 30
RARE_SEEDS = (
    ("wild", 43),
    ("wild", 199),
    ("dead", 314),
    ("slow", 78),
    ("slow", 94),
    ("slow", 621),
    ("reset", 60),
)
"""They make moves that the first seeds do not; when a theme changes, others do."""

NOT_SIMULATED: set[Move] = {
    # Two calls that find the store dead while a probe takes its millisecond.
    ("BreakerState", "PROBING", "LOST", "PROBING"),
    # A rank that never ends its load: the simulated ones do, within every bound they have.
    ("LoadState", "STOPPING", "LATE", "STOPPING"),
    # Orders that are not this rank's, or were cancelled before they came, are made by shells.
    ("GetState", "UNKNOWN", "PLANNED", "UNKNOWN"),
}


def test_no_world_goes_wrong_and_every_move_is_made() -> None:
    """Goal: safe and live under every fault, and no rule untried. Method: the first seeds of each theme, and rare ones."""
    coverage = Coverage()

    failures = [one for theme in THEMES for one in run_seeds(range(NUM_SEEDS), coverage.machines, theme)]
    failures += [one for theme, seed in RARE_SEEDS for one in run_seeds([seed], coverage.machines, theme)]

    assert [] == failures
    assert NOT_SIMULATED == coverage.unreached()


def test_a_seed_is_one_world_for_ever() -> None:
    """Goal: a failing seed can be replayed. Method: two runs of a busy world tell the same story."""
    assert explain(draw(3, "wild")) == explain(draw(3, "wild"))


def test_shrinking_leaves_out_what_a_failure_does_not_need() -> None:
    """Goal: a failing plan becomes readable. Method: a mistake that a single request shows, in plans with everything."""
    bug = next(one for one in POOL_BUGS if one.name == "book is never closed")
    plan = dataclasses.replace(draw(1, "wild"), faults=draw(1, "slow").faults)
    assert fails(plan, bug.machines)

    smallest = shrunk(plan, bug.machines)

    assert (1, (), ()) == (len(smallest.jobs), smallest.clears_cache_at_s, smallest.resets_at_s)
    assert draw(1, "gentle").faults == smallest.faults


@pytest.mark.parametrize("bug", POOL_BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_a_planted_bug_of_the_pool_is_found(bug: PoolBug) -> None:
    """Goal: this mistake cannot come back unseen. Method: run seeds of its theme until one fails."""
    assert None is not next(run_seeds(range(bug.max_seeds), bug.machines, bug.theme), None)
