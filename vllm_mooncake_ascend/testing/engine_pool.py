"""PoolEngines: engines that share a prefix pool, and the plain engine whose answers theirs must equal.

What one engine has computed is in the pool when `compute` returns. `forget` empties an engine's own cache, so that its next
request of a prompt loads again. Like `EnginePair` it knows how the engines must look when nothing is going on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_mooncake_ascend.testing import engine_messages as messages
from vllm_mooncake_ascend.testing.engine_answer import Answer, Text
from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_process import REQUEST_TIMEOUT_S, EngineProcess, Running
from vllm_mooncake_ascend.testing.engine_prompts import GOLDEN_LENGTHS, Prompt, Reference, golden_prompts
from vllm_mooncake_ascend.testing.engine_rest import NUM_LANES, SETTLE_POLL_S, SETTLE_TIMEOUT_S, AtRest
from vllm_mooncake_ascend.testing.pool_master import PoolMaster

CONNECTOR = "MooncakeStoreConnectorV1"
LOOKUP_WAIT_MS = 2_000
"""A busy host must not turn a hit into a miss where a test counts hits. Of late lookups the machines' tests tell."""
SEGMENT = "256MB"
NUM_SPARE_SOCKETS = 3 * NUM_LANES
"""An engine that lends memory reads from it over connections whose both ends it has, and another engine reads from it."""
NUM_SPARE_THREADS = 2
"""Each of an engine's two clients starts one at its first contact with the memory of another process."""
LOADED_TOKENS = "pool_loaded_tokens_total"
LOADS_DONE = "pool_loads_total{reason=done}"
PUT_BYTES = "pool_put_bytes_total"


def pool_options(master: PoolMaster, **more: object) -> dict[str, Any]:
    """`kv_connector_extra_config` of an engine that shares through this master."""
    return {"master_address": master.address, "segment_bytes": SEGMENT, "lookup_wait_ms": LOOKUP_WAIT_MS, **more}


class PoolEngines:
    """Some engines of one pool; used by one thread."""

    def __init__(
        self,
        engines: Sequence[EngineProcess],
        reference: Reference,
        *,
        golden_lengths: tuple[int, ...] = GOLDEN_LENGTHS,
    ) -> None:
        self.engines = tuple(engines)
        self.reference = reference
        self._golden_lengths = golden_lengths
        self._num_checks = 0
        self._rest = AtRest(num_spare_sockets=NUM_SPARE_SOCKETS, num_spare_threads=NUM_SPARE_THREADS)
        self._counts: dict[tuple[str, str], float] = {}

    @property
    def first(self) -> EngineProcess:
        return self.engines[0]

    @property
    def second(self) -> EngineProcess:
        return self.engines[1]

    # --- requests -------------------------------------------------------------------------------------------------

    def compute(self, engine: EngineProcess, prompt: Prompt, sampling: Sampling | None = None, **options: str) -> Answer:
        """Have an engine answer, and wait until what it saves is in the pool."""
        answer = engine.submit(prompt, sampling, **options).result()
        self.drain(engine)
        return answer

    def drain(self, engine: EngineProcess) -> None:
        """Wait until an engine without requests holds no block for the pool."""
        engine.wait_until(lambda: not engine.state().held_block_ids, "its saves")

    def settle(self, engine: EngineProcess, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until an engine holds no block at all. An idle one hears of nothing, so give it small requests."""
        deadline_s = time.monotonic() + timeout_s
        while engine.state().held_block_ids:
            assert time.monotonic() < deadline_s, f"{engine.spec.name} still holds blocks: {engine.state().held_block_ids}"
            self._rest.flush(engine)
            time.sleep(SETTLE_POLL_S)

    def forget(self, engine: EngineProcess) -> None:
        """Empty an idle engine's own cache, and nothing else."""
        self.drain(engine)
        assert engine.reset_cache(), "the engine is not idle"

    def expected(self, prompt: Prompt, sampling: Sampling | None = None) -> Text:
        """What a plain engine answers."""
        return self.reference.text(prompt, sampling or Sampling())

    def wrong_answers(self, engine: EngineProcess, prompts: Iterable[Prompt]) -> dict[int, Text]:
        """Give an engine prompts one after the other; by length the answers that the plain engine does not give."""
        texts = {prompt: engine.submit(prompt).result().text for prompt in prompts}
        return self.wrong(texts)

    def wrong(self, texts: Mapping[Prompt, Text], sampling: Sampling | None = None) -> dict[int, Text]:
        """By length the answers that the plain engine does not give."""
        return {len(prompt): text for prompt, text in texts.items() if text != self.expected(prompt, sampling)}

    def take_count(self, engine: EngineProcess, name: str) -> float:
        """What was added to a counter of ours since this was asked last."""
        now, key = engine.metric(name), (engine.spec.name, name)
        before, self._counts[key] = self._counts.get(key, 0.0), now
        return now - before

    # --- nothing left behind --------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """First loads, connections and threads; remembers what the engines hold when idle."""
        for _ in self.engines:
            self._wrong_golden_answers()
        for engine in self.engines:
            self._rest.remember(engine)

    def remains(self) -> dict[str, Any]:
        """What is not as it was at the start, golden answers included; {} when all is well."""
        alive = [engine for engine in self.engines if engine.is_alive]
        for engine in alive:
            engine.call(messages.Unpause())
            engine.release()
        found: dict[str, Any] = {}
        if wrong := self._wrong_golden_answers():
            found["wrong golden answers"] = wrong
        for engine in alive:
            if different := self._rest.changes(engine):
                found[engine.spec.name] = different
        return found

    def revive(self) -> None:
        """Start engines that an earlier test left dead."""
        dead = [engine for engine in self.engines if not engine.is_alive]
        for engine in dead:
            self._counts = {key: value for key, value in self._counts.items() if key[0] != engine.spec.name}
            engine.restart()
            engine.wait_ready()
        if dead:
            self.warm_up()

    def _wrong_golden_answers(self) -> dict[str, dict[int, Text]]:
        """Every engine in turn is given the same prompts, so that some are computed, some loaded, some cached; the first one
        computes those that are new, each time another engine."""
        self._num_checks += 1
        first = self._num_checks % len(self.engines)
        prompts = golden_prompts(self._golden_lengths, self._num_checks)
        wrong = {}
        for engine in (*self.engines[first:], *self.engines[:first]):
            if engine.is_alive and (texts := self.wrong_answers(engine, prompts)):
                wrong[engine.spec.name] = texts
        return wrong


def results(requests: Mapping[Prompt, Running], timeout_s: float = REQUEST_TIMEOUT_S) -> dict[Prompt, Text]:
    """The answers of requests that run at the same time."""
    deadline_s = time.monotonic() + timeout_s
    return {prompt: running.result(deadline_s - time.monotonic()).text for prompt, running in requests.items()}
