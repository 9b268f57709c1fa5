"""A pool whose memory belongs to a process of its own: engines come and go, objects and owners go at the worst moment.

User case R13, and pain rows W18, W19, H7. The master's object leases are short, and the engines believe they are long, so that
what a lookup found may be gone when it is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from vllm_mooncake_ascend.testing.engine_pool import CONNECTOR, LOADS_DONE, PoolEngines, pool_options, results
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, Running, wait_all_ready
from vllm_mooncake_ascend.testing.engine_prompts import SHORT_GOLDEN_LENGTHS, Prompt, Reference, random_prompt
from vllm_mooncake_ascend.testing.pool_master import PoolMaster
from vllm_mooncake_ascend.testing.pool_owner import PoolOwner

pytestmark = pytest.mark.engine

OBJECT_LEASE_S = 1.0
CLIENT_TTL_S = 5.0
NUM_OBJECTS = 512
"""As many as fit into 32 MB, one of 64 KiB a block; other tests than that of a full pool need fewer."""
NUM_TOKENS = 500
LOOKUP_S = 0.3
"""A lookup of some prompts takes milliseconds."""
HITS = "pool_lookups_total{reason=hit}"
MISSING = "pool_loads_total{reason=missing}"
FAILED = "pool_loads_total{reason=failed}"
UNKNOWN = "pool_loads_total{reason=unknown}"
LEASE_OVER = "pool_store_errors_total{code=-707}"


class Owned:
    """Two engines that lend nothing, a process that lends all, and their master."""

    def __init__(self, pool: PoolEngines, owner: PoolOwner, master: PoolMaster) -> None:
        self.pool = pool
        self.owner = owner
        self.master = master

    def look_up(self, engine: EngineProcess, prompts: Sequence[Prompt]) -> dict[Prompt, Running]:
        """Give an engine requests that find their prompts in the pool, and hold it before it loads anything."""
        engine.hold()
        requests = {prompt: engine.submit(prompt) for prompt in prompts}
        time.sleep(LOOKUP_S)
        return requests

    def counts(self, engine: EngineProcess, *names: str) -> tuple[float, ...]:
        """What was added to counters since this was asked last."""
        return tuple(self.pool.take_count(engine, name) for name in names)


@pytest.fixture(scope="module")
def _owned(start_for_module: Callable[..., EngineProcess], reference: Reference) -> Iterator[Owned]:
    master = PoolMaster(object_lease_s=OBJECT_LEASE_S, client_ttl_s=CLIENT_TTL_S)
    owner = PoolOwner(master, segment_size="32MB")
    options: dict[str, Any] = pool_options(master, segment_bytes=0)
    engines = [
        start_for_module("owned-first", kv_role="kv_both", connector=CONNECTOR, extra=options),
        start_for_module(
            "owned-second", kv_role="kv_both", connector=CONNECTOR, extra={**options, "load_failure_policy": "fail"}
        ),
    ]
    try:
        wait_all_ready(engines)
        pool = PoolEngines(engines, reference, golden_lengths=SHORT_GOLDEN_LENGTHS)
        pool.warm_up()
        yield Owned(pool, owner, master)
    finally:
        owner.end()
        master.end()


@pytest.fixture
def owned(_owned: Owned) -> Iterator[Owned]:
    """Afterwards the owner is well, answers are right and nothing is left behind. A failed load fails its request on the
    second engine; the first one computes."""
    _owned.pool.revive()
    yield _owned
    assert {} == _owned.pool.remains()


def test_a_restarted_engine_loads_what_it_had_computed(owned: Owned) -> None:
    """Goal: what an engine computed outlives it where the memory is another process's. Method: kill it; start it again."""
    prompts = [random_prompt("restarted", length) for length in (65, 512, 1500)]
    before = [owned.pool.compute(owned.pool.first, prompt).text for prompt in prompts]
    owned.pool.first.kill()
    owned.pool.revive()

    answers = [owned.pool.first.submit(prompt).result() for prompt in prompts]

    assert before == [answer.text for answer in answers]
    assert [64, 512, 1472] == [answer.num_cached_tokens for answer in answers]


def test_what_goes_after_the_lookup_is_computed(owned: Owned) -> None:
    """Goal: a load that finds its objects gone costs one attempt and no wrong token. Method: four prompts are looked up, then
    everything is removed from the pool, then the engine may load. What it computed instead is right when it is asked again."""
    pool = owned.pool
    prompts = [random_prompt(f"gone {index}", NUM_TOKENS) for index in range(4)]
    for prompt in prompts:
        pool.compute(pool.second, prompt)
    owned.counts(pool.first, HITS, MISSING, LOADS_DONE)
    requests = owned.look_up(pool.first, prompts)
    assert owned.master.remove_everything() >= 4 * (NUM_TOKENS // 32)
    pool.first.release()

    assert {} == pool.wrong(results(requests))

    assert (4, 4, 0) == owned.counts(pool.first, HITS, MISSING, LOADS_DONE)
    assert {} == pool.wrong_answers(pool.first, prompts)


def test_loads_whose_object_lease_ends_fail_alone(owned: Owned) -> None:
    """Goal: bytes that came after the lease may be another object's, so they are never used: `recompute` computes, `fail`
    fails these requests and no other. Method: the owner is stopped while both engines get, for longer than the lease."""
    pool = owned.pool
    prompts = [random_prompt(f"lease {index}", NUM_TOKENS) for index in range(2)]
    for prompt in prompts:
        pool.compute(pool.first, prompt)
    for engine in pool.engines:
        pool.forget(engine)
        owned.counts(engine, HITS, FAILED, LOADS_DONE, LEASE_OVER)
    recomputed, failed = (owned.look_up(engine, prompts) for engine in pool.engines)
    owned.owner.stop()
    for engine, requests in zip(pool.engines, (recomputed, failed), strict=True):
        engine.release()
        engine.wait_until(lambda: len(engine.state().block_tables) == len(requests), "loads")  # noqa: B023
    time.sleep(OBJECT_LEASE_S + 0.5)
    owned.owner.resume()

    assert {} == pool.wrong(results(recomputed))
    assert ["error"] * 2 == [running.result().finish_reason for running in failed.values()]

    for engine in pool.engines:
        hits, num_failed, done, lease_over = owned.counts(engine, HITS, FAILED, LOADS_DONE, LEASE_OVER)
        assert (2, 2, 0) == (hits, num_failed, done)
        assert lease_over > 0
        assert {} == pool.wrong_answers(engine, prompts)


def test_an_owner_killed_after_the_lookup_costs_one_load_a_request(owned: Owned) -> None:
    """Goal: memory that died with its process is noticed by the load, which is tried once. Method: SIGKILL of the owner after
    the lookups. When it is back, with empty memory, prompts are saved and loaded as before."""
    pool = owned.pool
    prompts = [random_prompt(f"killed {index}", NUM_TOKENS) for index in range(4)]
    for prompt in prompts:
        pool.compute(pool.second, prompt)
    owned.counts(pool.first, HITS, UNKNOWN, LOADS_DONE)
    requests = owned.look_up(pool.first, prompts)
    owned.owner.kill()
    pool.first.release()

    assert {} == pool.wrong(results(requests))

    assert (4, 4, 0) == owned.counts(pool.first, HITS, UNKNOWN, LOADS_DONE)
    owned.owner.start()
    pool.first.wait_until(lambda: owned.master.num_segments() == 1, "the master to forget the dead owner")
    again = random_prompt("killed, again", NUM_TOKENS)
    pool.compute(pool.second, again)
    assert {} == pool.wrong_answers(pool.first, [*prompts, again])
    assert 1 == pool.take_count(pool.first, LOADS_DONE)


def test_a_pool_that_is_too_small_answers_right(owned: Owned) -> None:
    """Goal: a full store, and evictions at any moment, cost hits and nothing else. Method: twice as much KV as fits, each
    prompt twice on either engine, four new ones at once."""
    pool = owned.pool
    prompts = [random_prompt(f"too much {index}", 1024 + index) for index in range(2 * NUM_OBJECTS // 32)]

    for first in range(0, len(prompts), 4):
        batch = [*prompts[first : first + 4], *prompts[max(0, first - 4) : first]]
        requests = [{prompt: engine.submit(prompt) for prompt in batch} for engine in pool.engines]
        texts, answers = results(requests[0]), {prompt: running.result() for prompt, running in requests[1].items()}
        assert {} == pool.wrong(texts)
        assert {} == pool.wrong({prompt: answer.text for prompt, answer in answers.items() if answer.finish_reason != "error"})
