"""The in-memory world of the engine contract: instant, deterministic."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import ReadResult, TransferEngine
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.testing.contract_world import Peer
from vllm_mooncake_ascend.testing.engine_peer import run_batches
from vllm_mooncake_ascend.testing.memory import Bytes, address_of, pattern, region_of
from vllm_mooncake_ascend.testing.memory_engine import MemoryNetwork, MemoryTransferEngine
from vllm_mooncake_ascend.types import Outcome, Session

_RUN_BYTES = 64 << 10
_ROUNDS = 50
_ANSWER_S = 60.0


class MemoryPeer:
    """An engine of the same `MemoryNetwork`, with patterned memory."""

    def __init__(self, network: MemoryNetwork, num_bytes: int, seed: int) -> None:
        self.num_bytes = num_bytes
        self.seed = seed
        self._network = network
        self._engine = network.engine()
        self._memory = self._serve()

    @property
    def session(self) -> Session:
        return self._engine.session

    @property
    def base_address(self) -> int:
        return address_of(self._memory)

    def stop(self) -> None:
        self._network.stop(self.session)

    def resume(self) -> None:
        self._network.resume(self.session)

    def kill(self) -> None:
        self._network.kill(self.session)

    def close_engine(self) -> None:
        self._engine.close()

    def restart(self, seed: int) -> None:
        self.seed = seed
        self._engine = self._network.engine(session=self.session)
        self._memory = self._serve()

    def start_reading(self, source: Region, session: Session, seed: int) -> Callable[[], list[str]]:
        failures: list[str] = []
        thread = threading.Thread(target=lambda: failures.extend(self._read(source, session, seed)), daemon=True)
        thread.start()

        def wait() -> list[str]:
            thread.join(_ANSWER_S)
            return ["the reader is still at it"] if thread.is_alive() else failures

        return wait

    def _serve(self) -> Bytes:
        memory = pattern(self.seed, self.num_bytes)
        self._engine.register([region_of(memory)])
        return memory

    def _read(self, source: Region, session: Session, seed: int) -> list[str]:
        local = pattern(seed + 1, source.length_bytes)
        self._engine.register([region_of(local)])
        results = [
            self._engine.read(session, batch)
            for _ in range(_ROUNDS)
            for batch in run_batches(local, source.base_address, _RUN_BYTES)
        ]
        failures = [result.reason for result in results if result.outcome is not Outcome.DONE]
        return failures if (local == pattern(seed, local.nbytes)).all() else [*failures, "wrong bytes"]


class MemoryWorld:
    """Engines in memory: instant, deterministic."""

    call_bound_s = 5.0
    late_watch_s = limits.QUARANTINE_S

    def __init__(self) -> None:
        self.network = MemoryNetwork()

    def engine(self) -> MemoryTransferEngine:
        return self.network.engine()

    def peer(self, num_bytes: int, seed: int = 1) -> MemoryPeer:
        return MemoryPeer(self.network, num_bytes, seed)

    def read_while_stopping(self, engine: TransferEngine, peer: Peer, batch: CopyBatch, first_byte: Bytes) -> ReadResult:
        peer.stop()
        result = engine.read(peer.session, batch)
        assert first_byte.any(), "a part of a stopped read has landed"
        return result

    def pass_time(self, seconds: float) -> None:
        self.network.advance(seconds)

    def close(self) -> None:
        pass
