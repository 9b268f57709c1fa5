"""A simulated worker of the pool: its machine, its memory, and the shell between them and the store."""

from __future__ import annotations

import dataclasses
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
LATEST_S = 700.0
"""No byte of an UNKNOWN get lands later than this, because no world lasts longer."""
Item = tuple[str, int, bytes]
"""Key, block id, hash."""


@dataclasses.dataclass(slots=True)
class Traffic:
    """What of the store's client moves."""

    num_gets: int = 0
    """Under way."""
    num_fences: int = 0
    """Those that held; late bytes of earlier gets never land."""
    is_fencing: bool = False


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
        self._traffic = Traffic()
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
                case actions.FenceStore():
                    self._fence()
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
        self._world.check(not self._traffic.is_fencing, "a get starts during a fence")
        self._traffic.num_gets += 1
        self._world.check_lease(load_id)
        call = self._store.get([key for key, _, _ in items])
        uses = [self._world.use_of(block_id) for _, block_id, _ in items]
        values = [self._store.values.get(key, b"nothing") for key, _, _ in items]

        for (_, block_id, _), outcome, use in zip(items, call.outcomes, uses, strict=True):
            if outcome is Outcome.UNKNOWN:
                self._land_until_fenced((block_id, use), load_id, call.seconds)

        def end() -> None:
            self._traffic.num_gets -= 1
            for (_, block_id, _), outcome, value, use in zip(items, call.outcomes, values, uses, strict=True):
                if outcome is Outcome.DONE:
                    self._land((block_id, use), value, load_id)
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

    def _land_until_fenced(self, cell: Cell, load_id: int, call_s: float) -> None:
        """Bytes of a get that ends UNKNOWN: during the call, soon after, and at any time."""
        num_fences = self._traffic.num_fences

        def land() -> None:
            if num_fences == self._traffic.num_fences:
                self._land(cell, b"late bytes", load_id)

        for latest_s in (call_s, call_s + 1.0, LATEST_S):
            self._later(self._rng.uniform(0, latest_s), land)

    def _fence(self) -> None:
        fencing = self._store.fence()
        self._world.check(not self._traffic.is_fencing, "two fences at once")
        self._traffic.is_fencing = True

        def end() -> None:
            self._traffic.is_fencing = False
            holds = fencing.holds and self._traffic.num_gets == 0
            self._traffic.num_fences += holds
            self.feed(events.FenceEnded(holds=holds))

        self._later(fencing.seconds, end)

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
