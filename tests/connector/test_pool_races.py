"""What engines by hand that share a pool must survive: odd moments of vLLM's own, resets, hostile requests.

As in `test_pool_engines`, every test ends with all blocks back on each engine (`settle`).
"""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from tests.connector.test_pool_engines import BLOCK, Make, admit, compute, drain, fresh_prompt, loaded_tokens
from tests.connector.test_pool_engines import pair as pair
from tests.connector.test_two_engines import prefill, prompt_of, settle
from vllm_mooncake_ascend.testing.held_store import HeldStore

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
@pytest.mark.parametrize("num_steps_under_way", [1, 2])
def test_a_reset_with_steps_under_way_saves_nothing_of_the_lives_it_ended(
    make_pool_engine: Make, num_steps_under_way: int, role: str
) -> None:
    """Goal: vLLM takes a running request's blocks between a step and its output. Method: asynchronous scheduling, a chunked
    prefill, and a reset that preempts it; then another engine loads what it saved after all."""
    first, second = make_pool_engine(role, asynchronous=True, chunk=2 * BLOCK), make_pool_engine()
    prompt = prompt_of(10 * BLOCK)
    request_id = first.add(prompt)
    while not first.schedule().num_scheduled_tokens:
        first.finish()
    for _ in range(num_steps_under_way - 1):
        first.schedule()
    with contextlib.suppress(RuntimeError):  # vLLM's own: blocks of the steps under way are freed later
        first.scheduler.reset_prefix_cache(reset_running_requests=True)
    while request_id not in first.finished:
        first.finish()
        first.schedule()
    while first.steps:
        first.finish()
    drain(first)

    admitted = admit(second, prompt)

    assert 10 * BLOCK == loaded_tokens(second)
    assert second.holds_kv(prompt, second.block_ids(admitted), num_tokens=10 * BLOCK)
    second.run_until(admitted)
    settle(first, second)


@pytest.mark.parametrize("odd", ["text", 7, ["do_remote_prefill"], {"do_remote_prefill": True}])
def test_kv_transfer_params_of_any_kind_are_survived(pair: tuple[Any, Any], odd: Any) -> None:
    """Goal: vLLM reads the attribute as a dict, and a client gets anything past its API with vllm_xargs. Method: odd ones."""
    first, second = pair
    prompt = fresh_prompt(2 * BLOCK)
    compute(first, prompt)
    loaded_tokens(second)

    request_id = compute(second, prompt, transfer=odd)

    assert (2 * BLOCK, [10, 11, 12, 13]) == (loaded_tokens(second), second.tokens[request_id])
    settle(first, second)


def hold_store(engine: Any, *, rank: int = 0) -> HeldStore:
    """The store of one worker, whose calls the test may hold from now on."""
    shell = engine.workers[rank]._working._shell
    shell._store = HeldStore(shell._store)
    return shell._store


@pytest.mark.parametrize("reset_running_requests", [False, True])
def test_a_reset_while_blocks_are_saved_leaves_nothing_to_find(make_pool_engine: Make, reset_running_requests: bool) -> None:
    """Goal: vLLM's own reset fails while a block is pinned, and KV of old weights would be found. Method: hold a put, reset;
    then let it go on, and reset again."""
    engine = make_pool_engine()
    gate = hold_store(engine).hold("put")
    prompt = prompt_of(4 * BLOCK + 1)
    engine.run_until(engine.add(prompt))
    assert gate.entered.wait(10.0)
    assert engine.scheduler.has_requests()  # so that a pause waits for the end of the save

    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)

    again = engine.add(prompt, max_tokens=1)
    while not (scheduled := engine.step().num_scheduled_tokens):
        pass
    assert {again: len(prompt)} == scheduled
    gate.open()
    drain(engine)
    assert engine.free_at_start == engine.num_free_blocks
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests, reset_connector=True)


def test_the_answer_to_a_prompt_shorter_than_a_block_is_saved(make_pool_engine: Make) -> None:
    """Goal: a chat may begin with a few words. Method: `save_decode`, no block hash at the request's arrival."""
    first, second = make_pool_engine(save_decode=True), make_pool_engine()
    prompt = prompt_of(BLOCK - 3)
    request_id = compute(first, prompt, max_tokens=3 * BLOCK)
    next_turn = prompt + first.tokens[request_id] + prompt_of(10, salt=5)

    admitted = admit(second, next_turn)

    assert 3 * BLOCK == loaded_tokens(second)
    assert second.holds_kv(next_turn, second.block_ids(admitted), num_tokens=3 * BLOCK)
    second.run_until(admitted)
    settle(first, second)


def test_a_prompt_computed_faster_than_it_is_saved_is_saved_whole(make_pool_engine: Make) -> None:
    """Goal: the bound on blocks that saves hold delays them, and loses none. Method: hold the first put while more blocks are
    computed than saves may hold; then give the puts time between steps."""
    first, second = make_pool_engine(chunk=2 * BLOCK), make_pool_engine()
    store = hold_store(first)
    gate = store.hold("put")
    prompt = prompt_of(30 * BLOCK)
    request_id = first.add(prompt, max_tokens=20)
    while first.scheduler.requests[request_id].num_computed_tokens < 22 * BLOCK:
        first.step()
    assert 16 == first.connector._scheduling._block_pins.num_pinned
    store.let_pass("put")
    gate.open()
    while request_id not in first.finished:
        first.workers[0]._working._shell.wait(0.05)
        first.step()
    drain(first)

    admitted = admit(second, prompt)

    assert 30 * BLOCK == loaded_tokens(second)
    second.run_until(admitted)
    settle(first, second)


@pytest.fixture
def make_multi_engine(make_engine: Make, pool_master: Any) -> Make:
    """Makes hand engines with both connectors under vLLM's MultiConnector."""
    from tests.connector.conftest import pool_options
    from tests.connector.hand_engine import transfer_config

    options = pool_options(pool_master, tenant=uuid.uuid4().hex)
    connector = options.pop("connector")

    def make(role: str = "kv_both") -> Any:
        children = [transfer_config("MooncakeConnectorV1", role), transfer_config(connector, role, **options)]
        return make_engine(role, connector="MultiConnector", connectors=children)

    return make


def test_both_connectors_work_under_vllms_own(make_multi_engine: Make) -> None:
    """Goal: MultiConnector instead of `prefix_pooling`. Method: a transfer, then what it left in the pool, then a reset."""
    first, second = make_multi_engine(), make_multi_engine()
    prompt, other = prompt_of(300), prompt_of(500, salt=1)
    request_id = admit(second, prompt, transfer=prefill(first, prompt))
    assert request_id in second.loaded
    assert second.holds_kv(prompt, second.block_ids(request_id), num_tokens=299)
    second.run_until(request_id)

    compute(first, other)
    request_id = admit(second, other)
    assert request_id in second.loaded
    assert second.holds_kv(other, second.block_ids(request_id), num_tokens=500 // BLOCK * BLOCK)
    second.run_until(request_id)
    drain(first, second)
    assert second.scheduler.reset_prefix_cache(reset_connector=True)
    request_id = compute(second, other)
    assert request_id not in second.loaded
    settle(first, second)


def test_a_load_that_fails_under_vllms_own_fails_no_request(make_multi_engine: Make) -> None:
    """Goal: the pool never fails a request. Method: a store whose gets fail, below a MultiConnector."""
    first, second = make_multi_engine(), make_multi_engine()
    prompt = prompt_of(300)
    compute(first, prompt)
    shell = second.workers[0]._connectors[1]._working._shell
    shell._store = HeldStore(shell._store)
    shell._store.fail("get", RuntimeError("the test wants it so"))

    request_id = compute(second, prompt)

    assert ("length", [10, 11, 12, 13]) == (second.finished[request_id], second.tokens[request_id])
    settle(first, second)
