"""The world a contract check runs in, as Protocols, and the vocabulary of the checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from vllm_mooncake_ascend.engines.base import ReadResult, TransferEngine
from vllm_mooncake_ascend.errors import EngineError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.testing.memory import Bytes, address_of, batch_of, pattern, region_of
from vllm_mooncake_ascend.types import Outcome, Session

KIB = 1 << 10
MIB = 1 << 20
_T = TypeVar("_T")


class Peer(Protocol):
    """Another engine, whose registered memory holds `pattern(seed, num_bytes)`."""

    @property
    def session(self) -> Session: ...
    @property
    def base_address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def seed(self) -> int: ...

    def stop(self) -> None:
        """Freeze its process."""

    def resume(self) -> None:
        """Let it go on."""

    def kill(self) -> None:
        """End its process at once."""

    def close_engine(self) -> None:
        """It closes its engine in good order."""

    def restart(self, seed: int) -> None:
        """After `kill`: come back with other memory and other content; under the same session where that can happen."""

    def start_reading(self, source: Region, session: Session, seed: int) -> Callable[[], list[str]]:
        """Begin to read `source`, which should be `pattern(seed)`, some rounds over; the result waits and names what failed."""


class World(Protocol):
    """Where engines of one kind live during one check."""

    @property
    def call_bound_s(self) -> float:
        """No read may take longer."""

    @property
    def late_watch_s(self) -> float:
        """How long to look for late bytes."""

    def engine(self) -> TransferEngine:
        """A new engine under test, in this process."""

    def peer(self, num_bytes: int, seed: int = 1) -> Peer:
        """A new engine to read from."""

    def read_while_stopping(self, engine: TransferEngine, peer: Peer, batch: CopyBatch, first_byte: Bytes) -> ReadResult:
        """Read, and stop the peer when bytes are under way. `first_byte`: views into the target to see it by."""

    def pass_time(self, seconds: float) -> None: ...


Check = Callable[[World], None]


def registered(engine: TransferEngine, num_bytes: int) -> Bytes:
    """Zeroed memory, registered as a target."""
    local = np.zeros(num_bytes, dtype=np.uint8)
    engine.register([region_of(local)])
    return local


def content(peer: Peer) -> Bytes:
    return pattern(peer.seed, peer.num_bytes)


def runs_batch(local: Bytes, peer: Peer, runs: list[tuple[int, int, int]]) -> CopyBatch:
    """Runs as (local offset, remote offset, length)."""
    return batch_of([(address_of(local) + left, peer.base_address + right, length) for left, right, length in runs])


def whole_batch(local: Bytes, peer: Peer) -> CopyBatch:
    """All of the peer's memory into `local`, in runs of at most 64 KiB."""
    num_bytes = min(local.nbytes, peer.num_bytes)
    step = 64 * KIB
    return runs_batch(local, peer, [(offset, offset, min(step, num_bytes - offset)) for offset in range(0, num_bytes, step)])


def refuses(call: Callable[[], None]) -> bool:
    try:
        call()
    except EngineError as error:
        return error.outcome is Outcome.REFUSED
    return False


def timed(world: World, call: Callable[[], _T]) -> _T:
    started_s = time.monotonic()
    result = call()
    assert time.monotonic() - started_s < world.call_bound_s
    return result
