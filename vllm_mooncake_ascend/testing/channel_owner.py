"""RecordingOwner: an owner of a side channel that writes down what it is told, for tests that wait for it."""

from __future__ import annotations

import collections
import queue
from typing import TypeVar

from vllm_mooncake_ascend.types import PeerAddress
from vllm_mooncake_ascend.wire.messages import FromProducer, FromReader

WAIT_S = 30.0
"""Longest wait of a test for something that takes milliseconds."""

Heard = TypeVar("Heard")


class RecordingOwner:
    """Follows `runtime.side_channel.Owner`. Its queues may be read from any thread."""

    def __init__(self) -> None:
        self.from_readers: queue.Queue[tuple[bytes, FromReader]] = queue.Queue()
        self.from_producers: queue.Queue[tuple[PeerAddress, FromProducer]] = queue.Queue()
        self.lost: queue.Queue[tuple[PeerAddress, str]] = queue.Queue()
        self.failures: queue.Queue[BaseException] = queue.Queue()
        self.counted: queue.Queue[tuple[str, str]] = queue.Queue()
        self.timers_asked: queue.Queue[None] = queue.Queue()
        self.crowded = False
        self.timer_wait_s: float | None = None
        self.failure: BaseException | None = None
        """Raised instead of taking a reader's message."""

    def reader_spoke(self, peer: bytes, message: FromReader) -> None:
        if self.failure is not None:
            raise self.failure
        self.from_readers.put((peer, message))

    def producer_spoke(self, peer: PeerAddress, message: FromProducer) -> None:
        self.from_producers.put((peer, message))

    def peer_disconnected(self, peer: PeerAddress, reason: str) -> None:
        self.lost.put((peer, reason))

    def fire_timers(self) -> float | None:
        self.timers_asked.put(None)
        return self.timer_wait_s

    def is_crowded(self) -> bool:
        return self.crowded

    def count(self, name: str, label: str = "") -> None:
        self.counted.put((name, label))

    def channel_failed(self, error: BaseException) -> None:
        self.failures.put(error)

    def wait_for_counts(self, name: str, label: str, amount: int) -> int:
        """Take counts until `amount` of this kind have come; returns how many did."""
        seen: collections.Counter[tuple[str, str]] = collections.Counter()
        while seen[name, label] < amount:
            seen[self.counted.get(timeout=WAIT_S)] += 1
        return seen[name, label]
