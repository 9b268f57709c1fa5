"""Random worlds of engines by hand that share a pool: requests, aborts, preemption, resets and a store that fails in every way.

A world is found again by its seed, the test's parameter; what threads do in between is not the seed's. Whatever happens, a
request that runs holds the right KV, and at the end nothing is left. `make soak` runs more of them.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from tests.connector.test_two_engines import Make, prompt_of
from vllm_mooncake_ascend.engines.base import KeyOutcome, KeyResult, StoreAnswer, StoreKey
from vllm_mooncake_ascend.planner.store_batch import StoreBatch

pytestmark = pytest.mark.engine

NUM_MOVES = 400
FAULTS = 0.15
"""Share of the store's calls that go wrong, or are late."""
LATE_S = 0.2
"""Bytes of an UNKNOWN call move within this, and the fence waits for it."""
END_S = 60.0
LENGTHS = (20, 32, 33, 64, 200, 256, 300, 500)
SEEDS = [pytest.param(seed, marks=[pytest.mark.soak] if seed >= 2 else []) for seed in range(30)]


class FaultyStore:
    """The store of one process, with faults."""

    def __init__(self, store: Any, seed: int) -> None:
        self._store = store
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._num_late = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        ends = (KeyOutcome.FAILED, KeyOutcome.MISSING, KeyOutcome.UNKNOWN, KeyOutcome.REFUSED)
        return self._run(ends, keys, lambda: self._store.get(keys, batch))

    def put(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        ends = (KeyOutcome.FAILED, KeyOutcome.FULL, KeyOutcome.UNKNOWN, KeyOutcome.REFUSED)
        return self._run(ends, keys, lambda: self._store.put(keys, batch))

    def exists(self, keys: Sequence[StoreKey]) -> StoreAnswer:
        return self._run((KeyOutcome.REFUSED,), keys, lambda: self._store.exists(keys))

    def fence(self) -> bool:
        with self._lock:
            is_quiet = self._num_late == 0
        return is_quiet and bool(self._store.fence())

    def _run(self, ends: Sequence[KeyOutcome], keys: Sequence[StoreKey], call: Callable[[], StoreAnswer]) -> StoreAnswer:
        with self._lock:
            kind = self._random.choice((*ends, None, "in part")) if self._random.random() < FAULTS else "well"
            late_s = self._random.uniform(0.0, LATE_S)
            num_good = self._random.randrange(len(keys)) if keys else 0
        if kind is None:
            time.sleep(late_s / 4)
        if kind == "in part":
            bad = KeyResult(outcome=ends[0], code=-1, reason="the test wants it so")
            return StoreAnswer(results=(*call().results[:num_good], *[bad] * (len(keys) - num_good)), is_lost=False)
        if not isinstance(kind, KeyOutcome):
            return call()
        if kind is KeyOutcome.UNKNOWN:
            self._move_later(call, late_s)
        result = KeyResult(outcome=kind, code=-1, reason="" if kind is KeyOutcome.MISSING else "the test wants it so")
        return StoreAnswer(results=(result,) * len(keys), is_lost=kind is KeyOutcome.REFUSED)

    def _move_later(self, call: Callable[[], StoreAnswer], late_s: float) -> None:
        def run() -> None:
            time.sleep(late_s)
            try:
                call()
            finally:
                with self._lock:
                    self._num_late -= 1

        with self._lock:
            self._num_late += 1
        threading.Thread(target=run, daemon=True).start()


class World:
    """Two engines and what happens to them."""

    def __init__(self, make_engine: Make, options: dict[str, Any], seed: int) -> None:
        self._random = random.Random(seed)
        pick = self._random.choice
        self._is_asynchronous = pick((True, False))
        chosen = {
            "asynchronous": self._is_asynchronous,
            "tensor_parallel": pick((1, 1, 2)),
            "lookup_wait_ms": pick((0, 5, 2000)),
            "load_wait_s": pick((0.05, 1.0, 5.0)),
            "max_saved_ratio": pick((0.1, 0.25, 0.9)),
            "save_decode": not self._is_asynchronous and pick((True, False)),
        }
        self.engines = [
            make_engine("kv_both", num_blocks=pick((24, 40, 64)), chunk=pick((64, 128, 512)), **{**options, **chosen})
            for _ in range(2)
        ]
        for engine in self.engines:
            self._spoil(engine)
        self._prompts = [prompt_of(max(LENGTHS), salt=seed * 10 + index) for index in range(8)]
        self._checked: set[tuple[int, str, int]] = set()

    def run(self) -> None:
        for _ in range(NUM_MOVES):
            engine = self._random.choice(self.engines)
            chance = self._random.random()
            if chance < 0.18 and len(engine.scheduler.requests) < 6:
                self._add(engine)
            elif chance < 0.22 and engine.scheduler.requests:
                engine.abort(self._random.choice(list(engine.scheduler.requests)))
            elif chance < 0.28:
                self._reset(engine)
            else:
                self._step(engine)
            self._check(engine)
        for engine in self.engines:
            self._end(engine)

    def _add(self, engine: Any) -> None:
        prompt = self._random.choice(self._prompts)[: self._random.choice(LENGTHS)]
        if self._random.random() < 0.3:
            prompt = prompt + prompt_of(50, salt=self._random.randrange(1_000_000))
        request_id = self._random.choice(("same", "again", None))
        # vLLM gives each request an id of its own; one comes again only when nothing of the former is under way.
        if request_id in engine.scheduler.requests or any(request_id in step.num_scheduled_tokens for step, *_ in engine.steps):
            request_id = None
        engine.finished.pop(request_id, None)
        self._checked = {one for one in self._checked if one[1] != request_id}
        engine.add(prompt, max_tokens=self._random.choice((1, 2, 30, 80)), request_id=request_id)

    def _reset(self, engine: Any) -> None:
        with contextlib.suppress(RuntimeError):  # vLLM's own: some blocks are in use
            engine.scheduler.reset_prefix_cache(
                reset_running_requests=self._random.random() < 0.5, reset_connector=self._random.random() < 0.03
            )
        self._checked.clear()

    def _step(self, engine: Any) -> None:
        for _ in range(self._random.choice((1, 1, 3, 10))):
            self._half_steps(engine, may_wait=self._random.random() < 0.5)

    def _half_steps(self, engine: Any, *, may_wait: bool) -> None:
        if not self._is_asynchronous:
            if engine.scheduler.has_requests():
                engine.step()
            return
        if len(engine.steps) < 2 and engine.scheduler.has_requests():
            engine.schedule()
            if may_wait:
                return
        if engine.steps:
            engine.finish()

    def _check(self, engine: Any) -> None:
        """What a running request has computed, or was given, is right; looked at once in each of its lives."""
        for request_id, request in engine.scheduler.requests.items():
            life = (id(engine), request_id, request.num_preemptions)
            if request.status.name == "RUNNING" and life not in self._checked:
                self._checked.add(life)
                num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
                assert engine.holds_kv(list(request.all_token_ids), engine.block_ids(request_id), num_tokens=num_tokens)

    def _end(self, engine: Any) -> None:
        """Let all requests end, and see that nothing is left."""
        deadline_s = time.monotonic() + END_S
        while engine.scheduler.has_requests() or engine.steps:
            self._half_steps(engine, may_wait=False)
            assert time.monotonic() < deadline_s, "some request, or save, has no end"
        side = engine.connector._scheduling
        machine = side._started.shell._machine
        assert engine.free_at_start == engine.num_free_blocks
        assert (0, 0, 0, 0) == (machine.num_requests, machine.num_pinned_blocks, machine.num_waiting, len(side._asked))
        assert (0, 0) == (len(side._started.progress), len(side._started.progress._snapshots))

    def _spoil(self, engine: Any) -> None:
        """Put faults between an engine and its stores."""
        shells = [engine.connector._scheduling._started.shell, *(worker._working._shell for worker in engine.workers)]
        for shell in shells:
            faulty = FaultyStore(shell._store, self._random.randrange(1_000_000))
            shell._store = shell._driver._store = faulty
            if hasattr(shell, "_lookups"):
                shell._lookups._store = faulty


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_goes_right(make_engine: Make, pool_master: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Goal: no wrong byte, no dead engine, no block lost. Method: random moves, faults and interleavings."""
    from tests.connector.conftest import pool_options
    from vllm_mooncake_ascend import limits

    world = World(make_engine, pool_options(pool_master, tenant=uuid.uuid4().hex), seed)
    monkeypatch.setattr(limits, "QUARANTINE_S", 5 * LATE_S)  # after they checked that theirs is long enough
    world.run()
