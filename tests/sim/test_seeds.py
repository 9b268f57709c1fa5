"""The unmodified machines come through every simulated world; a failing seed is printed with its violation.

Replay one with `python -m vllm_mooncake_ascend.testing.simulator --machines transfer --trace --start SEED`.
"""

from __future__ import annotations

import dataclasses

import pytest

from vllm_mooncake_ascend.testing.pool_simulator import runner as pool_runner
from vllm_mooncake_ascend.testing.seeds import Failure, FirstFailure, Simulator, run_many
from vllm_mooncake_ascend.testing.simulator.__main__ import SIMULATORS, main
from vllm_mooncake_ascend.testing.simulator.plan import Accident
from vllm_mooncake_ascend.testing.simulator.runner import explain, fails, first_failure, run_seeds, shrunk
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
    """Goal: `make sim` says what it did, of both simulators. Method: a short run."""
    assert 0 == main(["--seeds", "5"])

    assert ["transfer: 5 seeds from 0 clean", "pool: 5 seeds from 0 clean"] == [
        line.partition(",")[0] for line in capsys.readouterr().out.splitlines()
    ]


def test_the_command_line_tells_how_to_replay_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Goal: a failing seed can be looked at, and hides no other simulator's. Method: one that fails at seed 3, before a real
    one; then the replay that it names."""
    odd = Simulator(
        name="odd",
        first_failure=lambda seeds: Failure(3, "wrong") if 3 in seeds else None,
        story=lambda seed: f"story of {seed}",
        shrunk_story=lambda seed: f"less of {seed}",
        coverage=lambda num_seeds: "",
    )
    assert 1 == main(["--seeds", "5"], (odd, *SIMULATORS))
    told = capsys.readouterr().out
    replay = next(line for line in told.splitlines() if line.startswith("replay: "))
    assert "odd: seed 3 failed: wrong" in told
    assert "less of 3" in told
    assert "pool: 5 seeds from 0 clean" in told

    assert 0 == main(replay.partition("simulator ")[2].split(), (odd, *SIMULATORS))
    assert "story of 3\n" == capsys.readouterr().out


@pytest.mark.parametrize("first", [first_failure, pool_runner.first_failure], ids=["transfer", "pool"])
def test_many_seeds_run_in_several_processes(first: FirstFailure) -> None:
    """Goal: the command line's worker processes agree with one process. Method: a short run in two of them."""
    assert None is run_many(first, 0, 20, 2)


def test_shrinking_leaves_out_what_a_failure_does_not_need() -> None:
    """Goal: a failing plan becomes readable. Method: a mistake that needs no accident, in a plan with three of them."""
    machines = Machines(treats_stop_as_failure=True)
    needless = tuple(Accident(kind="clog", at_s=900.0 + number, engine=0, other=1) for number in range(3))
    plan = dataclasses.replace(draw(10, "gentle"), accidents=needless)
    assert fails(plan, machines)

    smallest = shrunk(plan, machines)

    assert () == smallest.accidents
    assert 1 == len(smallest.jobs)
