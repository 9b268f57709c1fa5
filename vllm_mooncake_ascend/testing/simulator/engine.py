"""One start of one simulated engine: its clock, its pool, and both roles of its scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_mooncake_ascend.layout.plane import GroupLayout, RankLayout
from vllm_mooncake_ascend.testing.simulator.blocks import BlockPool, Violation
from vllm_mooncake_ascend.testing.simulator.decode import DecodeSide
from vllm_mooncake_ascend.testing.simulator.prefill import PrefillSide
from vllm_mooncake_ascend.testing.simulator.workers import Workers
from vllm_mooncake_ascend.types import Incarnation, PeerAddress

if TYPE_CHECKING:
    from vllm_mooncake_ascend.testing.simulator.world import World


class Engine:
    """An engine process of its own clock. `alive` and `frozen_until_s` are of its scheduler."""

    def __init__(self, world: World, index: int, incarnation: str, clock_offset_s: float) -> None:
        plan = world.plan
        self.world = world
        self.index = index
        self.incarnation = Incarnation(incarnation)
        self.alive = True
        self.frozen_until_s = 0.0
        self.clock_offset_s = clock_offset_s
        self.pool = BlockPool(plan.num_blocks, plan.num_ranks)
        self.workers = Workers(self, plan.num_ranks)
        self.prefill = PrefillSide(self)
        self.decode = DecodeSide(self)
        self._is_step_due = False

    def now(self) -> float:
        """This engine's own clock: nobody else has the same."""
        return self.world.now + self.clock_offset_s

    def at_own(self, own_s: float) -> float:
        """World time at which this engine's clock has surely passed a time: subtraction rounds."""
        return own_s - self.clock_offset_s + 1e-6

    def kill(self) -> None:
        self.alive = False
        self.workers.alive = False

    def poke(self) -> None:
        """Something changed: let the scheduler step soon, if it has work or steps without."""
        if not self._is_step_due and (self.decode.has_requests or self.prefill.has_requests or not self.world.plan.is_lazy):
            self._is_step_due = True
            self.world.at(self.world.now + 0.001 + self.world.rng.random() * 0.01, self, self._step)

    def _step(self) -> None:
        self._is_step_due = False
        self.prefill.apply_pending()
        self.decode.step()

    def check_at_rest(self) -> None:
        """With no client left, nothing may be left of any transfer.

        Raises:
            Violation: names what is left.
        """
        self.prefill.apply_pending()
        self.decode.apply_pending()
        self.prefill.check_at_rest()
        self.decode.check_at_rest()
        held = [block_id for block_id, refs in enumerate(self.pool.refs) if refs]
        if held:
            raise Violation(f"engine {self.index}: blocks {held} are still held at the end")
        if self.workers.num_reads:
            raise Violation(f"engine {self.index}: {self.workers.num_reads} reads have not ended")


def rank_layouts(index: int, num_ranks: int, tokens_per_block: int) -> tuple[RankLayout, ...]:
    """Layouts whose session names the engine's place: whoever runs there is read."""
    group = GroupLayout(
        tokens_per_block=tokens_per_block, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False
    )
    return tuple(
        RankLayout(
            tp_rank=rank, tp_size=num_ranks, pp_rank=0, pp_size=1, session=str(index), groups=(group,), planes=(), regions=()
        )
        for rank in range(num_ranks)
    )


def address_of(index: int) -> PeerAddress:
    return PeerAddress(f"engine:{index}")


def index_of(address: PeerAddress) -> int:
    return int(address.partition(":")[2])
