"""Pieces of process memory for tests: with an address, and with bytes that tell where they belong."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch

Bytes = npt.NDArray[np.uint8]

_WORD_BYTES = 8


def pattern(seed: int, num_bytes: int) -> Bytes:
    """`[num_bytes] uint8`: no 8-byte word equals another one of the same or another seed, and none is 0."""
    words = np.arange(1, num_bytes // _WORD_BYTES + 2, dtype=np.uint64) | np.uint64((seed + 1) << 40)
    return words.view(np.uint8)[:num_bytes].copy()


def address_of(array: Bytes) -> int:
    """Where the bytes of `array` (contiguous) start in this process."""
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def region_of(array: Bytes) -> Region:
    """The region to register for `array`."""
    return Region(base_address=address_of(array), length_bytes=array.nbytes)


def batch_of(runs: list[tuple[int, int, int]]) -> CopyBatch:
    """A batch from (local address, remote address, length in bytes) triples."""
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    return CopyBatch(local_addresses=table[:, 0].copy(), remote_addresses=table[:, 1].copy(), lengths_bytes=table[:, 2].copy())
