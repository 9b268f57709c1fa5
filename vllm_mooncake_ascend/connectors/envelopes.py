"""What vLLM carries between the roles of our connectors: with each step to the workers, with its output back, and once at
the start. vLLM pickles all of it; inside are only values of `wire`.
"""

from __future__ import annotations

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_mooncake_ascend.wire.pool_steps import EMPTY_POOL_STEP, NO_POOL_RESULTS, PoolResults, PoolStep
from vllm_mooncake_ascend.wire.steps import EMPTY_STEP, NO_READS, Report, WorkerResults, WorkerStep


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler -> workers, every step."""

    p2p: WorkerStep = EMPTY_STEP
    pool: PoolStep = EMPTY_POOL_STEP
    reports: tuple[Report, ...] = ()
    """Receives that have ended: every worker tells vLLM of each, in this step."""
    echo: int = 0
    """Not 0: every worker sends it back with the output of this step, whose KV is written then."""
    number: int = 0
    """Of the step: workers that have something to tell send it back."""
    wait_s: float = 0.0
    """A worker that has nothing to tell may wait so long for it: the engine runs nothing."""


@dataclasses.dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, once: the encoded RankLayout."""

    layout: bytes


@dataclasses.dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Worker -> scheduler, in steps that have something to tell."""

    p2p: WorkerResults = NO_READS
    pool: PoolResults = NO_POOL_RESULTS
    echo: int = 0
    """That of the step. vLLM aggregates the workers' outputs of one step, so it is the same for all."""
    number: int = 0
    """Likewise."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(
            p2p=WorkerResults(ended=self.p2p.ended + other.p2p.ended),
            pool=PoolResults(loads=self.pool.loads + other.pool.loads, saves=self.pool.saves + other.pool.saves),
            echo=max(self.echo, other.echo),
            number=max(self.number, other.number),
        )
