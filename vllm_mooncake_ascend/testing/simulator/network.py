"""Side channel and data plane of a simulated world: who hears what when, and which bytes land where when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.testing.simulator.blocks import JUNK, Violation
from vllm_mooncake_ascend.types import Outcome
from vllm_mooncake_ascend.wire.messages import FromProducer, FromReader

if TYPE_CHECKING:
    from vllm_mooncake_ascend.testing.simulator.engine import Engine
    from vllm_mooncake_ascend.testing.simulator.workers import Call
    from vllm_mooncake_ascend.testing.simulator.world import World


class SideChannel:
    """Carries messages between engines, as badly as the plan says."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._faults = world.plan.network
        self._losses_left = self._faults.losses_left
        self._blocked: dict[tuple[int, int], float] = {}
        """Until when a link loses everything."""
        self._clogged: dict[tuple[int, int], float] = {}
        """Until when a link holds everything back."""
        self._last: dict[tuple[int, int], float] = {}
        """Arrival of the last message of a link, for order."""

    def block(self, source: int, target: int, until_s: float) -> None:
        self._blocked[source, target] = until_s

    def clog(self, source: int, target: int, until_s: float) -> None:
        self._clogged[source, target] = until_s

    def to_producer(self, sender: Engine, target: int, message: FromReader) -> None:
        """From a decode engine to whoever runs at an address when it arrives."""
        for at_s in self._arrivals(sender.index, target):
            self._world.at(at_s, None, self._reach_producer, target, sender, message)

    def to_reader(self, sender: Engine, target: Engine, message: FromProducer) -> None:
        """From a producer to one start of a decode engine."""
        for at_s in self._arrivals(sender.index, target.index):
            self._world.at(at_s, target, target.decode.hear, sender.index, message)

    def _reach_producer(self, target: int, sender: Engine, message: FromReader) -> None:
        engine = self._world.engines[target]
        if engine is not None:
            self._world.at(self._world.now, engine, engine.prefill.hear, sender, message)

    def _arrivals(self, source: int, target: int) -> list[float]:
        """When copies of a message sent now arrive; none if it is lost."""
        rng, faults, link, now = self._world.rng, self._faults, (source, target), self._world.now
        if self._blocked.get(link, 0.0) > now:
            return []
        if faults.loss and self._losses_left and rng.random() < faults.loss:
            self._losses_left -= 1
            return []
        arrivals = [now + rng.random() * faults.delay_s]
        if faults.tail and rng.random() < faults.tail:
            arrivals[0] += rng.random() * faults.tail_s
        if faults.duplication and rng.random() < faults.duplication:
            arrivals.append(arrivals[0] + rng.random() * max(faults.delay_s, faults.tail_s))
        held_s = self._clogged.get(link, 0.0)
        if held_s > now:
            arrivals = [max(at_s, held_s) for at_s in arrivals]
        if not faults.reorders:
            arrivals[0] = self._last[link] = max(arrivals[0], self._last.get(link, 0.0))
        return arrivals


class DataPlane:
    """Engine calls: copy the tags of a source's blocks as they are at the moment the bytes move."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._faults = world.plan.reads

    def start(self, call: Call) -> None:
        """Decide what becomes of a call and when."""
        rng, faults, world = self._world.rng, self._faults, self._world
        source = call.served_by = world.engines[call.source]
        if source is None or not source.alive:
            world.at(world.now + 0.01, call.workers, call.end, Outcome.FAILED)
            return
        draw = rng.random()
        duration_s = rng.random() * 0.03
        if draw < faults.slow:
            duration_s = rng.random() * faults.slow_s
        draw = rng.random()
        for share, ending in (
            (faults.refused, self._refuse),
            (faults.failed, self._fail),
            (faults.failed_landed, self._fail_landed),
            (faults.unknown, self._lose_track),
        ):
            if draw < share:
                ending(call, duration_s)
                return
            draw -= share
        stalled_s = source.workers.frozen_until_s - world.now
        if stalled_s > limits.ENGINE_CALL_S:
            self._lose_track(call, limits.ENGINE_CALL_S)
        else:
            self._complete(call, max(duration_s, stalled_s))

    def _complete(self, call: Call, duration_s: float) -> None:
        now = self._world.now
        moves_at_s = now + duration_s * self._world.rng.random()
        self._world.at(moves_at_s, None, self._move, call, len(call.pairs))
        self._world.at(now + duration_s, call.workers, self._finish, call)

    def _finish(self, call: Call) -> None:
        call.end(Outcome.DONE if call.num_moved == len(call.pairs) else Outcome.FAILED)

    def _refuse(self, call: Call, _: float) -> None:
        self._world.at(self._world.now + 0.001, call.workers, call.end, Outcome.REFUSED)

    def _fail(self, call: Call, duration_s: float) -> None:
        self._world.at(self._world.now + duration_s, call.workers, call.end, Outcome.FAILED)

    def _fail_landed(self, call: Call, duration_s: float) -> None:
        moves_at_s = self._world.now + duration_s * self._world.rng.random()
        self._world.at(moves_at_s, None, self._move, call, self._world.rng.randrange(len(call.pairs) + 1))
        self._world.at(self._world.now + duration_s, call.workers, call.end, Outcome.FAILED)

    def _lose_track(self, call: Call, duration_s: float) -> None:
        """The outcome is unknown: some bytes may land at any time before the quarantine would be over."""
        world = self._world
        ends_at_s = world.now + duration_s
        world.at(ends_at_s, call.workers, call.end, Outcome.UNKNOWN)
        lands_at_s = ends_at_s + world.rng.random() * (limits.QUARANTINE_S - 1.0)
        world.at(lands_at_s, None, self._move, call, len(call.pairs))

    def _move(self, call: Call, num_pairs: int) -> None:
        """Bytes move now, from whoever served the source's session when the call began, if both processes live."""
        source = call.served_by
        if source is None or not source.alive or not call.workers.alive:
            return
        source_tags = source.pool.tags[call.rank]
        target = call.engine.pool
        for (source_block, target_block), epoch in zip(call.pairs[:num_pairs], call.epochs, strict=False):
            if target.epochs[target_block] != epoch:
                raise Violation(f"bytes of {call.request_id} landed in block {target_block} after it was freed")
            if call.engine.decode.is_reported_in_place(call.request_id):
                raise Violation(f"bytes of {call.request_id} landed in block {target_block} after it was reported")
            target.tags[call.rank][target_block] = source_tags[source_block] if source_block < len(source_tags) else JUNK
        call.num_moved = num_pairs
