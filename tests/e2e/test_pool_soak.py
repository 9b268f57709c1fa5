"""Rounds of random faults of a pool at random moments, run by `make soak`. A round is found again by its seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pool import CONNECTOR, PoolEngines, pool_options
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, Running, wait_all_ready
from vllm_mooncake_ascend.testing.engine_prompts import Prompt, Reference, random_prompt
from vllm_mooncake_ascend.testing.pool_master import PoolMaster
from vllm_mooncake_ascend.testing.pool_owner import PoolOwner

pytestmark = [pytest.mark.engine, pytest.mark.soak]

FIRST_SEED = 20_261_130
NUM_ROUNDS = 20
NUM_PROMPTS = 4
LONGEST_PROMPT = 2_000
LONGEST_DELAY_S = 1.0
CLIENT_TTL_S = 5.0
LET_GO_S = 130.0
"""Blocks of a put of unknown outcome stay out of use for a minute and a half."""
SAMPLING = Sampling(max_tokens=24)
Requests = list[tuple[EngineProcess, Prompt, Running]]


class Soaked:
    """An engine that lends memory, one that lends none, a process that lends some, and their master."""

    def __init__(self, pool: PoolEngines, owner: PoolOwner, master: PoolMaster) -> None:
        self.pool = pool
        self.owner = owner
        self.master = master


Fault = Callable[[Soaked, random.Random, Requests], None]


def _kill_an_engine(soaked: Soaked, source: random.Random, requests: Requests) -> None:
    victim = source.choice(soaked.pool.engines)
    victim.kill()
    requests[:] = [request for request in requests if request[0] is not victim]


def _kill_the_owner(soaked: Soaked, source: random.Random, _requests: Requests) -> None:
    soaked.owner.kill()
    time.sleep(source.choice((0.0, 1.0, CLIENT_TTL_S + 2.0)))
    soaked.owner.start()


def _stop_the_owner(soaked: Soaked, source: random.Random, _requests: Requests) -> None:
    soaked.owner.stop()
    time.sleep(source.choice((0.1, 1.0, 4.0, 15.0)))
    soaked.owner.resume()


def _kill_the_master(soaked: Soaked, source: random.Random, _requests: Requests) -> None:
    soaked.master.kill()
    time.sleep(source.choice((0.0, 1.0, 6.0)))
    soaked.master.start()


def _stop_the_master(soaked: Soaked, source: random.Random, _requests: Requests) -> None:
    soaked.master.stop()
    time.sleep(source.choice((0.1, 1.0, 6.0)))
    soaked.master.resume()


def _freeze_an_engine(soaked: Soaked, source: random.Random, _requests: Requests) -> None:
    victim = source.choice(soaked.pool.engines)
    victim.freeze()
    time.sleep(source.choice((0.1, 1.0, 4.0)))
    victim.thaw()


def _leave(_soaked: Soaked, source: random.Random, requests: Requests) -> None:
    for request in source.sample(requests, source.randint(1, len(requests))):
        request[2].abort()
        requests.remove(request)


def _remove_everything(soaked: Soaked, _source: random.Random, _requests: Requests) -> None:
    soaked.master.remove_everything()


FAULTS: tuple[Fault, ...] = (
    _kill_an_engine,
    _kill_the_owner,
    _stop_the_owner,
    _kill_the_master,
    _stop_the_master,
    _freeze_an_engine,
    _leave,
    _remove_everything,
)


@pytest.fixture(scope="module")
def _soaked(start_for_module: Callable[..., EngineProcess], reference: Reference) -> Iterator[Soaked]:
    master = PoolMaster(client_ttl_s=CLIENT_TTL_S)
    owner = PoolOwner(master, segment_size="64MB")
    engines = [
        start_for_module(
            f"soaked-{segment}", kv_role="kv_both", connector=CONNECTOR, extra=pool_options(master, segment_bytes=segment)
        )
        for segment in ("64MB", "0MB")
    ]
    try:
        wait_all_ready(engines)
        pool = PoolEngines(engines, reference)
        pool.warm_up()
        yield Soaked(pool, owner, master)
    finally:
        owner.end()
        master.end()


@pytest.fixture
def soaked(_soaked: Soaked) -> Iterator[Soaked]:
    """Afterwards answers are right and nothing is left behind."""
    _soaked.pool.revive()
    yield _soaked
    alive = [engine for engine in _soaked.pool.engines if engine.is_alive]
    num_segments = 1 + sum(engine is _soaked.pool.first for engine in alive)
    for engine in alive:
        engine.wait_until(lambda: _soaked.master.num_segments() == num_segments, "the master to know who is alive")
        _soaked.pool.settle(engine, timeout_s=LET_GO_S)
    assert {} == _soaked.pool.remains()


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_ROUNDS))
def test_a_fault_of_the_pool_at_a_random_moment_leaves_right_answers_and_nothing_else(soaked: Soaked, seed: int) -> None:
    """Goal: no moment of any fault gives a wrong token or leaves anything behind. Method: some prompts are in the pool already,
    others are not; either engine is given all of them, then comes a random fault; every answer that comes must be right."""
    source = random.Random(seed)
    pool, fault = soaked.pool, source.choice(FAULTS)
    prompts = [random_prompt(f"soak {seed} {index}", source.randint(30, LONGEST_PROMPT)) for index in range(NUM_PROMPTS)]
    for prompt in prompts[: source.randint(0, NUM_PROMPTS)]:
        source.choice(pool.engines).submit(prompt).result()
    for engine in pool.engines:
        pool.settle(engine, timeout_s=LET_GO_S)
        pool.forget(engine)
    requests = [(engine, prompt, engine.submit(prompt, SAMPLING)) for prompt in prompts for engine in pool.engines]

    time.sleep(source.uniform(0.0, LONGEST_DELAY_S))
    fault(soaked, source, requests)
    answers = [(prompt, running.result().text) for _, prompt, running in requests]

    assert [] == [len(prompt) for prompt, text in answers if text != pool.expected(prompt, SAMPLING)]
