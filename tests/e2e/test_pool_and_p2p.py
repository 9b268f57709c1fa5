"""Prefill and decode engines that also share a prefix pool, in one connector and in vLLM's MultiConnector.

User pain rows W13, H10, and the issue's own: every combination of hits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vllm_mooncake_ascend.testing.engine_pair import EnginePair, Prompt, random_prompt
from vllm_mooncake_ascend.testing.engine_pool import CONNECTOR, LOADED_TOKENS, NUM_SPARE_SOCKETS, PoolEngines, pool_options
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, wait_all_ready
from vllm_mooncake_ascend.testing.pool_master import PoolMaster

pytestmark = pytest.mark.engine

BLOCK = 32
NUM_TOKENS = 700
NUM_HEAD_TOKENS = 10 * BLOCK + 1
"""Of what is in a cache before, so that ten blocks hit."""
ROLES = ("kv_producer", "kv_consumer")
PLACES = ("local", "pool", "none")
READ_BYTES = "kv_read_bytes_total"
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 64 * 4
"""tiny-gqa: layers x KV heads x tokens x (K and V) x head size x float32."""


class Both:
    """A pair with pool, and the engines of `pool` beside it."""

    def __init__(self, pair: EnginePair, pool: PoolEngines) -> None:
        self.pair = pair
        self.pool = pool
        self._counts = PoolEngines([pair.prefill, pair.decode], pair.reference)

    def drain(self, *, release: object = None) -> None:
        """Wait until both hold nothing; first give up the transfer of these params."""
        if release is not None:
            self.pair.release(release)
        for engine in (self.pair.prefill, self.pair.decode):
            self.pair.flush(engine)
            self._counts.settle(engine)

    def take(self, engine: EngineProcess) -> tuple[float, float]:
        """Blocks that came from the pool and from prefill since this was asked last."""
        from_pool = self._counts.take_count(engine, LOADED_TOKENS) / BLOCK
        return from_pool, self._counts.take_count(engine, READ_BYTES) / BLOCK_BYTES


@pytest.fixture
def make_both(start: Callable[..., EngineProcess], pool: PoolEngines, pool_master: PoolMaster) -> Iterator[Callable[..., Both]]:
    """Makes a pair in the pool of `pool`; afterwards its answers are right and nothing is left behind."""
    made: list[Both] = []

    def make(connector: str, extra: Callable[[str], dict[str, Any]]) -> Both:
        engines = [start(f"{connector}-{role}", kv_role=role, connector=connector, extra=extra(role)) for role in ROLES]
        wait_all_ready(engines)
        known = random_prompt("golden", 300)
        pool.compute(pool.first, known)
        assert [288, 288] == [engine.submit(known).result().num_cached_tokens for engine in engines], "of the pool"
        pair = EnginePair(engines[0], engines[1], pool.reference, num_spare_sockets=NUM_SPARE_SOCKETS)
        pair.warm_up()
        made.append(Both(pair, pool))
        return made[-1]

    yield make
    for both in made:
        assert {} == both.pair.remains()


def test_every_combination_of_hits_is_answered_right(make_both: Callable[..., Both], pool_master: PoolMaster) -> None:
    """Goal: local cache, pool and prefill's blocks together make the right KV, each byte moved once. Method: prompts whose
    first ten blocks prefill, or decode, has itself, finds in the pool, or has nowhere; then requests without a prefill engine
    (all from the pool), and one whose prefill engine has restarted (the pool stands in)."""
    options = {"prefix_pooling": True, **pool_options(pool_master, segment_bytes=0, max_pinned_ratio=0.9)}
    both = make_both("MooncakeConnectorV1", lambda role: options)
    pair, moved, expected = both.pair, {}, {}

    for at_prefill, at_decode in itertools.product(PLACES, PLACES):
        case = f"prefill {at_prefill}, decode {at_decode}"
        prompt = random_prompt(case, NUM_TOKENS)
        _place(both, prompt, at_prefill, at_decode)
        prefilled = pair.start_prefill(prompt).result()
        answer = pair.decode_leg(prompt, prefilled.kv_transfer_params)
        assert pair.expected(prompt) == answer.text, case
        both.drain()
        moved[case] = [*both.take(pair.prefill), *both.take(pair.decode)]
        from_pool = 10.0 if at_prefill != "local" and "pool" in (at_prefill, at_decode) else 0.0
        expected[case] = [from_pool, 0.0, 0.0, 12.0 if at_decode == "local" else 22.0]

    prompt = random_prompt("no prefill engine", NUM_TOKENS)
    both.pool.compute(both.pool.first, prompt)
    moved["no prefill engine"] = [*_sources(both, prompt, None)]
    expected["no prefill engine"] = [21.0, 0.0]
    prompt = random_prompt("prefill engine gone", NUM_TOKENS)
    params = pair.prefill_leg(prompt)
    both.drain(release=params)
    moved["prefill engine gone"] = [*_sources(both, prompt, {**params, "remote_incarnation": "0" * 32})]
    expected["prefill engine gone"] = [21.0, 0.0]

    assert expected == moved


def test_vllms_multi_connector_takes_both(make_both: Callable[..., Both], pool_master: PoolMaster) -> None:
    """Goal: users who combine our connectors by vLLM's own means get the same answers. Method: MultiConnector with both on
    prefill and decode; prompts that nobody has, that the pool has, and that decode alone is asked for."""

    def extra(role: str) -> dict[str, Any]:
        parts = (("MooncakeConnectorV1", {}), (CONNECTOR, pool_options(pool_master, segment_bytes=0)))
        return {
            "connectors": [
                {
                    "kv_connector": name,
                    "kv_connector_module_path": "vllm_mooncake_ascend",
                    "kv_role": role,
                    "kv_connector_extra_config": options,
                }
                for name, options in parts
            ]
        }

    both = make_both("MultiConnector", extra)
    cold, hit, alone = (random_prompt(f"multi {case}", NUM_TOKENS) for case in ("cold", "hit", "alone"))
    for prompt in (hit, alone):
        both.pool.compute(both.pool.first, prompt)
    for engine in (both.pair.prefill, both.pair.decode):
        both.take(engine)

    answers = [both.pair.answer(cold), both.pair.answer(hit), both.pair.decode.submit(alone).result()]

    assert [both.pair.expected(prompt) for prompt in (cold, hit, alone)] == [answer.text for answer in answers]
    both.drain()
    assert [(21.0, 0.0), (21.0, 44.0)] == [both.take(engine) for engine in (both.pair.prefill, both.pair.decode)]


def _sources(both: Both, prompt: Prompt, params: object) -> tuple[float, float]:
    """Blocks of decode's answer that came from the pool, and from prefill."""
    both.take(both.pair.decode)
    assert both.pair.expected(prompt) == both.pair.decode_leg(prompt, params).text
    both.drain()
    return both.take(both.pair.decode)


def _place(both: Both, prompt: Prompt, at_prefill: str, at_decode: str) -> None:
    head = prompt[:NUM_HEAD_TOKENS]
    if "pool" in (at_prefill, at_decode):
        both.pool.compute(both.pool.first, head)
    if at_prefill == "local":
        both.pair.prefill.submit(head).result()
    if at_decode == "local":
        both.pair.decode.submit(head).result()
    both.drain()
    for engine in (both.pair.prefill, both.pair.decode):
        both.take(engine)
