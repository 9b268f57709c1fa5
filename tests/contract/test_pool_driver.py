"""runtime.pool_driver: a bug in a machine is told once and costs no more than the pool."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from tests.contract.pool_engines import WAIT_S
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.pool import actions, events
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.pool_driver import PoolDriver
from vllm_mooncake_ascend.testing.held_store import HeldStore
from vllm_mooncake_ascend.testing.memory_store import MemoryPool
from vllm_mooncake_ascend.testing.stub_machines import ScriptedPoolWorker
from vllm_mooncake_ascend.types import Outcome
from vllm_mooncake_ascend.wire.pool_steps import SaveEnded

CANCELLED = events.LoadCancelled(load_id=1)
END = actions.EndSave(ended=SaveEnded(save_id=1, rank=0, outcome=Outcome.DONE, reason="", num_bytes=0, seconds=0.0))


class World:
    """A driver, and what its owner is told."""

    def __init__(self, machine: ScriptedPoolWorker) -> None:
        self.store = HeldStore(MemoryPool().client())
        self.carried_out: list[actions.WorkerAction] = []
        self.num_told = 0
        self.news = threading.Event()
        self.driver: PoolDriver[events.WorkerEvent, actions.WorkerAction] = PoolDriver(
            machine, self.store, carry_out=self.carried_out.append, changed=self._told, where="pool_worker"
        )

    def _told(self) -> None:
        self.num_told += 1
        self.news.set()


@contextlib.contextmanager
def world(machine: ScriptedPoolWorker) -> Iterator[World]:
    made = World(machine)
    made.driver.start()
    try:
        yield made
    finally:
        made.driver.stop()
        assert made.driver.join(WAIT_S)


def test_a_broken_machine_hears_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: told once, counted once, logged with the event; what it said before holds. Method: one good reply, then a bug."""
    machine = ScriptedPoolWorker([[END], ZeroDivisionError("a bug")])
    with world(machine) as made:
        for _ in range(4):
            made.driver.feed(CANCELLED)
        stats = made.driver.take_stats(dict)
        with pytest.raises(LocalProtocolError):
            made.driver.raise_failure()
    assert ([END], 1, 2, True) == (made.carried_out, made.num_told, len(machine.events), made.driver.has_failed)
    assert {names.INVARIANTS_BROKEN: {"pool_worker": 1.0}} == stats["counters"]
    assert any("LoadCancelled(load_id=1)" in record.message for record in caplog.records)


def test_a_timer_that_stays_due_is_a_bug_and_no_busy_loop() -> None:
    """Goal: the control thread makes progress. Method: a machine whose timer never moves."""
    machine = ScriptedPoolWorker([], timer_s=boot_s())
    with world(machine) as made:
        deadline_s = boot_s() + WAIT_S
        while not made.driver.has_failed:
            assert boot_s() < deadline_s
            made.news.wait(0.01)
    assert [events.TimerFired()] == machine.events


def test_an_earlier_timer_wakes_the_control_thread() -> None:
    """Goal: timers fire without anybody's help. Method: it sleeps for ever; an event brings a timer that is due soon."""
    machine = ScriptedPoolWorker([[], ZeroDivisionError("ends the test")])
    with world(machine) as made:
        machine.timer_s = boot_s() + 0.02
        made.driver.feed(CANCELLED)
        is_told = made.news.wait(WAIT_S)
    assert (True, [CANCELLED, events.TimerFired()]) == (is_told, machine.events)


def test_a_probe_makes_a_client_where_there_is_none() -> None:
    """Goal: a pool that came late is joined. Method: no master at the start, then one; the machine asks for two probes."""
    pool = MemoryPool()
    pool.stop_master()
    machine = ScriptedPoolWorker([[], [actions.ProbeStore()], [actions.ProbeStore()], ZeroDivisionError("ends the test")])
    made = World(machine)
    made.store = HeldStore(pool.client())
    driver: PoolDriver[events.WorkerEvent, actions.WorkerAction] = PoolDriver(
        machine, made.store, carry_out=made.carried_out.append, changed=made.news.set, where="pool_worker"
    )
    driver.start()
    gate = made.store.hold("health")
    driver.feed(CANCELLED)
    assert gate.entered.wait(WAIT_S)
    pool.start_master()
    gate.open()
    assert made.news.wait(WAIT_S)
    driver.stop()
    assert driver.join(WAIT_S)
    healthy = events.ProbeEnded(is_healthy=True)
    assert [events.StoreLost(), CANCELLED, healthy, healthy] == machine.events
