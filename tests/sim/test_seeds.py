"""The unmodified machines come through every simulated world; a failing seed is printed with its violation.

Replay one with `python -m vllm_mooncake_ascend.testing.simulator --trace --start SEED`.
"""

from __future__ import annotations

import dataclasses

import pytest

from vllm_mooncake_ascend.testing.simulator.__main__ import main
from vllm_mooncake_ascend.testing.simulator.plan import Accident
from vllm_mooncake_ascend.testing.simulator.runner import explain, fails, run_many, run_seeds, shrink
from vllm_mooncake_ascend.testing.simulator.themes import THEMES, draw
from vllm_mooncake_ascend.testing.simulator.world import Machines


def test_no_world_of_the_first_seeds_goes_wrong() -> None:
    """Goal: safety and liveness under every fault. Method: run 600 worlds as drawn."""
    assert [] == list(run_seeds(range(600)))


@pytest.mark.parametrize("theme", THEMES)
def test_no_world_of_a_theme_goes_wrong(theme: str) -> None:
    """Goal: rare situations get their share. Method: seeds far from those above, all of one theme."""
    assert [] == list(run_seeds(range(1_000_000, 1_000_080), theme=theme))


def test_a_seed_is_one_world_for_ever() -> None:
    """Goal: a failing seed can be replayed. Method: two runs of a busy world tell the same story."""
    plan = draw(3, "wild")

    assert explain(plan, Machines()) == explain(plan, Machines())


def test_the_command_line_tells_the_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: `make sim` says what it did. Method: a short run."""
    assert 0 == main(["--seeds", "5"])

    assert "5 seeds from 0 clean" in capsys.readouterr().out


def test_many_seeds_run_in_several_processes() -> None:
    """Goal: the command line's worker processes agree with one process. Method: a short run in two of them."""
    assert None is run_many(0, 20, 2)


def test_shrinking_leaves_out_what_a_failure_does_not_need() -> None:
    """Goal: a failing plan becomes readable. Method: a mistake that needs no accident, in a plan with three of them."""
    machines = Machines(treats_stop_as_failure=True)
    needless = tuple(Accident(kind="clog", at_s=900.0 + number, engine=0, other=1) for number in range(3))
    plan = dataclasses.replace(draw(10, "gentle"), accidents=needless)
    assert fails(plan, machines)

    shrunk = shrink(plan, machines)

    assert () == shrunk.accidents
    assert 1 == len(shrunk.jobs)
