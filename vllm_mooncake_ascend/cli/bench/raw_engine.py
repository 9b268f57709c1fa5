"""Mooncake's own transfer engine with none of our code between: the yardstick of `bench transfer`.

The one place of `cli` that imports Mooncake (named in .importlinter). Set the environment before the first engine: both sides
of a comparison must have the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch

RawCall = tuple[list[int], list[int], list[int]]
"""Local addresses, remote addresses and lengths, as Mooncake takes them."""


class RawEngineFailed(RuntimeError):
    """Mooncake said no: there is nothing to measure."""


class RawEngine:
    """Over TCP, on loopback. Goes with the process: Mooncake has no close."""

    def __init__(self, regions: Sequence[Region]) -> None:
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        _expect_done("initialize", self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        addresses, lengths_bytes = [one.base_address for one in regions], [one.length_bytes for one in regions]
        _expect_done("batch_register_memory", self._engine.batch_register_memory(addresses, lengths_bytes, "*"))
        self.session = f"127.0.0.1:{self._engine.get_rpc_port()}"

    def read(self, session: str, calls: Sequence[RawCall]) -> None:
        """One call after the other, each until it is done."""
        for call in calls:
            _expect_done("batch_transfer_sync_read", self._engine.batch_transfer_sync_read(session, *call))


def raw_calls(batches: Sequence[CopyBatch]) -> list[RawCall]:
    """The same descriptors in the same calls."""
    return [
        (batch.local_addresses.tolist(), batch.remote_addresses.tolist(), batch.lengths_bytes.tolist()) for batch in batches
    ]


def _expect_done(call: str, code: int) -> None:
    if code != 0:
        raise RawEngineFailed(f"Mooncake's {call} returned {code}")
