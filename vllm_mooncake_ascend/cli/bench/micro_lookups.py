"""What a prompt's look into the pool costs vLLM's scheduler thread: its arrival, two questions, and its end.

The real shell and machine, its own threads, and a store that answers at once; what counts is the CPU time of the thread that
plays vLLM's scheduler, not how long the answer takes (`bench pool` measures that against a real store).
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterator, Sequence

from vllm_mooncake_ascend.cli.bench.report import Measure
from vllm_mooncake_ascend.cli.bench.rounds import MIN_SAMPLE_S, Probe
from vllm_mooncake_ascend.engines.base import KeyOutcome, KeyResult, StoreAnswer, StoreHealth, StoreKey
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.layout.plane import GroupLayout, Region
from vllm_mooncake_ascend.planner.pool_keys import Shard
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.pool import events
from vllm_mooncake_ascend.pool.settings import PoolSettings
from vllm_mooncake_ascend.runtime.pool_scheduler import PoolSchedulerShell
from vllm_mooncake_ascend.types import RequestId

BLOCK_TOKENS = 128
ANSWER_S = 30.0
_THERE = KeyResult(outcome=KeyOutcome.DONE, code=0, reason="")
_REFUSED = KeyResult(outcome=KeyOutcome.REFUSED, code=0, reason="this store only answers lookups")


@contextlib.contextmanager
def lookup_probes(nums_blocks: Sequence[int]) -> Iterator[list[Probe]]:
    """One probe for each length of prompt, of whose blocks all are in the pool."""
    group = GroupLayout(tokens_per_block=BLOCK_TOKENS, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
    news = threading.Event()
    shell = PoolSchedulerShell(
        settings=PoolSettings(
            namespace="0" * 32,
            groups=(group,),
            hash_tokens=BLOCK_TOKENS,
            num_ranks=1,
            can_report_unknown_at_once=True,
            max_saved_blocks=1024,
            lookup_wait_s=ANSWER_S,
        ),
        shards=(Shard(group_index=0, name="0" * 24, ranks=(0,)),),
        store=FullStore(),
        is_strict=True,
        wake=news.set,
    )
    shell.start()
    try:
        asker = _Asker(shell, news)
        yield [_probe(asker, num_blocks) for num_blocks in nums_blocks]
    finally:
        shell.close()


def _probe(asker: _Asker, num_blocks: int) -> Probe:
    hashes = [hashlib.sha256(index.to_bytes(4, "little")).digest() for index in range(num_blocks)]

    def take() -> float:
        started_s = time.monotonic()
        seconds, num_calls = 0.0, 0
        while num_calls == 0 or time.monotonic() - started_s < MIN_SAMPLE_S:
            seconds += asker.cpu_seconds(hashes)
            num_calls += 1
        return 1e6 * seconds / num_calls

    measure = Measure(
        name="look into the pool, scheduler thread", case=f"{num_blocks:,} blocks", subject="ours", unit="us", clock="cpu"
    )
    return Probe(measure=measure, take=take)


class _Asker:
    """Plays vLLM's scheduler thread."""

    def __init__(self, shell: PoolSchedulerShell, news: threading.Event) -> None:
        self._shell = shell
        self._news = news
        self._num_requests = 0

    def cpu_seconds(self, hashes: Sequence[bytes]) -> float:
        """CPU of this thread for all calls of one request; waiting for the answer does not count.

        Raises:
            LocalProtocolError: the answer did not come, or is wrong: then the time means nothing.
        """
        self._num_requests += 1
        request_id = RequestId(f"r{self._num_requests}")
        self._news.clear()
        before_s = time.thread_time()
        self._shell.feed(
            events.RequestArrived(
                request_id=request_id,
                hashes=hashes,
                num_prompt_tokens=len(hashes) * BLOCK_TOKENS + 1,
                num_local_tokens=0,
                may_load=True,
                may_save=True,
            )
        )
        found = self._shell.hit_tokens(request_id, 0)
        seconds = time.thread_time() - before_s
        while found is None and self._news.wait(ANSWER_S):
            self._news.clear()
            before_s = time.thread_time()
            found = self._shell.hit_tokens(request_id, 0)
            seconds += time.thread_time() - before_s
        if found != len(hashes) * BLOCK_TOKENS:
            raise LocalProtocolError(f"a lookup of {len(hashes)} blocks found {found} tokens")
        before_s = time.thread_time()
        self._shell.feed(events.RequestEnded(request_id=request_id))
        self._shell.drain()
        return seconds + time.thread_time() - before_s


class FullStore:
    """A store (`engines.base.KVStore`) in which every key is, and which takes and gives none."""

    def connect(self) -> None:
        pass

    def register(self, regions: Sequence[Region]) -> None:
        pass

    def put(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:  # noqa: ARG002
        return StoreAnswer(results=(_REFUSED,) * len(keys), is_lost=False)

    def get(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:  # noqa: ARG002
        return StoreAnswer(results=(_REFUSED,) * len(keys), is_lost=False)

    def exists(self, keys: Sequence[StoreKey]) -> StoreAnswer:
        return StoreAnswer(results=(_THERE,) * len(keys), is_lost=False)

    def remove(self, keys: Sequence[StoreKey], *, prefix: str, even_in_use: bool = False) -> StoreAnswer:  # noqa: ARG002
        return StoreAnswer(results=(_REFUSED,) * len(keys), is_lost=False)

    def health(self) -> StoreHealth:
        return StoreHealth.CONNECTED

    def fence(self) -> bool:
        return True

    def close(self) -> bool:
        return True
