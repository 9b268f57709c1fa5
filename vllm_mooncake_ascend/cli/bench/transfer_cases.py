"""What `bench transfer` reads, by which ways, and whether the right bytes came."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from vllm_mooncake_ascend.cli.bench import transfer_memory, transfer_source
from vllm_mooncake_ascend.cli.bench.raw_engine import RawEngine, raw_calls
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.rounds import Probe, wall_s_per_call
from vllm_mooncake_ascend.cli.bench.samples import Goal
from vllm_mooncake_ascend.cli.bench.transfer_sides import OurReader, ReadFailed, SocketReader, copy
from vllm_mooncake_ascend.planner.batch import CopyBatch

OURS, RAW, MEMCPY, SOCKET = "ours", "raw Mooncake", "memcpy", "socket"
RATE_GOAL = Goal(limit=0.9, is_ceiling=False)
_MIB = 1 << 20


class Transfers:
    """A source process, and all ways to read from it."""

    def __init__(self, num_bytes: int, seed: int, serving: transfer_source.Serving, open_ends: contextlib.ExitStack) -> None:
        self._seed = seed
        self._serving = serving
        self._memory = transfer_memory.make_memory(num_bytes, seed=seed + 1)
        self._expected = transfer_memory.make_memory(num_bytes, seed=seed)
        """What the source has, here: what memcpy copies, and what all reads are compared with."""
        self._ours = OurReader(self._memory, serving)
        open_ends.callback(self._ours.close)
        self._raw = RawEngine([transfer_memory.region_of(self._memory)])
        self._socket = SocketReader(self._memory, serving)
        open_ends.callback(self._socket.close)

    @staticmethod
    @contextlib.contextmanager
    def running(max_bytes: int, seed: int) -> Iterator[Transfers]:
        """With memory for reads of up to `max_bytes` and a null block.

        Raises:
            PartnerFailed, ReadFailed, RawEngineFailed: there is nothing to measure.
        """
        num_bytes = max_bytes + transfer_memory.STEP_BYTES
        with transfer_source.running(num_bytes, seed) as serving, contextlib.ExitStack() as open_ends:
            yield Transfers(num_bytes, seed, serving, open_ends)

    def cases(self, num_bytes: int) -> list[Case]:
        """Reads of one size, of neighbouring blocks and of scattered ones."""
        return [self._case(num_bytes, is_fragmented=is_fragmented) for is_fragmented in (False, True)]

    def _case(self, num_bytes: int, *, is_fragmented: bool) -> Case:
        region = transfer_memory.region_of(self._memory)
        local, remote = (
            transfer_memory.block_ids(num_bytes, region, is_fragmented=is_fragmented, seed=self._seed + side)
            for side in range(2)
        )
        batches = self._ours.batches(self._ours.order(local, remote))
        shift_bytes = int(self._expected.ctypes.data) - self._serving.base_address
        ways: dict[str, Callable[[], None]] = {
            OURS: functools.partial(self._ours.read, local, remote),
            RAW: functools.partial(self._raw.read, self._serving.raw_session, raw_calls(batches)),
            MEMCPY: functools.partial(copy, batches, shift_bytes=shift_bytes),
        }
        if not is_fragmented:
            ways[SOCKET] = functools.partial(self._socket.read, num_bytes)
        num_runs = sum(len(batch) for batch in batches)
        name = f"{num_bytes // _MIB} MiB, {num_runs:,} {'scattered' if is_fragmented else 'merged'} runs"
        return Case(name, num_bytes, ways, lambda is_stream: self._compare(num_bytes, batches, is_stream=is_stream))

    def _compare(self, num_bytes: int, batches: Sequence[CopyBatch], *, is_stream: bool) -> bool:
        """Whether the right bytes are here, and makes them wrong again."""
        memory, expected = self._memory, self._expected
        if is_stream:
            is_right = np.array_equal(memory[:num_bytes], expected[:num_bytes])
        else:
            is_right = all(self._has_all(batch) for batch in batches)
        memory[:] = 0
        return bool(is_right)

    def _has_all(self, batch: CopyBatch) -> bool:
        local = (batch.local_addresses - self._memory.ctypes.data).tolist()
        remote = (batch.remote_addresses - self._serving.base_address).tolist()
        return all(
            np.array_equal(self._memory[here : here + length], self._expected[there : there + length])
            for here, there, length in zip(local, remote, batch.lengths_bytes.tolist(), strict=True)
        )


class Case:
    """One read, by all ways."""

    def __init__(
        self, name: str, num_bytes: int, ways: dict[str, Callable[[], None]], is_right: Callable[[bool], bool]
    ) -> None:
        self._ways = ways
        self._name = name
        self._is_right = is_right
        self.probes = [self._probe(subject, num_bytes, way) for subject, way in ways.items()]

    @property
    def comparison(self) -> Comparison:
        measures: dict[str, Measure] = {probe.measure.subject: probe.measure for probe in self.probes}
        return Comparison(above=measures[OURS], below=measures[RAW], goal=RATE_GOAL)

    def check(self) -> None:
        """Read once more by each way, and compare.

        Raises:
            ReadFailed: wrong bytes came.
        """
        self._is_right(False)  # makes them wrong first
        for subject, way in self._ways.items():
            way()
            if not self._is_right(subject == SOCKET):
                raise ReadFailed(f"wrong bytes: {self._name}, {subject}")

    def _probe(self, subject: str, num_bytes: int, way: Callable[[], None]) -> Probe:
        measure = Measure(name="read", case=self._name, subject=subject, unit="GB/s", clock="wall")
        return Probe(measure=measure, take=lambda: num_bytes / 1e9 / wall_s_per_call(way))
