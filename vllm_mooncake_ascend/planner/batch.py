"""CopyBatch: byte runs to copy, as three parallel arrays. What planning ends in and engines execute."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class CopyBatch:
    """`n` descriptors; descriptor i copies `lengths_bytes[i]` bytes from remote_addresses[i] to local_addresses[i].

    All arrays: `[n] int64`. No length is 0 and no two target runs overlap.
    """

    local_addresses: Addresses
    remote_addresses: Addresses
    lengths_bytes: Addresses

    def __post_init__(self) -> None:
        assert len(self.local_addresses) == len(self.remote_addresses) == len(self.lengths_bytes)

    def __len__(self) -> int:
        return len(self.lengths_bytes)

    @property
    def num_bytes(self) -> int:
        """Sum of all lengths."""
        return int(self.lengths_bytes.sum())

    def part(self, start: int, end: int) -> CopyBatch:
        """Descriptors [start, end) as a batch of their own."""
        return CopyBatch(self.local_addresses[start:end], self.remote_addresses[start:end], self.lengths_bytes[start:end])
