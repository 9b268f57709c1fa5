"""The loads of `bench scale`: one size of one series each, as something that can be served again and again.

prompts       one request at a time, between the same two engines
at once       so many requests, each stage of all of them before the next
remembered    one request at a time, where prefill still remembers so many that ended
engines       one request at a time, between engines that have met: one decode engine and many prefill engines, one
              prefill engine and many decode engines, or half of each, where every decode engine has met a few; beside
                  them two engines with emptied caches, for what it costs that many engines share one core's here
first         the first request between two engines, with its handshake; one decode engine meets all others
renewals      so many requests wait; their leases are renewed once
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.cli.bench.rounds import cpu_s_per_call
from vllm_mooncake_ascend.cli.bench.scale_fleet import Decode, Fleet, Prefill, Prompt

AT_END, STREAM = "after_prefill", "stream"
REQUEST_S = 1.0
"""Between two requests: memories of ended ones stay short."""
FLEET_REQUEST_S = 1e-3
MET = 8
"""Prefill engines that each decode engine of a mesh has met."""
NUM_RENEWALS = 4
NUM_COLD = 16
_CACHE_FILL = np.zeros(16 << 20, dtype=np.uint8)
"""More than the caches that belong to one core."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the engines and prompts of all loads."""

    chunk_tokens: int
    """Of one step of a prefill."""
    num_layers: int
    """Of a layout in a handshake."""
    base_tokens: int
    """Of a prompt where its length is not what grows."""
    block_tokens: int
    """Of a block, where that is not what differs."""
    sample_s: float
    """A sample of many requests takes so long at least."""


class Load:
    """One size of one series. `take` is a sample: microseconds of CPU for one request."""

    def __init__(
        self, sizes: Sizes, fleet: Fleet, subject: str, *, size: int, case: str, num_requests: int, serve: Callable[[], None]
    ) -> None:
        self.sample_s = sizes.sample_s
        self.fleet = fleet
        self.subject = subject
        self.size = size
        self.case = case
        self.num_requests = num_requests
        """In one call of `serve`."""
        self.serve = serve

    def take(self) -> float:
        return 1e6 * cpu_s_per_call(self.serve, min_s=self.sample_s) / self.num_requests

    def renew_state(self) -> None:
        """Bring it into the state that a sample finds: it is in it, and serving leaves it there."""


def prompt_loads(sizes: Sizes, nums_tokens: Sequence[int], nums_block_tokens: Sequence[int]) -> list[Load]:
    """Longer prompts, in both modes and in blocks of several sizes."""
    loads = []
    for mode, block_tokens, num_tokens in itertools.product((AT_END, STREAM), nums_block_tokens, nums_tokens):
        fleet = _fleet(sizes, mode, block_tokens=block_tokens)
        prompt = Prompt.made(num_tokens, block_tokens=block_tokens, chunk_tokens=sizes.chunk_tokens)
        serve = _one_by_one(fleet, [(fleet.prefills[0], fleet.decodes[0], prompt)], pace_s=REQUEST_S)
        subject = f"{mode}, blocks of {block_tokens}"
        loads.append(Load(sizes, fleet, subject, size=num_tokens, case=f"{num_tokens:,} tokens", num_requests=1, serve=serve))
    return loads


def at_once_loads(sizes: Sizes, nums_at_once: Sequence[int]) -> list[Load]:
    """More requests at the same time between the same two engines."""
    loads = []
    for mode, num in itertools.product((AT_END, STREAM), nums_at_once):
        fleet = _fleet(sizes, mode)
        pairs = _jobs(fleet, sizes, num)
        loads.append(
            Load(sizes, fleet, mode, size=num, case=f"{num:,} at once", num_requests=num, serve=_all_at_once(fleet, pairs))
        )
    return loads


def remembered_loads(sizes: Sizes, nums_remembered: Sequence[int]) -> list[Load]:
    """More requests that have ended a while ago: their number is steady, one is forgotten for each that comes."""
    loads = []
    for mode, num in itertools.product((AT_END, STREAM), nums_remembered):
        fleet = _fleet(sizes, mode)
        serve = _one_by_one(fleet, _jobs(fleet, sizes, 1), pace_s=limits.VERDICT_MEMORY_S / num)
        for _ in range(num):
            serve()
        loads.append(Load(sizes, fleet, mode, size=num, case=f"{num:,} remembered", num_requests=1, serve=serve))
    return loads


class ColdLoad(Load):
    """The work of another load, each request with nothing of it in the core's own caches: what a request costs where the state
    of its engines was not touched for long."""

    def take(self) -> float:
        """Of a few requests."""
        cpu_s = 0.0
        for _ in range(NUM_COLD):
            _CACHE_FILL[:] += 1
            started_s = time.thread_time()
            self.serve()
            cpu_s += time.thread_time() - started_s
        return 1e6 * cpu_s / NUM_COLD


def engine_loads(sizes: Sizes, nums_engines: Sequence[int]) -> list[Load]:
    """More engines that have met, in three shapes."""
    loads = []
    for mode, num in itertools.product((AT_END, STREAM), nums_engines):
        shapes = {"one decode": (num - 1, 1), "one prefill": (1, num - 1), "half of each": (num // 2, num - num // 2)}
        for shape, (num_prefills, num_decodes) in shapes.items():
            fleet = _fleet(sizes, mode, num_prefills=num_prefills, num_decodes=num_decodes)
            pairs = _mesh(fleet, sizes)
            serve = _one_by_one(fleet, pairs, pace_s=FLEET_REQUEST_S)
            for _ in pairs:
                serve()
            loads.append(Load(sizes, fleet, f"{mode}, {shape}", size=num, case=f"{num:,} engines", num_requests=1, serve=serve))
    return loads + [_cold_load(sizes, mode) for mode in (AT_END, STREAM)]


def _cold_load(sizes: Sizes, mode: str) -> Load:
    fleet = _fleet(sizes, mode)
    serve = _one_by_one(fleet, _jobs(fleet, sizes, 1), pace_s=FLEET_REQUEST_S)
    serve()
    return ColdLoad(sizes, fleet, f"{mode}, caches emptied", size=2, case="2 engines", num_requests=1, serve=serve)


class FirstLoad(Load):
    """Every sample has engines of its own, because nobody meets twice."""

    def __init__(self, sizes: Sizes, num_engines: int) -> None:
        self._sizes = sizes
        self._num_prefills = num_engines - 1
        fleet = self._strangers()
        case = f"{num_engines:,} engines"
        super().__init__(sizes, fleet, AT_END, size=num_engines, case=case, num_requests=self._num_prefills, serve=self._meet)

    def take(self) -> float:
        """Until there are a few dozen meetings."""
        num_met, cpu_s = 0, 0.0
        while num_met < 32:
            self.renew_state()
            started_s = time.thread_time()
            self._meet()
            cpu_s += time.thread_time() - started_s
            num_met += self._num_prefills
        return 1e6 * cpu_s / num_met

    def renew_state(self) -> None:
        """Nobody has met."""
        self.fleet = self._strangers()

    def _meet(self) -> None:
        prompt = Prompt.made(
            self._sizes.base_tokens, block_tokens=self._sizes.block_tokens, chunk_tokens=self._sizes.chunk_tokens
        )
        for prefill in self.fleet.prefills:
            self.fleet.now += FLEET_REQUEST_S
            self.fleet.serve([(prefill, self.fleet.decodes[0], prompt)])

    def _strangers(self) -> Fleet:
        return _fleet(self._sizes, AT_END, num_prefills=self._num_prefills)


def first_loads(sizes: Sizes, nums_engines: Sequence[int]) -> list[Load]:
    """More engines that have not met. The mode makes no difference to a handshake."""
    return [FirstLoad(sizes, num) for num in nums_engines]


class RenewalLoad(Load):
    """So many requests wait: for the end of their prefill where decode streams, for blocks where it has ended. One "request" of
    it is one of them renewed once; every sample has requests of its own, because they do not wait for ever."""

    def __init__(self, sizes: Sizes, mode: str, num_waiting: int) -> None:
        self._sizes = sizes
        self._mode = mode
        fleet = self._waiting(num_waiting)
        case = f"{num_waiting:,} waiting"
        super().__init__(
            sizes, fleet, mode, size=num_waiting, case=case, num_requests=NUM_RENEWALS * num_waiting, serve=self._renew
        )

    def take(self) -> float:
        cpu_s, num_renewed = 0.0, 0
        while num_renewed < 64:
            self.renew_state()
            started_s = time.thread_time()
            self._renew()
            cpu_s += time.thread_time() - started_s
            num_renewed += self.num_requests
        return 1e6 * cpu_s / num_renewed

    def renew_state(self) -> None:
        """They have begun to wait."""
        self.fleet = self._waiting(self.size)

    def _renew(self) -> None:
        for _ in range(NUM_RENEWALS):
            self.fleet.wait(limits.LEASE_TTL_S / limits.RENEWALS_PER_TTL, self.fleet.decodes)

    def _waiting(self, num: int) -> Fleet:
        fleet = _fleet(self._sizes, self._mode)
        jobs = fleet.begin(_jobs(fleet, self._sizes, num))
        if self._mode == AT_END:
            fleet.finish_prefills(jobs)
        return fleet


def renewal_loads(sizes: Sizes, nums_waiting: Sequence[int]) -> list[Load]:
    """More requests that wait."""
    return [RenewalLoad(sizes, mode, num) for mode, num in itertools.product((AT_END, STREAM), nums_waiting)]


# --- what they are made of ------------------------------------------------------------------------------------------------

_Pair = tuple[Prefill, Decode, Prompt]


def _fleet(sizes: Sizes, mode: str, *, block_tokens: int | None = None, num_prefills: int = 1, num_decodes: int = 1) -> Fleet:
    return Fleet(
        num_prefills=num_prefills,
        num_decodes=num_decodes,
        streams=mode == STREAM,
        block_tokens=block_tokens or sizes.block_tokens,
        num_layers=sizes.num_layers,
    )


def _jobs(fleet: Fleet, sizes: Sizes, num: int) -> list[_Pair]:
    """Between the first two engines, each in blocks of its own."""
    num_blocks = -(-sizes.base_tokens // sizes.block_tokens)
    return [(fleet.prefills[0], fleet.decodes[0], _prompt(sizes, first_block=1 + number * num_blocks)) for number in range(num)]


def _prompt(sizes: Sizes, *, first_block: int = 1) -> Prompt:
    return Prompt.made(
        sizes.base_tokens, block_tokens=sizes.block_tokens, chunk_tokens=sizes.chunk_tokens, first_block=first_block
    )


def _mesh(fleet: Fleet, sizes: Sizes) -> list[_Pair]:
    """Each decode engine with the next few prefill engines, or with all of them if it is the only one."""
    prompt, num_prefills = _prompt(sizes), len(fleet.prefills)
    num_met = num_prefills if len(fleet.decodes) == 1 else min(MET, num_prefills)
    return [
        (fleet.prefills[(number + step) % num_prefills], decode, prompt)
        for step in range(num_met)
        for number, decode in enumerate(fleet.decodes)
    ]


def _one_by_one(fleet: Fleet, pairs: Sequence[_Pair], *, pace_s: float) -> Callable[[], None]:
    turns: Iterator[_Pair] = itertools.cycle(pairs)

    def serve() -> None:
        fleet.now += pace_s
        fleet.serve([next(turns)])

    return serve


def _all_at_once(fleet: Fleet, pairs: Sequence[_Pair]) -> Callable[[], None]:
    def serve() -> None:
        fleet.now += REQUEST_S
        fleet.serve(pairs)

    return serve
