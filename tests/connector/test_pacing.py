"""Pacer: an engine that only waits sleeps, one that runs never."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm")

from vllm_mooncake_ascend.connectors import pacing
from vllm_mooncake_ascend.connectors.envelopes import StepMetadata, WorkerMetadata
from vllm_mooncake_ascend.connectors.pacing import Pacer
from vllm_mooncake_ascend.types import Incarnation, Outcome, RequestId, TransferId
from vllm_mooncake_ascend.wire.pool_steps import LoadEnded, LoadOrder, PoolResults, PoolStep
from vllm_mooncake_ascend.wire.steps import ReadEnded, ReadOrder, Report, WorkerResults, WorkerStep

WAIT_S = 0.02


class Side:
    """A side that waits for something."""

    is_waiting = True
    is_patient = False

    def has_pending(self) -> bool:
        return False


def read_step(*, is_last: bool = True) -> StepMetadata:
    order = ReadOrder(
        transfer_id=TransferId("t"),
        request_id=RequestId("r"),
        incarnation=Incarnation("i"),
        first_token=0,
        end_token=0,
        remote_block_ids=(),
        local_block_ids=(),
        is_last=is_last,
    )
    return StepMetadata(p2p=WorkerStep(reads=(order,)))


def load_step() -> StepMetadata:
    return StepMetadata(pool=PoolStep(loads=(LoadOrder(load_id=7, request_id=RequestId("r"), namespace="n", groups=()),)))


def read_ended() -> WorkerMetadata:
    ended = ReadEnded(
        transfer_id=TransferId("t"),
        request_id=RequestId("r"),
        rank=0,
        outcome=Outcome.DONE,
        reason="",
        num_bytes=0,
        num_descriptors=0,
        seconds=0.0,
    )
    return WorkerMetadata(p2p=WorkerResults(ended=(ended,)))


def load_ended() -> WorkerMetadata:
    ended = LoadEnded(load_id=7, rank=0, outcome=Outcome.DONE, failed_block_ids=(), reason="", num_bytes=0, seconds=0.0)
    return WorkerMetadata(pool=PoolResults(loads=(ended,)))


def sleeps(pacer: Pacer, side: Side) -> bool:
    """Whether an empty step sleeps, and not for long."""
    started_s = time.monotonic()
    pacer.step(side, runs_something=False)
    return time.monotonic() - started_s >= WAIT_S / 2


def test_a_step_sleeps_only_when_nothing_runs() -> None:
    """Goal: nobody's output is late. Method: an empty step alone, one beside a step that runs, and one after it."""
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True), Side()
    assert sleeps(pacer, side)

    pacer.step(side, runs_something=True)
    assert not sleeps(pacer, side)

    pacer.came_back(0)
    assert sleeps(pacer, side)


def test_steps_that_never_come_back_are_not_waited_for() -> None:
    """Goal: an engine that ran long after it had waited sleeps again at once. Method: empty steps, of which vLLM drops the
    outputs, then as many steps that run as are remembered, then an empty one."""
    pacer, side = Pacer(wait_s=0.0001, may_sleep=True), Side()
    for _ in range(100):
        pacer.step(side, runs_something=False)
    for _ in range(100):
        pacer.step(side, runs_something=True)
        pacer.came_back(0)
    pacer._wait_s = WAIT_S

    assert sleeps(pacer, side)


def test_an_empty_step_that_comes_back_is_not_taken_for_the_one_that_runs() -> None:
    """Goal: with asynchronous scheduling an empty step's results do not end the wait for another's. Method: by number."""
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True), Side()
    empty = pacer.step(side, runs_something=False)
    running = pacer.step(side, runs_something=True)

    pacer.came_back(empty)
    assert not sleeps(pacer, side)

    pacer.came_back(running)
    assert sleeps(pacer, side)


def test_an_engine_that_steps_for_nobody_sleeps_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a save that hangs costs an idle engine little. Method: many steps without a request, then one with."""
    monkeypatch.setattr(pacing, "PATIENT_WAIT_S", WAIT_S)
    pacer, side = Pacer(wait_s=0.0001, may_sleep=True), Side()
    side.is_patient = True
    slept = [sleeps(pacer, side) for _ in range(pacing.PATIENT_STEPS + 2)]

    assert [True, True] == slept[pacing.PATIENT_STEPS :]
    assert sum(slept) < pacing.PATIENT_STEPS / 2
    side.is_patient = False
    assert not sleeps(pacer, side)


def test_news_end_a_sleep() -> None:
    """Goal: a lookup's answer is heard at once. Method: wake before the step."""
    pacer, side = Pacer(wait_s=10.0, may_sleep=True), Side()
    pacer.wake()

    started_s = time.monotonic()
    pacer.step(side, runs_something=False)

    assert time.monotonic() - started_s < 5.0


@pytest.mark.parametrize(("step", "ended"), [(read_step(), read_ended()), (load_step(), load_ended())])
def test_workers_wait_for_their_own_ends_and_nobody_waits_twice(step: StepMetadata, ended: WorkerMetadata) -> None:
    """Goal: the end of a copy is heard at once. Method: an order, empty steps until its end is told, one more."""
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True), Side()
    assert WAIT_S == pacer.workers_wait_s(side, step, runs_something=False)

    assert not sleeps(pacer, side)
    assert WAIT_S == pacer.workers_wait_s(side, StepMetadata(), runs_something=False)

    pacer.ended(ended)
    assert sleeps(pacer, side)
    assert 0.0 == pacer.workers_wait_s(side, StepMetadata(), runs_something=False)


def test_workers_wait_for_nothing_that_the_scheduler_must_bring() -> None:
    """Goal: an offer is heard at once while a streamed read has not all it needs. Method: a part that is not the last."""
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True), Side()
    assert 0.0 == pacer.workers_wait_s(side, read_step(is_last=False), runs_something=False)
    assert sleeps(pacer, side)


def test_workers_hold_up_nobody() -> None:
    """Goal: no output, no report and no other rank waits for a worker that waits. Method: each of these beside an order."""
    report = Report(request_id=RequestId("r"), ok=True, block_ids=())
    pacer, side = Pacer(wait_s=WAIT_S, may_sleep=True), Side()
    assert 0.0 == pacer.workers_wait_s(side, read_step(), runs_something=True)
    assert 0.0 == pacer.workers_wait_s(side, StepMetadata(reports=(report,)), runs_something=False)

    pacer.step(side, runs_something=True)
    assert 0.0 == pacer.workers_wait_s(side, StepMetadata(), runs_something=False)

    lockstep = Pacer(wait_s=WAIT_S, may_sleep=False)
    assert 0.0 == lockstep.workers_wait_s(side, read_step(), runs_something=False)

    alone = Pacer(wait_s=WAIT_S, may_sleep=True)
    side.is_waiting = False
    assert 0.0 == alone.workers_wait_s(side, read_step(), runs_something=False)
