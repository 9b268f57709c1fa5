"""The buffers of a store's call as memory of this process: where they are, and bytes written into them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

from vllm_mooncake_ascend.planner.store_batch import StoreBatch

Write = tuple[int, bytes]
"""Address and what is written there."""


def spans_of(batch: StoreBatch, index: int) -> list[tuple[int, int]]:
    """Start and end of each buffer of one key."""
    starts, lengths = batch.addresses[index].tolist(), batch.lengths_bytes.tolist()
    return [(start, start + length) for start, length in zip(starts, lengths, strict=True)]


def cut_to(spans: list[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """The parts of `spans` within [first, last), empty ones included."""
    return ((max(start, first), min(end, last)) for start, end in spans)


def writes_of(spans: list[tuple[int, int]], value: bytes) -> tuple[Write, ...]:
    """Address and bytes of each buffer, the last one first."""
    writes, offset = [], 0
    for start, end in spans:
        writes.append((start, value[offset : offset + end - start]))
        offset += end - start
    return tuple(reversed(writes))


def carry_out(writes: Sequence[Write]) -> None:
    """Write the bytes, in this order."""
    for address, value in writes:
        ctypes.memmove(address, value, len(value))
