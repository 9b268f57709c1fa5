"""A simulated world: one plan, one random stream, one clock, and the engines of the real machines in it.

Nothing here waits: time jumps from event to event. Everything that must never be is checked at the moment it would
happen (`blocks.Violation`); what must come in the end is checked when no event is left.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.p2p.consumer import Consumer
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.reader import Reader
from vllm_mooncake_ascend.testing.simulator.blocks import Violation
from vllm_mooncake_ascend.testing.simulator.client import Client
from vllm_mooncake_ascend.testing.simulator.engine import Engine, rank_layouts
from vllm_mooncake_ascend.testing.simulator.network import DataPlane, SideChannel
from vllm_mooncake_ascend.testing.simulator.plan import FOREVER_S, TOKENS_PER_BLOCK, Accident, Hog, Plan
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages

HORIZON_S = 3_000.0
"""By then the longest wait of all, one after the other, is over."""
MAX_EVENTS = 30_000
"""A world of a few requests that needs more is running in circles."""


class Process(Protocol):
    """Whoever an event is for."""

    alive: bool
    frozen_until_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Machines:
    """The machines under test, and the mistakes a shell could make around them."""

    producer: Callable[..., Producer] = Producer
    consumer: Callable[..., Consumer] = Consumer
    reader: Callable[..., Reader] = Reader
    publishes_scheduled_steps: bool = False
    """Planted: the end of a prefill is told when its last step is scheduled, not when its output has come back."""
    publishes_scheduled_progress: bool = False
    """Planted: the progress of a prefill is told when a step is scheduled, not when its output has come back."""
    treats_stop_as_failure: bool = False
    """Planted: a prefill that ended by stop is said to have no KV."""
    forgets_what_is_shared_again: bool = False
    """Planted: a layout that was forgotten and shared again between two steps is forgotten."""


class World:
    """Runs one plan."""

    def __init__(self, plan: Plan, machines: Machines, trace: list[str] | None = None) -> None:
        self.plan = plan
        self.machines = machines
        self.trace = trace
        self.rng = random.Random(plan.seed ^ 0x5EED)
        self.now = 0.0
        self.layouts = [rank_layouts(index, plan.num_ranks, TOKENS_PER_BLOCK) for index in range(plan.num_engines)]
        self.side_channel = SideChannel(self)
        self.data_plane = DataPlane(self)
        self.by_incarnation: dict[str, Engine] = {}
        self._queue: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.engines: list[Engine | None] = [None] * plan.num_engines

    # --- what the parts use -------------------------------------------------------------------------------------------

    def at(self, at_s: float, process: Process | None, do: Callable[..., None], *args: object) -> None:
        """Let something happen to a process (None: to nobody) at a time, later if it is frozen, never if it is dead."""
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, process, do, args))

    def number(self) -> int:
        """A number never given before."""
        self._count += 1
        return self._count

    @staticmethod
    def digest(prompt: int, num_tokens: int) -> bytes:
        return b"digest%d.%d" % (prompt, num_tokens)

    @staticmethod
    def other_prompt(prompt: int) -> int:
        """A prompt of the same length that is not the same."""
        return prompt + 1_000

    def fingerprint(self, index: int) -> dict[str, str]:
        return {"model": "odd" if index == self.plan.odd_engine else "even"}

    @staticmethod
    def differences(
        local: Mapping[str, str], _: Sequence[RankLayout], remote: Mapping[str, str], __: Sequence[RankLayout]
    ) -> tuple[str, ...]:
        """A stand-in for `layout.compatibility.differences`."""
        return () if local == remote else ("model",)

    def trace_event(self, engine: Engine, machine: str, event: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.3f} engine {engine.index} {machine}: {event}")

    # --- running ------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Let everything happen; returns the number of events.

        Raises:
            Violation: something happened that must not, or is left that must not be.
        """
        for index in range(self.plan.num_engines):
            self._start_engine(index)
        for number, job in enumerate(self.plan.jobs):
            prompt = number if job.same_prompt_as is None else job.same_prompt_as
            self.at(job.at_s, None, Client(self, job, prompt).start)
        for accident in self.plan.accidents:
            self.at(accident.at_s, None, self._befall, accident)
        for hog in self.plan.hogs:
            self.at(hog.at_s, None, self._hog, hog)
        for _ in range(self.plan.num_strangers):
            self.at(self.rng.random() * self.rng.choice((0.2, 40.0)), None, self._speak_up)
        num_events = self._drain()
        for engine in self.engines:
            if engine is not None and engine.alive:
                engine.check_at_rest()
        return num_events

    def _drain(self) -> int:
        num_events = 0
        while self._queue:
            at_s, count, process, do, args = heapq.heappop(self._queue)
            if process is not None:
                if not process.alive:
                    continue
                if process.frozen_until_s > at_s:
                    heapq.heappush(self._queue, (process.frozen_until_s, count, process, do, args))
                    continue
            num_events += 1
            self.now = at_s
            if at_s > HORIZON_S or num_events > MAX_EVENTS:
                raise Violation(f"after {num_events} events and {at_s:.0f} s there is no rest")
            do(*args)
        return num_events

    def _start_engine(self, index: int) -> None:
        incarnation = f"e{index}.{self.number()}"
        engine = Engine(self, index, incarnation, clock_offset_s=self.rng.random() * 1e5)
        self.engines[index] = engine
        self.by_incarnation[incarnation] = engine

    def _hog(self, hog: Hog) -> None:
        """Others take what is free of an engine's blocks, and give it back later."""
        engine = self.engines[hog.engine]
        if engine is None or not engine.alive:
            return
        block_ids = engine.pool.allocate(min(hog.num_blocks, engine.pool.num_free)) or []
        self.at(self.now + hog.seconds, engine, engine.pool.release, block_ids)
        self.at(self.now + hog.seconds, engine, engine.poke)

    def _speak_up(self) -> None:
        """A stranger says something that is well formed, to whoever runs at some address."""
        engine = self.engines[self.rng.randrange(self.plan.num_engines)]
        if engine is None or not engine.alive:
            return
        said = _nonsense(self.rng, engine.incarnation)
        self.at(self.now, engine, engine.prefill.hear_from, b"stranger", said)

    def _befall(self, accident: Accident) -> None:
        engine = self.engines[accident.engine]
        if engine is None or not engine.alive:
            return
        until_s = self.now + accident.seconds
        match accident.kind:
            case "kill":
                engine.kill()
                down_s = max(accident.seconds, limits.ENGINE_RESTART_MIN_S)
                if down_s < FOREVER_S:
                    self.at(self.now + down_s, None, self._start_engine, accident.engine)
            case "freeze":
                engine.frozen_until_s = until_s
            case "stop":
                engine.frozen_until_s = engine.workers.frozen_until_s = until_s
            case "partition":
                self.side_channel.block(accident.engine, accident.other, until_s)
            case "clog":
                self.side_channel.clog(accident.engine, accident.other, until_s)
            case "revoke":
                self.at(self.now, engine, engine.prefill.revoke)
                self.at(self.now + accident.seconds, engine, engine.prefill.revoke)
            case "disconnect":
                self.at(self.now, engine, engine.decode.disconnected, accident.other)


def _nonsense(rng: random.Random, expected: Incarnation) -> messages.FromReader:
    incarnation = Incarnation("stranger")
    transfer_id = TransferId(rng.choice(("t0", "t1", "nothing")))
    request_id = RequestId(rng.choice(("", "x")))
    match rng.randrange(5):
        case 0:
            return messages.Hello(incarnation=incarnation, version=99)
        case 1:
            return messages.Renew(
                incarnation=incarnation, expected=expected, sequence=7, transfers=((transfer_id, request_id),)
            )
        case 2:
            return messages.ReadDone(
                incarnation=incarnation, expected=expected, transfer_id=transfer_id, request_id=request_id, ok=True
            )
        case 3:
            return messages.Release(incarnation=incarnation, expected=expected, transfer_id=transfer_id, request_id=request_id)
        case _:
            return messages.Subscribe(
                incarnation=incarnation,
                expected=expected,
                transfer_id=transfer_id,
                request_id=request_id,
                streams=rng.random() < 0.5,
            )
