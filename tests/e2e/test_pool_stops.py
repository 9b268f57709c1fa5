"""Loads that last long enough to be hit: their owner is stopped in the midst of one, or their client leaves.

User pain rows W10 to W13, W18, H7, H14. A model of 256 KiB of KV a token; the pool's memory belongs to a process of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pool import CONNECTOR, PoolEngines, pool_options
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, Running
from vllm_mooncake_ascend.testing.engine_prompts import SHORT_GOLDEN_LENGTHS, Prompt, Reference, random_prompt
from vllm_mooncake_ascend.testing.pool_master import PoolMaster
from vllm_mooncake_ascend.testing.pool_owner import PoolOwner

pytestmark = pytest.mark.engine

NUM_TOKENS = 420
"""13 whole blocks, 104 MiB: two store calls, each of some tens of milliseconds."""
NUM_BLOCKS = 13
LOAD_WAIT_S = 1.0
GIVEN_UP_S = 150.0
"""The store gives a get from a stopped owner up after 60 s; then it is fenced."""
LOOKUP_S = 0.3
"""A lookup takes milliseconds."""
GIVEN_UP = "pool_loads_total{reason=too_late}"
SEED = 20_261_129


class Stops:
    """An engine, the process that owns the pool's memory, and a plain engine."""

    def __init__(self, pool: PoolEngines, owner: PoolOwner) -> None:
        self.pool = pool
        self.owner = owner
        self.engine = pool.first

    def save(self, prompt: Prompt) -> None:
        """Have it in the pool, and nowhere else."""
        assert self.pool.expected(prompt) == self.pool.compute(self.engine, prompt).text
        self.pool.forget(self.engine)

    def start_stopped_load(self, prompt: Prompt) -> tuple[Running, frozenset[int]]:
        """A request whose load is under way and does not come, and the blocks it loads into. The owner is stopped."""
        self.engine.hold()
        running = self.engine.submit(prompt)
        time.sleep(LOOKUP_S)
        self.owner.stop()
        self.engine.release()
        return running, self.wait_blocks(running.request_id)

    def wait_blocks(self, request_id: str, *, other_than: frozenset[int] = frozenset()) -> frozenset[int]:
        """Blocks of a request, once it has some that it did not have."""

        def found() -> frozenset[int]:
            tables = self.engine.state().block_tables  # under vLLM's ids, which begin with ours
            return frozenset(block for name, table in tables.items() if name.startswith(request_id) for block in table)

        self.engine.wait_until(lambda: bool(found() - other_than), "its blocks")
        return found()


@pytest.fixture(scope="module")
def _stops(start_for_module: Callable[..., EngineProcess]) -> Iterator[Stops]:
    master = PoolMaster()
    owner = PoolOwner(master, segment_size="768MB")
    options = pool_options(master, segment_bytes=0, load_wait_s=LOAD_WAIT_S)
    size = {"num_gpu_blocks_override": 60, "max_model_len": 1024}
    plain = start_for_module("stops-plain", "tiny-fat", **size)
    engine = start_for_module("stops", "tiny-fat", "kv_both", connector=CONNECTOR, extra=options, **size)
    try:
        for started in (plain, engine):
            started.wait_ready()
        pool = PoolEngines([engine], Reference(plain), golden_lengths=SHORT_GOLDEN_LENGTHS)
        pool.warm_up()
        yield Stops(pool, owner)
    finally:
        owner.end()
        master.end()


@pytest.fixture
def stops(_stops: Stops) -> Iterator[Stops]:
    """Afterwards answers are right and nothing is left behind."""
    yield _stops
    assert {} == _stops.pool.remains()


def test_no_late_byte_of_a_stopped_owner_reaches_a_live_block(stops: Stops) -> None:
    """Goal: a load that was given up writes into its own blocks only, which nobody else has. Method: stop the owner before it
    has answered a get; when the request computes in other blocks, hold it, let the owner go on, and see the late bytes land in
    the old blocks and in no other. Then the answer is the right one, and so is that of a request that came meanwhile."""
    engine, prompt, other = stops.engine, random_prompt("stopped", NUM_TOKENS), random_prompt("beside", 60)
    stops.save(prompt)
    stops.pool.expected(other)
    stops.pool.take_count(engine, GIVEN_UP)
    running, loading = stops.start_stopped_load(prompt)
    beside = engine.submit(other)
    live = stops.wait_blocks(running.request_id, other_than=loading)
    engine.hold()
    num_tokens = len(running.answer.text.token_ids)

    late, quiet = sorted(loading - live), [block for block in range(1, engine.state().num_blocks + 1) if block not in loading]
    before = engine.digests(late), engine.digests(quiet)
    stops.owner.resume()
    engine.wait_until(lambda: engine.digests(late) != before[0], "late bytes")
    time.sleep(LOAD_WAIT_S)
    after = engine.digests(late), engine.digests(quiet)
    engine.release()
    texts = [running.result().text, beside.result().text]

    assert (frozenset(), True) == (loading & live, num_tokens < Sampling().max_tokens)
    assert before[1] == after[1]
    assert [stops.pool.expected(prompt), stops.pool.expected(other)] == texts
    assert 1 == stops.pool.take_count(engine, GIVEN_UP)


def test_a_client_may_leave_at_any_moment_of_a_load(stops: Stops) -> None:
    """Goal: an aborted load lets go of its blocks when its bytes have come, and the next request is right. Method: abort after
    random times, from before the lookup to after the first token; each time the same prompt is asked again."""
    source = random.Random(SEED)
    prompt = random_prompt("left", NUM_TOKENS)
    stops.save(prompt)
    for moment in range(12):
        running = stops.engine.submit(prompt, Sampling(max_tokens=4))
        time.sleep(source.uniform(0.0, 0.02 * moment))
        running.abort()
        stops.pool.settle(stops.engine)
        stops.pool.forget(stops.engine)

    again = stops.engine.submit(prompt).result()

    assert stops.pool.expected(prompt) == again.text
    assert NUM_BLOCKS * 32 == again.num_cached_tokens


@pytest.mark.soak
def test_no_byte_lands_after_the_fence_of_a_get_that_failed(stops: Stops) -> None:
    """Goal: when the store has given a get up, after a minute, its blocks go to others only when nothing can land in them any
    more. Method: the owner stays stopped until the quarantine is over; then all blocks are those of requests that are held;
    it goes on, and changes none of them."""
    engine, prompt = stops.engine, random_prompt("fenced", NUM_TOKENS)
    stops.save(prompt)
    fillers = [random_prompt(f"fenced filler {index}", 900) for index in range(2)]
    expected = [stops.pool.expected(filler) for filler in fillers]
    running, _ = stops.start_stopped_load(prompt)
    assert stops.pool.expected(prompt) == running.result().text

    stops.pool.settle(engine, timeout_s=GIVEN_UP_S)
    requests = [engine.submit(filler) for filler in fillers]
    for request in requests:
        request.wait_tokens(1)
    engine.hold()
    everything = range(1, engine.state().num_blocks + 1)
    before = engine.digests(everything)
    stops.owner.resume()
    time.sleep(10.0)
    after = engine.digests(everything)
    engine.release()

    assert before == after
    assert expected == [request.result().text for request in requests]
