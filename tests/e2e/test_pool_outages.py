"""A pool whose master, or one of whose engines, goes and comes back: requests are answered as before, and hits come back.

User case R14, pain rows F9, F10, P1, and the issue's own: engines that reset for different reasons share nothing. The tests
share two engines that lend all memory of their pool; the last one leaves them apart for ever.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.testing.engine_answer import Text
from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pool import CONNECTOR, LOADED_TOKENS, LOADS_DONE, PoolEngines, pool_options
from vllm_mooncake_ascend.testing.engine_process import POLL_S, EngineProcess, Running, wait_all_ready
from vllm_mooncake_ascend.testing.engine_prompts import Prompt, Reference, random_prompt
from vllm_mooncake_ascend.testing.pool_master import PoolMaster

pytestmark = pytest.mark.engine

SEED = 20_261_129
OUTAGE_S = 15.0
SILENCE_S = 8.0
HITS_BACK_S = 30.0
CLIENT_TTL_S = 10.0
"""An engine that was killed is forgotten after this, with all it held."""
INTERVAL_S = 0.25
"""Between two requests."""
REPEATED = 0.6
"""Share of requests whose prompt one of the last ten had."""
NUM_TOKENS = 512
SAMPLING = Sampling(max_tokens=4)
BREAKER_LINE = "the pool's store does not answer"
ERROR_LINE = "keys failed"
"""What the store said, of each kind of call."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a load."""

    prompt: Prompt
    running: Running
    submitted_s: float


class Load:
    """Requests at a steady pace, to either engine in turn by chance; used by one thread."""

    def __init__(self, pool: PoolEngines, seed: str) -> None:
        self._pool = pool
        self._source = random.Random(f"{SEED} {seed}")
        self._seed = seed
        self._prompts: list[Prompt] = []
        self._open: list[Served] = []
        self.texts: list[tuple[Prompt, Text]] = []
        self.seconds: list[float] = []
        """From the submission to the end of each request that has ended."""

    def run(self, seconds: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Keep up the load for so long, or until it is so."""
        end_s = next_s = time.monotonic()
        end_s += seconds
        while time.monotonic() < end_s:
            if time.monotonic() >= next_s:
                next_s += INTERVAL_S
                self._submit()
                if until():
                    return True
            self._collect()
            time.sleep(POLL_S)
        return until()

    def finish(self) -> None:
        """Wait for what is still running."""
        for served in self._open:
            served.running.result()
        self._collect()

    def wrong(self) -> list[Prompt]:
        """Prompts with an answer that the plain engine does not give."""
        return [prompt for prompt, text in self.texts if text != self._pool.expected(prompt, SAMPLING)]

    def _submit(self) -> None:
        recent = self._prompts[-10:]
        if recent and self._source.random() < REPEATED:
            prompt = self._source.choice(recent)
        else:
            prompt = random_prompt(f"{self._seed} {len(self._prompts)}", NUM_TOKENS)
            self._prompts.append(prompt)
        engine = self._source.choice(self._pool.engines)
        self._open.append(Served(prompt=prompt, running=engine.submit(prompt, SAMPLING), submitted_s=time.monotonic()))

    def _collect(self) -> None:
        for engine in self._pool.engines:
            engine.take_arrived()
        for served in [served for served in self._open if served.running.is_finished]:
            self._open.remove(served)
            self.texts.append((served.prompt, served.running.answer.text))
            self.seconds.append(time.monotonic() - served.submitted_s)


class Outages:
    """Two engines that lend memory, and their master."""

    def __init__(self, pool: PoolEngines, master: PoolMaster) -> None:
        self.pool = pool
        self.master = master
        self.quiet_until_s = 0.0

    def loaded(self) -> list[float]:
        """Tokens that each engine has loaded from the pool, ever."""
        return [engine.metric(LOADED_TOKENS) for engine in self.pool.engines]

    def wait_out_silence(self) -> None:
        """Until a line about the store would be told again, whatever was told in an outage before."""
        time.sleep(max(0.0, self.quiet_until_s - time.monotonic()))

    def lines(self, words: str) -> list[int]:
        """How often each engine's log says this."""
        return [engine.log_path.read_text(errors="replace").count(words) for engine in self.pool.engines]


@pytest.fixture(scope="module")
def _outages(start_for_module: Callable[..., EngineProcess], reference: Reference) -> Iterator[Outages]:
    master = PoolMaster(client_ttl_s=CLIENT_TTL_S)
    options: dict[str, Any] = pool_options(master, segment_bytes="64MB")
    engines = [
        start_for_module(name, kv_role="kv_both", connector=CONNECTOR, extra=options) for name in ("outages-one", "outages-two")
    ]
    try:
        wait_all_ready(engines)
        pool = PoolEngines(engines, reference)
        pool.warm_up()
        yield Outages(pool, master)
    finally:
        master.end()


@pytest.fixture
def outages(_outages: Outages) -> Iterator[Outages]:
    """Afterwards answers are right and nothing is left behind."""
    _outages.pool.revive()
    yield _outages
    assert {} == _outages.pool.remains()


def _check_outage(outages: Outages, load: Load, *, begin: Callable[[], None], end: Callable[[], None], seconds: float) -> None:
    """Under load: before, during and after an outage."""
    outages.wait_out_silence()
    load.run(2.0)
    told, complained = outages.lines(BREAKER_LINE), outages.lines(ERROR_LINE)
    begin()
    load.run(seconds)
    end()
    before = outages.loaded()
    are_back = load.run(HITS_BACK_S, until=lambda: all(now > then for now, then in zip(outages.loaded(), before, strict=True)))
    load.finish()
    outages.quiet_until_s = time.monotonic() + limits.BREAKER_NOTE_S

    assert are_back, "hits did not come back"
    assert [] == load.wrong()
    # The scheduler's side and the worker's each say it once in BREAKER_NOTE_S; errors once for each kind of call.
    num_periods = 1 + (seconds + HITS_BACK_S) // limits.BREAKER_NOTE_S
    for before_lines, after_lines, num_tellers in (
        (told, outages.lines(BREAKER_LINE), 2),
        (complained, outages.lines(ERROR_LINE), 3),
    ):
        assert all(now - then <= num_tellers * num_periods for now, then in zip(after_lines, before_lines, strict=True))
    assert all(now > then for now, then in zip(outages.lines(BREAKER_LINE), told, strict=True))


def test_a_master_that_is_killed_and_comes_back_fails_no_request(outages: Outages) -> None:
    """Goal: an outage costs hits and nothing else, the operator is told and not flooded, and hits come back by themselves.

    Method: four requests a second, more than half of them repeated, on two engines; SIGKILL, and after a while a new master at
    the same address, which knows nothing.
    """
    load = Load(outages.pool, "killed")
    _check_outage(outages, load, begin=outages.master.kill, end=outages.master.start, seconds=OUTAGE_S)
    assert max(load.seconds) < 10.0


def test_a_master_that_falls_silent_and_goes_on_fails_no_request(outages: Outages) -> None:
    """Goal: a master that hangs is no worse than a dead one. Method: as above, with SIGSTOP and SIGCONT."""
    load = Load(outages.pool, "silent")
    _check_outage(outages, load, begin=outages.master.stop, end=outages.master.resume, seconds=SILENCE_S)
    assert max(load.seconds) < 10.0


def test_memory_of_an_engine_that_was_killed_costs_hits_only(outages: Outages) -> None:
    """Goal: what an engine's own memory held dies with it, and those who believe the master lose a moment each. Method: kill
    the engine that computed; the other one asks for it; the first one, started again, does so too."""
    pool = outages.pool
    prompts = [random_prompt(f"died {index}", 300) for index in range(3)]
    for prompt in prompts:
        pool.compute(pool.first, prompt)
    pool.take_count(pool.second, LOADS_DONE)
    pool.first.kill()

    wrong, num_loaded = pool.wrong_answers(pool.second, prompts), pool.take_count(pool.second, LOADS_DONE)
    pool.revive()

    assert ({}, 0, {}) == (wrong, num_loaded, pool.wrong_answers(pool.first, prompts))


def test_engines_that_reset_for_reasons_of_their_own_share_nothing(outages: Outages) -> None:
    """Goal: what old weights computed is never taken for what new ones would, nor one engine's new weights for another's.
    Method: both engines reset their caches with the connector's; prompts from before and after go to one, then to the other."""
    pool = outages.pool
    before, after = (random_prompt(f"reset {when}", 500) for when in ("before", "after"))
    pool.compute(pool.first, before)
    for engine in pool.engines:
        pool.settle(engine)
        assert engine.reset_cache(reset_connector=True)

    hits = [pool.compute(engine, prompt).num_cached_tokens for prompt in (before, after) for engine in pool.engines]
    pool.forget(pool.second)
    own = pool.second.submit(after).result().num_cached_tokens

    assert ([0, 0, 0, 0], 480) == (hits, own)
