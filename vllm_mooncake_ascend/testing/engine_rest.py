"""How engines look when nothing is going on, so that a test can end by showing that nothing was left behind."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_process import EngineProcess
from vllm_mooncake_ascend.testing.engine_prompts import random_prompt

GAUGES = (
    *("leases_open", "blocks_pinned", "loads_in_flight", "quarantined_blocks"),
    *("pool_requests_waiting", "pool_loads_in_flight", "pool_saves_in_flight", "pool_blocks_pinned"),
    *("pool_blocks_quarantined", "pool_queue_depth", "pool_breaker_open"),
)
BROKEN = "mooncake_ascend:broken_invariants_total"
SETTLE_TIMEOUT_S = 10.0
SETTLE_POLL_S = 0.1
NUM_LANES = 4
"""Connections that Mooncake's TCP transport opens to a peer as it needs them and then keeps (MC_TCP_LANES_PER_PEER)."""


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds; two of them are equal when nothing was left behind between them."""

    num_requests: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    held_block_ids: tuple[int, ...]
    gauges: dict[str, float]
    num_threads: int
    num_sockets: int
    num_broken_invariants: float


class AtRest:
    """What each engine of a test held when it was idle, and what is different now.

    Args:
        num_spare_sockets: connections to peers that may have come since; they are kept and bounded, not leaked.
        num_spare_threads: threads that may have come with them, bounded likewise.
    """

    def __init__(self, *, num_spare_sockets: int = NUM_LANES, num_spare_threads: int = 0) -> None:
        self._num_spare = {"num_sockets": num_spare_sockets, "num_threads": num_spare_threads}
        self._num_flushes = 0
        self._at_start: dict[str, Footprint] = {}

    def remember(self, engine: EngineProcess) -> None:
        """Take what an engine holds now for its start: the first time, and after a restart."""
        self._at_start.pop(engine.spec.name, None)
        self._at_start[engine.spec.name] = self._settled(engine)

    def changes(self, engine: EngineProcess) -> dict[str, tuple[Any, Any]]:
        """What differs from the engine's start, as (at start, now); fewer threads and sockets do not."""
        before, after = _flat(self._at_start[engine.spec.name]), _flat(self._settled(engine))
        grown = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
        for name, num_spare in self._num_spare.items():
            if after[name] <= before[name] + num_spare:
                grown.pop(name, None)
        return grown

    def flush(self, engine: EngineProcess) -> None:
        """One small request: an idle engine runs no hook, so releases that came in wait for the next request."""
        self._num_flushes += 1
        engine.submit(random_prompt(f"flush {self._num_flushes}", 4), Sampling(max_tokens=1)).result()

    def _settled(self, engine: EngineProcess) -> Footprint:
        """The engine's footprint, once it holds nothing or has had its time to let go."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            self.flush(engine)
            found = footprint(engine)
            if _is_idle(found) or time.monotonic() > deadline_s:
                return found
            time.sleep(SETTLE_POLL_S)


def footprint(engine: EngineProcess) -> Footprint:
    """What an engine holds now."""
    state, metrics = engine.state(), engine.metrics()
    return Footprint(
        num_requests=state.num_requests,
        num_running=state.num_running,
        num_waiting=state.num_waiting,
        num_free_blocks=state.num_free_blocks,
        held_block_ids=state.held_block_ids,
        gauges={name: metrics.get(f"mooncake_ascend:{name}", 0.0) for name in GAUGES},
        num_threads=state.num_threads,
        num_sockets=state.num_sockets,
        num_broken_invariants=sum(value for name, value in metrics.items() if name.startswith(BROKEN)),
    )


def _flat(found: Footprint) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(found)
    return {**values.pop("gauges"), **values}


def _is_idle(found: Footprint) -> bool:
    return not found.held_block_ids and found.num_requests == 0 and not any(found.gauges.values())
