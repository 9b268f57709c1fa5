"""What `bench pool` measures: puts, gets of what lies here and of what lies in another process, lookups."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from vllm_mooncake_ascend.cli.bench import pool_source
from vllm_mooncake_ascend.cli.bench.pool_clients import CallFailed, OurClient, RawClient, seconds_of
from vllm_mooncake_ascend.cli.bench.pool_memory import SEALED, UNSEALED, PoolMemory, make_store
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.rounds import MIN_SAMPLE_S, Probe, wall_s_per_call
from vllm_mooncake_ascend.cli.bench.transfer_memory import STEP_BYTES
from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore

RAW, OURS, OURS_UNSEALED = "raw Mooncake", "ours", "ours, without seals"
APART, TOGETHER = "ours, reads_apart", "ours, reads_apart off"
SMALL_BYTES = 64
KEYS_PER_PUT = 1_024
MIB = 1 << 20
OWN = "own segment"


class Pool:
    """All clients of one run: four in this process, and another one's memory."""

    def __init__(self, master_address: str, num_blocks: int, seed: int, open_ends: contextlib.ExitStack) -> None:
        self.memory = PoolMemory(num_blocks, seed=seed)
        self._numbers = itertools.count()
        segment_bytes = 4 * num_blocks * STEP_BYTES + 128 * MIB
        make = functools.partial(OurClient, master_address, self.memory, segment_bytes=segment_bytes)
        self._together, self._apart = make(reads_apart=False), make()
        self._unsealed = make(is_sealed=False)
        self._raw = RawClient(master_address, self.memory, segment_bytes=segment_bytes)
        self._asker: KVStore = make_store(master_address, segment_bytes=0, is_sealed=False)
        self._asker.connect()
        for client in (self._together, self._apart, self._unsealed, self._raw, self._asker):
            open_ends.callback(client.close)
        self._together.put(_own(TOGETHER), num_blocks)
        self._apart.put(_own(APART), num_blocks)
        self._raw.prepared_put(_own(RAW), num_blocks)()

    @staticmethod
    @contextlib.contextmanager
    def running(master_address: str, num_blocks: int, seed: int) -> Iterator[Pool]:
        """For orders of up to `num_blocks` blocks."""
        with pool_source.running(master_address, num_blocks, seed), contextlib.ExitStack() as open_ends:
            yield Pool(master_address, num_blocks, seed, open_ends)

    # --- puts and gets ------------------------------------------------------------------------------------------------

    def puts(self, num_blocks: int) -> tuple[list[Probe], list[Comparison]]:
        """New blocks into one's own memory."""
        case = f"{num_blocks} MiB into the {OWN}"
        puts: dict[str, Callable[[str, int], float]] = {
            OURS: lambda family, count: seconds_of(lambda: self._apart.put(family, count)),
            OURS_UNSEALED: lambda family, count: seconds_of(lambda: self._unsealed.put(family, count)),
            RAW: lambda family, count: seconds_of(self._raw.prepared_put(family, count)),
        }
        probes = {
            who: Probe(measure=_rate("put", case, who), take=functools.partial(self._put_rate, put, num_blocks))
            for who, put in puts.items()
        }
        raw = probes[RAW].measure
        return list(probes.values()), [Comparison(above=probes[who].measure, below=raw) for who in (OURS, OURS_UNSEALED)]

    def gets(self, num_blocks: int) -> tuple[list[Probe], list[Comparison]]:
        """Of what lies in this process' memory, and of what lies in another's."""
        other = {kind: f"{pool_source.OTHER}, {kind}" for kind in (SEALED, UNSEALED)}
        ways: dict[tuple[str, str], Callable[[], None]] = {
            (OWN, TOGETHER): functools.partial(self._together.get, _own(TOGETHER), num_blocks),
            (OWN, APART): functools.partial(self._apart.get, _own(APART), num_blocks),
            (OWN, RAW): self._raw.prepared_get(_own(RAW), num_blocks),
            (pool_source.OTHER, OURS): functools.partial(self._apart.get, other[SEALED], num_blocks),
            (pool_source.OTHER, OURS_UNSEALED): functools.partial(self._unsealed.get, other[UNSEALED], num_blocks),
            (pool_source.OTHER, RAW): self._raw.prepared_get(other[UNSEALED], num_blocks),
        }
        probes = {place: self._get_probe(place, num_blocks, way) for place, way in ways.items()}
        comparisons = [
            Comparison(above=probes[where, who].measure, below=probes[where, RAW].measure) for where, who in ways if who != RAW
        ]
        comparisons.append(Comparison(above=probes[OWN, APART].measure, below=probes[OWN, TOGETHER].measure))
        return list(probes.values()), comparisons

    def _get_probe(self, place: tuple[str, str], num_blocks: int, way: Callable[[], None]) -> Probe:
        where, who = place
        self.memory.forget_got()
        way()
        if not self.memory.got_equals_put(num_blocks):
            raise CallFailed(f"wrong bytes: {who}, {where}")
        return Probe(
            measure=_rate("get", f"{num_blocks} MiB from {where}", who),
            take=lambda: num_blocks * STEP_BYTES / 1e9 / wall_s_per_call(way),
        )

    def _put_rate(self, put: Callable[[str, int], float], num_blocks: int) -> float:
        """GB/s, of as many puts as take long enough; what was put is removed while nobody looks at the clock."""
        seconds, num_puts = 0.0, 0
        while seconds < MIN_SAMPLE_S:
            family = f"put {next(self._numbers)}"
            seconds += put(family, num_blocks)
            num_puts += 1
            for call in self.memory.put_calls(family, num_blocks):
                self._apart.remove(call.keys)
        return num_puts * num_blocks * STEP_BYTES / 1e9 / seconds

    # --- lookups ------------------------------------------------------------------------------------------------------

    def lookups(self, nums_keys: Sequence[int]) -> tuple[list[Probe], list[Comparison]]:
        """How long the answer takes, for keys that are there."""
        keys = self._put_small_objects(max(nums_keys))
        probes: list[Probe] = []
        comparisons = []
        for num_keys in nums_keys:
            asked = keys[:num_keys]
            ways: dict[str, Callable[[], None]] = {
                OURS: functools.partial(self._ask, asked),
                RAW: functools.partial(self._raw.exists, asked),
            }
            of_case = {who: _latency_probe(f"{num_keys:,} keys", who, way) for who, way in ways.items()}
            probes += of_case.values()
            comparisons.append(Comparison(above=of_case[OURS].measure, below=of_case[RAW].measure))
        return probes, comparisons

    def _ask(self, keys: Sequence[str]) -> None:
        if set(self._asker.exists(keys).outcomes) != {KeyOutcome.DONE}:
            raise CallFailed("a lookup did not find every key")

    def _put_small_objects(self, num_keys: int) -> list[str]:
        """As long as our keys; all have the same few bytes."""
        keys = [f"{'c' * 32}/0/{'0' * 24}/{number:064x}" for number in range(num_keys)]
        address = self.memory.layout.regions[0].base_address
        for first in range(0, num_keys, KEYS_PER_PUT):
            part = keys[first : first + KEYS_PER_PUT]
            self._raw.put_small(part, ([[address]] * len(part), [[SMALL_BYTES]] * len(part)))
        return keys


def _own(who: str) -> str:
    return f"{OWN} of {who}"


def _rate(name: str, case: str, who: str) -> Measure:
    return Measure(name=name, case=case, subject=who, unit="GB/s", clock="wall")


def _latency_probe(case: str, who: str, way: Callable[[], None]) -> Probe:
    measure = Measure(name="lookup", case=case, subject=who, unit="ms", clock="wall")
    return Probe(measure=measure, take=lambda: 1e3 * wall_s_per_call(way))
