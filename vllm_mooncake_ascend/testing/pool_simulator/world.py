"""One simulated world: an engine, its workers and the store, run to the end of a plan.

The laws are checked as things happen: a block is read and written only by who may; a request waits for exactly one report,
and what is reported received is right; nobody is held back beyond the bounds. At the end nothing is pinned, queued or
remembered, and a world without faults has everything in the pool.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.pool.scheduler import PoolScheduler
from vllm_mooncake_ascend.pool.settings import PoolSettings, WorkerSettings
from vllm_mooncake_ascend.pool.worker import PoolWorker
from vllm_mooncake_ascend.testing.pool_simulator.engine import TOKENS_PER_BLOCK, Engine
from vllm_mooncake_ascend.testing.pool_simulator.plan import Job, PoolPlan
from vllm_mooncake_ascend.testing.pool_simulator.store import Clock, SimulatedStore
from vllm_mooncake_ascend.testing.pool_simulator.worker import SimulatedWorker

GROUP = GroupLayout(tokens_per_block=TOKENS_PER_BLOCK, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)


class Violation(AssertionError):
    """A law of the world was broken."""


@dataclasses.dataclass(frozen=True, slots=True)
class Machines:
    """Who makes the machines; planted bugs put others in their place."""

    scheduler: Callable[[PoolSettings], PoolScheduler] = PoolScheduler
    worker: Callable[[int, WorkerSettings], PoolWorker] = PoolWorker


class World:
    """Carries out a plan; raises Violation, or whatever a machine raises."""

    def __init__(self, plan: PoolPlan, machines: Machines, story: list[str] | None = None) -> None:
        self._plan = plan
        rng = random.Random(plan.seed)
        self._clock = Clock()
        self._store = SimulatedStore(self._clock, plan.faults, rng)
        self._settings = PoolSettings(
            namespace="n0",
            groups=(GROUP,),
            hash_tokens=TOKENS_PER_BLOCK,
            num_ranks=plan.num_ranks,
            can_report_unknown_at_once=plan.reports_unknown_at_once,
            max_saved_blocks=plan.max_saved_blocks,
            tells_events=True,
        )
        scheduler = machines.scheduler(self._settings)
        self._engine = Engine(plan, self._settings, scheduler, self._clock, self._store, self.check)
        self._engine.record.story = story
        worker_settings = WorkerSettings(max_queued_blocks=plan.max_queued_blocks)
        for rank in range(plan.num_ranks):
            machine = machines.worker(rank, worker_settings)
            self._engine.workers.append(SimulatedWorker(rank, machine, self._clock, self._store, rng, self))

    # --- what workers ask of the world --------------------------------------------------------------------------------

    def check(self, holds: bool, law: str) -> None:
        """One law."""
        if not holds:
            raise Violation(f"at {self._clock.now:.3f} s: {law}")

    def wake(self) -> None:
        """A worker has something to tell with the next step."""
        self._engine.wake()

    def use_of(self, block_id: int) -> int:
        """How often the block was handed out."""
        return self._engine.blocks.uses[block_id]

    def is_in_use(self, block_id: int) -> bool:
        """Whether a request computes with the block."""
        return any(block_id in one.block_ids for one in self._engine.requests if one.state == "running")

    def check_lease(self, load_id: int) -> None:
        """A get begins: what its lookup found must still be leased."""
        age_s = self._clock.now - self._engine.record.load_looked_up_s[load_id]
        self.check(age_s <= self._settings.object_lease_s, f"load {load_id} gets what was looked up {age_s:.1f} s ago")

    # --- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Everything that is planned, and long enough for all bounds to pass."""
        for job in self._plan.jobs:
            self._clock.at(job.at_s, lambda job=job: self._engine.arrive(job))  # type: ignore[misc]
        for at_s in self._plan.clears_cache_at_s:
            self._clock.at(at_s, self._engine.blocks.clear_cache)
        for number, at_s in enumerate(self._plan.resets_at_s):
            self._clock.at(at_s, lambda number=number: self._engine.reset(f"n{number + 1}"))  # type: ignore[misc]
        quiet_s = 2 * (limits.STORE_CALL_S + limits.RANK_ANSWER_S + limits.QUARANTINE_S)
        end_s = max(job.at_s for job in self._plan.jobs) + self._plan.crowded_s[1] + quiet_s
        self._clock.run(end_s)
        self._engine.arrive(Job(at_s=end_s, request_id="last", family=9, num_blocks=1))
        self._clock.run(end_s + quiet_s)
        self._check_end()

    def _check_end(self) -> None:
        engine, machine = self._engine, self._engine.machine
        held = (machine.num_pinned_blocks, machine.num_waiting, machine.num_saves, machine.num_requests)
        self.check(held == (0, 0, 0, 0), f"pinned blocks, waiting requests, saves, requests at the end: {held}")
        self.check(not any(engine.blocks.owners.values()), f"blocks held at the end: {engine.blocks.owners}")
        self.check(all(one.state == "over" for one in engine.requests), "a request never ended")
        left = {(worker.machine.num_loads, worker.machine.num_saves) for worker in engine.workers}
        self.check(left == {(0, 0)}, f"orders left at the workers: {left}")
        self.check(not machine.is_breaker_open, "the breaker is open though the store is well")
        self._check_events()
        if self._plan.is_gentle:
            keys = {f"n0/0/{worker.rank}/{name.hex()}" for worker in engine.workers for name in engine.record.expected}
            self.check(keys <= set(self._store.values), f"never saved: {sorted(keys - set(self._store.values))[:3]}")
            self.check(engine.record.num_failed == 0, "a load failed without a reason")

    def _check_events(self) -> None:
        """What was told by KV events: the end of each save, and nothing that the store does not have, unless it lost it."""
        record = self._engine.record
        self.check(not record.listener.orders, f"saves of which nothing was told: {sorted(record.listener.orders)}")
        told = {
            f"{record.namespace}/{group_index}/{worker.rank}/{name.hex()}"
            for group_index, name in record.listener.believed
            for worker in self._engine.workers
        }
        keeps_all = self._plan.faults.lost == 0 and self._plan.faults.outage == (0.0, 0.0)
        untrue = told - set(self._store.values)
        self.check(not keeps_all or not untrue, f"told to be in the pool, and never were: {sorted(untrue)[:3]}")
        if self._plan.is_gentle:
            untold = record.expected - {name for _, name in record.listener.believed}
            self.check(not untold, f"in the pool, and never told: {sorted(untold)[:3]}")
