"""From runs and pieces to descriptors, in numpy only: no Python per block.

First `join` finds out which pieces follow each other in memory on both sides and how many descriptors that makes, then
`Joined.batch` writes them down; between the two the planner compares the number with its budget. `split_calls` cuts a batch
into engine calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from vllm_mooncake_ascend.planner.batch import Addresses, CopyBatch
from vllm_mooncake_ascend.planner.bounds import CopyBounds
from vllm_mooncake_ascend.planner.pieces import Pieces
from vllm_mooncake_ascend.planner.template import Runs

EMPTY_BATCH = CopyBatch(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """Descriptors not yet written down: each of `runs` (all of one length) at each of `stretches`."""

    runs_local_addresses: Addresses
    runs_remote_addresses: Addresses
    stretches: CopyBatch
    """Offsets to add to a run's addresses, and the length of the pieces that follow each other from there."""

    def __len__(self) -> int:
        return len(self.runs_local_addresses) * len(self.stretches)

    def batch(self) -> CopyBatch:
        """Write the descriptors down, run by run."""
        num_runs = len(self.runs_local_addresses)
        return CopyBatch(
            (self.runs_local_addresses[:, None] + self.stretches.local_addresses[None, :]).ravel(),
            (self.runs_remote_addresses[:, None] + self.stretches.remote_addresses[None, :]).ravel(),
            np.tile(self.stretches.lengths_bytes, num_runs),
        )


def join(runs: Runs, pieces: Pieces, bounds: CopyBounds) -> list[Joined]:
    """Merge each run over pieces that are neighbours on both sides; one value per length of run."""
    strides = runs.strides
    local = pieces.local.offsets_bytes(strides.local_block_bytes, strides.local_slot_bytes)
    remote = pieces.remote.offsets_bytes(strides.remote_block_bytes, strides.remote_slot_bytes)
    local_steps, remote_steps = np.diff(local), np.diff(remote)
    joined = []
    for length_bytes in np.unique(runs.lengths_bytes):
        is_alike = runs.lengths_bytes == length_bytes
        meets = (local_steps == length_bytes) & (remote_steps == length_bytes)
        starts = np.flatnonzero(np.concatenate(([True], ~meets)))
        num_joined = np.diff(np.append(starts, len(local)))
        stretches = CopyBatch(local[starts], remote[starts], num_joined * length_bytes)
        joined.append(
            Joined(runs.local_addresses[is_alike], runs.remote_addresses[is_alike], chopped(stretches, bounds.max_merged_bytes))
        )
    return joined


def chopped(batch: CopyBatch, max_bytes: int) -> CopyBatch:
    """The same bytes with no descriptor longer than `max_bytes`."""
    assert max_bytes > 0
    if len(batch) == 0 or int(batch.lengths_bytes.max()) <= max_bytes:
        return batch
    num_parts = -(-batch.lengths_bytes // max_bytes)
    index = np.repeat(np.arange(len(batch)), num_parts)
    part_index = np.arange(len(index)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    done_bytes = part_index * max_bytes
    return CopyBatch(
        batch.local_addresses[index] + done_bytes,
        batch.remote_addresses[index] + done_bytes,
        np.minimum(batch.lengths_bytes[index] - done_bytes, max_bytes),
    )


def concatenated(batches: Iterable[CopyBatch]) -> CopyBatch:
    """All descriptors in one batch."""
    parts = [batch for batch in batches if len(batch)]
    if len(parts) < 2:
        return parts[0] if parts else EMPTY_BATCH
    return CopyBatch(
        np.concatenate([part.local_addresses for part in parts]),
        np.concatenate([part.remote_addresses for part in parts]),
        np.concatenate([part.lengths_bytes for part in parts]),
    )


def instantiate(templates: Sequence[Runs], pieces: Pieces, bounds: CopyBounds) -> CopyBatch:
    """Descriptors of all runs of all pieces."""
    return concatenated(joined.batch() for runs in templates for joined in join(runs, pieces, bounds))


def split_calls(batch: CopyBatch, bounds: CopyBounds) -> list[CopyBatch]:
    """Cut a batch into engine calls within the bounds; a descriptor that is too long for a call is cut as well."""
    batch = chopped(batch, bounds.max_call_bytes)
    ends_bytes = np.cumsum(batch.lengths_bytes)
    calls = []
    start, done_bytes = 0, 0
    while start < len(batch):
        end = int(ends_bytes.searchsorted(done_bytes + bounds.max_call_bytes, side="right"))
        end = min(end, start + bounds.max_call_descriptors)
        assert end > start, "each call takes at least one descriptor"
        calls.append(batch.part(start, end))
        start, done_bytes = end, int(ends_bytes[end - 1])
    return calls
