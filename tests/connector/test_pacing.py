"""Pacer: an engine that only waits sleeps, one that runs never."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm")

from vllm_mooncake_ascend.connectors import pacing
from vllm_mooncake_ascend.connectors.pacing import Pacer

WAIT_S = 0.02


class Side:
    """A side that waits for something."""

    is_waiting = True
    is_patient = False
    awaits_workers = False

    def has_pending(self) -> bool:
        return False


def sleeps(pacer: Pacer, side: Side) -> bool:
    """Whether an empty step sleeps, and not for long."""
    started_s = time.monotonic()
    pacer.step(side, runs_something=False)
    return time.monotonic() - started_s >= WAIT_S / 2


def test_a_step_sleeps_only_when_nothing_runs() -> None:
    """Goal: nobody's output is late. Method: an empty step alone, one beside a step that runs, and one after it."""
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True, workers_may_wait=True), Side()
    assert sleeps(pacer, side)

    pacer.step(side, runs_something=True)
    assert not sleeps(pacer, side)

    pacer.came_back(0)
    assert sleeps(pacer, side)


def test_steps_that_never_come_back_are_not_waited_for() -> None:
    """Goal: an engine that ran long after it had waited sleeps again at once. Method: empty steps, of which vLLM drops the
    outputs, then as many steps that run as are remembered, then an empty one."""
    pacer, side = Pacer(wait_s=0.0001, may_sleep=True, workers_may_wait=True), Side()
    for _ in range(100):
        pacer.step(side, runs_something=False)
    for _ in range(100):
        pacer.step(side, runs_something=True)
        pacer.came_back(0)
    pacer._wait_s = WAIT_S

    assert sleeps(pacer, side)


def test_an_empty_step_that_comes_back_is_not_taken_for_the_one_that_runs() -> None:
    """Goal: with asynchronous scheduling an empty step's results do not end the wait for another's. Method: by number."""
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True, workers_may_wait=True), Side()
    empty = pacer.step(side, runs_something=False)
    running = pacer.step(side, runs_something=True)

    pacer.came_back(empty)
    assert not sleeps(pacer, side)

    pacer.came_back(running)
    assert sleeps(pacer, side)


def test_an_engine_that_steps_for_nobody_sleeps_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a save that hangs costs an idle engine little. Method: many steps without a request, then one with."""
    monkeypatch.setattr(pacing, "PATIENT_WAIT_S", WAIT_S)
    pacer, side = Pacer(wait_s=0.0001, may_sleep=True, workers_may_wait=True), Side()
    side.is_patient = True
    slept = [sleeps(pacer, side) for _ in range(pacing.PATIENT_STEPS + 2)]

    assert [True, True] == slept[pacing.PATIENT_STEPS :]
    assert sum(slept) < pacing.PATIENT_STEPS / 2
    side.is_patient = False
    assert not sleeps(pacer, side)


def test_news_end_a_sleep() -> None:
    """Goal: a lookup's answer is heard at once. Method: wake before the step."""
    pacer, side = Pacer(wait_s=10.0, may_sleep=True, workers_may_wait=True), Side()
    pacer.wake()

    started_s = time.monotonic()
    pacer.step(side, runs_something=False)

    assert time.monotonic() - started_s < 5.0


def test_workers_wait_for_their_own_ends_and_nobody_waits_twice() -> None:
    """Goal: the end of a copy is heard at once. Method: an empty step while workers copy, one after they have ended."""
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True, workers_may_wait=True), Side()
    side.awaits_workers = True
    assert not sleeps(pacer, side)
    assert WAIT_S == pacer.workers_wait_s(side, runs_something=False, has_reports=False)

    side.awaits_workers = False
    assert sleeps(pacer, side)
    assert 0.0 == pacer.workers_wait_s(side, runs_something=False, has_reports=False)


def test_workers_that_wait_hold_up_nobody() -> None:
    """Goal: no output, no report and no other rank waits for a worker that waits. Method: each of these while workers copy."""
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True, workers_may_wait=True), Side()
    side.awaits_workers = True
    assert 0.0 == pacer.workers_wait_s(side, runs_something=True, has_reports=False)
    assert 0.0 == pacer.workers_wait_s(side, runs_something=False, has_reports=True)

    pacer.step(side, runs_something=True)
    assert 0.0 == pacer.workers_wait_s(side, runs_something=False, has_reports=False)

    lockstep = Pacer(wait_s=WAIT_S, may_sleep=False, workers_may_wait=True)
    assert 0.0 == lockstep.workers_wait_s(side, runs_something=False, has_reports=False)


def test_steps_that_stand_behind_each_other_do_not_wait_at_the_workers() -> None:
    """Goal: a new request is late by one sleep at the most. Method: vLLM has several steps under way; the scheduler sleeps."""
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True, workers_may_wait=False), Side()
    side.awaits_workers = True
    assert sleeps(pacer, side)
    assert 0.0 == pacer.workers_wait_s(side, runs_something=False, has_reports=False)
