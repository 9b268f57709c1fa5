"""A simulated worker of the pool: its machine, its memory, and the shell between them and the store."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.pool import actions, events
from vllm_mooncake_ascend.pool.worker import PoolWorker
from vllm_mooncake_ascend.testing.pool_simulator.store import Alarm, Clock, SimulatedStore
from vllm_mooncake_ascend.types import Outcome
from vllm_mooncake_ascend.wire.pool_steps import LoadEnded, LoadOrder, PoolStep, SaveEnded, SaveOrder

Cell = tuple[int, int]
"""A block id and how often it was handed out before: one use of one block."""
Item = tuple[str, int, bytes]
"""Key, block id, hash."""


class SimulatedWorker:
    """One rank. `memory` maps a block id to what is in it; `use_of` says which use of a block is the present one."""

    def __init__(
        self,
        rank: int,
        machine: PoolWorker,
        clock: Clock,
        store: SimulatedStore,
        rng: random.Random,
        world: Any,
    ) -> None:
        self.rank = rank
        self.machine = machine
        self.memory: dict[int, bytes] = {}
        self.results: list[LoadEnded | SaveEnded] = []
        self._clock = clock
        self._store = store
        self._rng = rng
        self._world = world
        self._plans: dict[tuple[str, int], list[list[Item]]] = {}
        self._alarm = Alarm(clock, lambda: self.feed(events.TimerFired()))

    def step(self, step: PoolStep) -> None:
        """What comes with an engine step."""
        for load_id in step.cancels:
            self.feed(events.LoadCancelled(load_id=load_id))
        for load in step.loads:
            calls = self._plan("get", load.load_id, load)
            cut = tuple(tuple(block_id for _, block_id, _ in call) for call in calls)
            if self._rng.random() < self._store.faults.unplannable:
                self.feed(events.LoadRefused(load_id=load.load_id, block_ids=sum(cut, ())))
            else:
                self.feed(events.LoadPlanned(load_id=load.load_id, calls=cut))
        for save in step.saves:
            sizes = tuple(len(call) for call in self._plan("put", save.save_id, save))
            if self._rng.random() < self._store.faults.unplannable:
                self.feed(events.SaveRefused(save_id=save.save_id, chain=save.chain))
            else:
                self.feed(events.SavePlanned(save_id=save.save_id, chain=save.chain, calls=sizes))

    def feed(self, event: events.WorkerEvent) -> None:
        """One event to the machine, and what it asks for."""
        for action in self.machine.handle(event, self._clock.now):
            match action:
                case actions.StartGet():
                    self._get(action.load_id, action.call_index)
                case actions.StartPut():
                    self._put(action.save_id, action.call_index)
                case actions.EndLoad() | actions.EndSave():
                    self.results.append(action.ended)
                    self._world.wake()
                case actions.ProbeStore():
                    self._later(0.001, lambda: self.feed(events.ProbeEnded(is_healthy=self._store.is_healthy())))
                case _:
                    pass
        self._alarm.set(self.machine.next_timer())

    def _plan(self, kind: str, number: int, order: LoadOrder | SaveOrder) -> list[list[Item]]:
        items = [
            (f"{order.namespace}/{group.group_index}/{self.rank}/{block_hash.hex()}", block_id, block_hash)
            for group in order.groups
            for block_id, block_hash in zip(group.block_ids, group.hashes, strict=True)
        ]
        size = self._rng.randint(1, 4)
        calls = [items[first : first + size] for first in range(0, len(items), size)]
        self._plans[kind, number] = calls
        return calls

    # --- calls --------------------------------------------------------------------------------------------------------

    def _get(self, load_id: int, call_index: int) -> None:
        items = self._plans["get", load_id][call_index]
        self._world.check_lease(load_id)
        call = self._store.get([key for key, _, _ in items])
        uses = [self._world.use_of(block_id) for _, block_id, _ in items]
        values = [self._store.values.get(key, b"nothing") for key, _, _ in items]

        def end() -> None:
            for (_, block_id, _), outcome, value, use in zip(items, call.outcomes, values, uses, strict=True):
                if outcome is Outcome.DONE:
                    self._land((block_id, use), value, load_id)
                elif outcome is Outcome.UNKNOWN:
                    self._land_later((block_id, use), load_id)
            event = events.GetEnded(
                load_id=load_id,
                call_index=call_index,
                outcomes=tuple(call.outcomes),
                num_missing=call.num_missing,
                num_bytes=call.outcomes.count(Outcome.DONE),
                is_lost=call.is_lost,
            )
            self.feed(event)

        self._later(call.seconds, end)

    def _land_later(self, cell: Cell, load_id: int) -> None:
        for _ in range(2):
            delay_s = self._rng.uniform(0, limits.QUARANTINE_S - 1)
            self._later(delay_s, lambda: self._land(cell, b"late bytes", load_id))

    def _land(self, cell: Cell, value: bytes, load_id: int) -> None:
        """Bytes of a get arrive. They must find the block as it was when they were asked for, and nobody in it."""
        block_id, use = cell
        self._world.check(use == self._world.use_of(block_id), f"bytes of load {load_id} landed in a block of others")
        self._world.check(not self._world.is_in_use(block_id), f"bytes of load {load_id} landed after its report")
        self.memory[block_id] = value

    def _put(self, save_id: int, call_index: int) -> None:
        items = self._plans["put", save_id][call_index]
        call = self._store.put(len(items))
        uses = [self._world.use_of(block_id) for _, block_id, _ in items]

        def read(item: Item, use: int, *, is_stored: bool) -> None:
            key, block_id, block_hash = item
            is_right = use == self._world.use_of(block_id) and self.memory.get(block_id) == block_hash
            self._world.check(is_right, f"save {save_id} read a block that holds something else")
            if is_stored and not self._store.is_dead():
                self._store.values.setdefault(key, block_hash)

        def end() -> None:
            for item, outcome, use in zip(items, call.outcomes, uses, strict=True):
                if outcome is Outcome.DONE:
                    read(item, use, is_stored=True)
                elif outcome is Outcome.UNKNOWN:
                    self._read_later(item, use, read)
            event = events.PutEnded(
                save_id=save_id,
                call_index=call_index,
                outcomes=tuple(call.outcomes),
                num_bytes=call.outcomes.count(Outcome.DONE),
                is_full=call.is_full,
                is_lost=call.is_lost,
            )
            self.feed(event)

        self._later(call.seconds, end)

    def _read_later(self, item: Item, use: int, read: Callable[..., None]) -> None:
        is_stored = self._rng.random() < 0.5
        self._later(self._rng.uniform(0, limits.QUARANTINE_S - 1), lambda: read(item, use, is_stored=is_stored))

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._clock.at(self._clock.now + seconds, call)
