"""Engines by hand that share a pool: real schedulers, real connectors, a real mooncake_master and its clients, no model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from tests.connector.test_two_engines import FIRST_RENEWAL_S, SETTLE_S, prefill, prompt_of, settle

pytestmark = pytest.mark.engine

BLOCK = 32
Make = Callable[..., Any]
_salts = itertools.count(1000)


def fresh_prompt(num_tokens: int) -> list[int]:
    """A prompt no other test has."""
    return prompt_of(num_tokens, salt=next(_salts))


def drain(*engines: Any) -> None:
    """Step until what is saved is in the pool."""
    for engine in engines:
        engine.step_until(lambda engine=engine: not engine.scheduler.has_requests(), what="saves ended")


def compute(engine: Any, prompt: list[int], **options: Any) -> str:
    """Run a prompt through an engine, and wait until what it saves is in the pool."""
    request_id: str = engine.add(prompt, **options)
    engine.run_until(request_id)
    drain(engine)
    return request_id


def admit(engine: Any, prompt: list[int], **options: Any) -> str:
    """Give an engine a prompt and run it until its KV is there, or being computed."""
    request_id: str = engine.add(prompt, **options)
    engine.step_to_running(request_id)
    return request_id


def loaded_tokens(engine: Any) -> float:
    """Tokens that came from the pool since this was asked last."""
    return float(engine.take_count("pool_loaded_tokens_total"))


@pytest.fixture(scope="module")
def pair(process_groups: None, pool_master: Any) -> Iterator[tuple[Any, Any]]:
    """Two engines that most tests share, each with prompts of its own."""
    from tests.connector.conftest import MODEL, pool_options
    from tests.connector.hand_engine import HandEngine

    options = pool_options(pool_master, tenant="the pair")
    engines = [HandEngine(str(MODEL), "kv_both", **options) for _ in range(2)]
    yield engines[0], engines[1]
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("num_tokens", [31, 32, 33, 64, 65, 511, 512, 513, 1300])
def test_what_one_engine_computed_another_loads(pair: tuple[Any, Any], num_tokens: int) -> None:
    """Goal: the right bytes in the right blocks around every edge. Method: compare all layers, heads and tokens."""
    first, second = pair
    prompt = fresh_prompt(num_tokens)
    num_whole = num_tokens // BLOCK * BLOCK

    compute(first, prompt)
    loaded_tokens(second)
    request_id = admit(second, prompt)

    assert num_whole == loaded_tokens(second)
    assert second.holds_kv(prompt, second.block_ids(request_id), num_tokens=num_whole)
    second.run_until(request_id)
    assert [10, 11, 12, 13] == second.tokens[request_id]
    settle(first, second)


def test_every_sleep_of_a_load_ends_with_its_news(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a lookup's answer and the end of a load are heard at once, each where it comes in. Method: a minute's sleeps."""
    first, second = pair
    prompt = fresh_prompt(300)
    compute(first, prompt)
    loaded_tokens(second)
    started_s = time.monotonic()

    with monkeypatch.context() as sleeps:
        sleeps.setattr(second.scheduler.get_kv_connector()._pacer, "_wait_s", SETTLE_S)
        request_id = admit(second, prompt)

    assert time.monotonic() - started_s < FIRST_RENEWAL_S, "nobody but a timer ended a sleep"
    assert 9 * BLOCK == loaded_tokens(second)
    second.run_until(request_id)
    settle(first, second)


@pytest.mark.parametrize("num_local_blocks", [1, 3, 9])
def test_only_what_the_local_cache_lacks_is_loaded(pair: tuple[Any, Any], num_local_blocks: int) -> None:
    """Goal: lookups and loads begin behind the local hit. Method: prime the second engine with the first blocks."""
    first, second = pair
    prompt = fresh_prompt(10 * BLOCK + 3)
    compute(first, prompt)
    primed = admit(second, prompt[: num_local_blocks * BLOCK + 1])
    second.run_until(primed)
    loaded_tokens(second)

    request_id = admit(second, prompt)

    assert (10 - num_local_blocks) * BLOCK == loaded_tokens(second)
    assert second.holds_kv(prompt, second.block_ids(request_id), num_tokens=10 * BLOCK)
    second.run_until(request_id)
    settle(first, second)


def test_the_longest_prefix_in_the_pool_is_loaded(pair: tuple[Any, Any]) -> None:
    """Goal: never all or nothing. Method: a prompt that leaves the saved one in the midst of a block."""
    first, second = pair
    saved = fresh_prompt(300)
    prompt = saved[: 6 * BLOCK + 7] + fresh_prompt(100)
    compute(first, saved)
    loaded_tokens(second)

    request_id = admit(second, prompt)
    second.run_until(request_id)

    assert 6 * BLOCK == loaded_tokens(second)
    settle(first, second)


def test_chunks_are_saved_while_the_prompt_is_still_computed(make_pool_engine: Make) -> None:
    """Goal: a long prefill's beginning is of use before its end. Method: chunks of two blocks, and another engine that
    loads after four of them."""
    first, second = make_pool_engine(chunk=2 * BLOCK), make_pool_engine()
    prompt = prompt_of(20 * BLOCK)
    request_id = first.add(prompt)
    for _ in range(5):
        first.step()
    second.step_until(lambda: loaded_when_asked(second, prompt) >= 2 * BLOCK, what="something was saved")
    assert request_id not in first.finished
    first.run_until(request_id)
    drain(first)
    settle(first, second)


def loaded_when_asked(engine: Any, prompt: list[int]) -> float:
    """What an engine finds of a prompt now; it computes nothing but what is missing of the first four blocks."""
    loaded_tokens(engine)
    engine.run_until(engine.add(prompt[: 4 * BLOCK], max_tokens=1))
    engine.scheduler.reset_prefix_cache()
    return loaded_tokens(engine)


@pytest.mark.parametrize("num_steps", range(0, 8))
def test_abort_at_any_moment_of_a_load_leaves_nothing(pair: tuple[Any, Any], num_steps: int) -> None:
    """Goal: no block is lost whenever the client leaves. Method: abort after so many steps; count blocks."""
    first, second = pair
    prompt = fresh_prompt(1300)
    compute(first, prompt)

    request_id = second.add(prompt)
    for _ in range(num_steps):
        second.step()
    second.abort(request_id)

    settle(first, second)


def test_a_request_id_may_come_again_while_its_load_is_under_way(pair: tuple[Any, Any]) -> None:
    """Goal: an aborted life and the next one of the same id are told apart. Method: abort and add at once."""
    first, second = pair
    one, other = fresh_prompt(700), fresh_prompt(900)
    for prompt in (one, other):
        compute(first, prompt)

    for prompt in (one, other, one):
        second.add(prompt, request_id="again")
        second.step()
        second.abort("again")
        second.step_until(lambda: "again" not in second.scheduler.requests, what="the aborted life ended")
    request_id = admit(second, other, request_id="again")

    assert second.holds_kv(other, second.block_ids(request_id), num_tokens=900 // BLOCK * BLOCK)
    second.run_until(request_id)
    settle(first, second)


def test_preemption_while_saving_and_loading(make_pool_engine: Make) -> None:
    """Goal: blocks that vLLM takes away and gives to others are never saved under the wrong name. Method: more requests than
    fit, so that vLLM preempts; then another engine loads all of it."""
    first, second = make_pool_engine(num_blocks=24, chunk=64), make_pool_engine()
    prompts = [prompt_of(200, salt=salt) for salt in range(6)]

    request_ids = [first.add(prompt, max_tokens=40) for prompt in prompts]
    first.run_until(*request_ids)
    drain(first)

    for prompt in prompts:
        request_id = admit(second, prompt)
        assert second.holds_kv(prompt, second.block_ids(request_id), num_tokens=200 // BLOCK * BLOCK)
        second.run_until(request_id)
    settle(first, second)


def test_asynchronous_scheduling_saves_and_loads_the_same(make_pool_engine: Make) -> None:
    """Goal: what a step has not written yet is not saved. Method: two steps in flight on both engines."""
    first, second = make_pool_engine(asynchronous=True, chunk=64), make_pool_engine(asynchronous=True)
    prompt = prompt_of(500)
    for engine in (first, second):
        request_id = engine.add(prompt)
        engine.schedule()
        engine.drive(request_id)
        drain(engine)

    assert 480 == loaded_tokens(second)
    settle(first, second)


def test_two_ranks_save_and_load_their_shares(make_pool_engine: Make) -> None:
    """Goal: tensor parallel engines share by shard. Method: two ranks each; compare all heads."""
    first, second = make_pool_engine(tensor_parallel=2), make_pool_engine(tensor_parallel=2)
    prompt = prompt_of(500)

    compute(first, prompt)
    request_id = admit(second, prompt)

    assert 480 == loaded_tokens(second)
    assert second.holds_kv(prompt, second.block_ids(request_id), num_tokens=480)
    second.run_until(request_id)
    settle(first, second)


def test_what_decode_computes_is_saved_on_demand(make_pool_engine: Make) -> None:
    """Goal: the next turn of a chat finds the last answer. Method: `save_decode`, then a prompt that goes on from it."""
    first, second = make_pool_engine(save_decode=True), make_pool_engine()
    prompt = prompt_of(100)
    request_id = compute(first, prompt, max_tokens=100)
    next_turn = prompt + first.tokens[request_id] + prompt_of(50, salt=5)

    admitted = admit(second, next_turn)

    assert (100 + 99) // BLOCK * BLOCK == loaded_tokens(second)
    assert second.holds_kv(next_turn, second.block_ids(admitted), num_tokens=(100 + 99) // BLOCK * BLOCK)
    second.run_until(admitted)
    settle(first, second)


def test_log_probabilities_of_a_prompt_are_computed(pair: tuple[Any, Any]) -> None:
    """Goal: a request that needs every token computed is not given loaded ones. Method: vLLM's own flag."""
    first, second = pair
    prompt = fresh_prompt(300)
    compute(first, prompt)
    loaded_tokens(second)

    request_id = admit(second, prompt, prompt_logprobs=1)
    second.run_until(request_id)

    assert 0 == loaded_tokens(second)
    settle(first, second)


def test_engines_that_reset_share_nothing_any_more(make_pool_engine: Make) -> None:
    """Goal: what old weights computed is not taken for what new ones would. Method: reset both, for reasons of their own."""
    first, second = make_pool_engine(), make_pool_engine()
    prompt, later = prompt_of(300), prompt_of(300, salt=1)
    compute(first, prompt)
    for engine in (first, second):
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)

    for one in (prompt, later):
        compute(first, one)
        compute(second, one)

    assert 0 == loaded_tokens(second)
    settle(first, second)


@pytest.mark.parametrize("at_decode", ["local", "pool", "none"])
@pytest.mark.parametrize("at_prefill", ["local", "pool", "none"])
def test_pool_and_p2p_together(pairs_of_both: tuple[Any, Any, Any], at_prefill: str, at_decode: str) -> None:
    """Goal: every combination of hits gives the right KV and leaves nothing. Method: a third engine fills the pool; decode's
    prompt is whole and right whatever its parts came from."""
    producer, consumer, other = pairs_of_both
    prompt = fresh_prompt(500)
    head = prompt[: 5 * BLOCK + 1]
    if "pool" in (at_prefill, at_decode):
        compute(other, head)
    if at_prefill == "local":
        compute(producer, head)
    if at_decode == "local":
        compute(consumer, head)

    request_id = admit(consumer, prompt, transfer=prefill(producer, prompt))

    assert request_id in consumer.loaded
    assert consumer.holds_kv(prompt, consumer.block_ids(request_id), num_tokens=499)
    consumer.run_until(request_id)
    drain(producer, consumer, other)
    settle(producer, consumer, other)


@pytest.fixture(scope="module")
def pairs_of_both(process_groups: None, pool_master: Any) -> Iterator[tuple[Any, Any, Any]]:
    """A prefill and a decode engine with both connectors in one, and an engine with the pool alone."""
    from tests.connector.conftest import MODEL, pool_options
    from tests.connector.hand_engine import HandEngine

    pool = pool_options(pool_master, tenant="both")
    both = {**pool, "connector": "MooncakeConnectorV1", "prefix_pooling": True}
    engines = [
        HandEngine(str(MODEL), "kv_producer", **both),
        HandEngine(str(MODEL), "kv_consumer", **both),
        HandEngine(str(MODEL), "kv_both", **pool),
    ]
    yield engines[0], engines[1], engines[2]
    for engine in engines:
        engine.close()


def test_a_request_whose_prefill_engine_is_gone_may_load_from_the_pool(pairs_of_both: tuple[Any, Any, Any]) -> None:
    """Goal: a failed transfer falls back to the pool, once. Method: params that name an earlier start of it."""
    producer, consumer, other = pairs_of_both
    prompt = fresh_prompt(500)
    params = prefill(producer, prompt)
    drain(producer)
    compute(other, prompt)
    loaded_tokens(consumer)

    request_id = admit(consumer, prompt, transfer={**params, "remote_incarnation": "0" * 32})

    assert 480 == loaded_tokens(consumer)
    assert consumer.holds_kv(prompt, consumer.block_ids(request_id), num_tokens=480)
    consumer.run_until(request_id)
    release = admit(consumer, prompt, transfer=params)
    consumer.run_until(release)
    settle(producer, consumer, other)
