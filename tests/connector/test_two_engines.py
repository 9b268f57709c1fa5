"""Prefill and decode by hand: real schedulers, real connectors, a real Mooncake engine over loopback, no model.

After every test each engine has all its blocks back and nothing of ours left (`settle`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from vllm_mooncake_ascend import limits

pytestmark = pytest.mark.engine

BLOCK = 32
SETTLE_S = 60.0
FIRST_RENEWAL_S = limits.LEASE_TTL_S / limits.RENEWALS_PER_TTL
"""A reader's timer ends a sleep, too."""
Make = Callable[..., Any]


def prompt_of(num_tokens: int, *, salt: int = 0) -> list[int]:
    return [(salt * 7919 + index * 31) % 40_000 + 10 for index in range(num_tokens)]


def prefill(engine: Any, prompt: list[int], **options: Any) -> dict[str, Any]:
    """Run a prompt through a prefill engine; its kv_transfer_params."""
    request_id = engine.add(prompt, transfer={"do_remote_decode": True}, max_tokens=1, **options)
    engine.run_until(request_id)
    params = engine.params[request_id]
    assert params is not None
    return params


def settle(*engines: Any) -> None:
    """Run each engine dry with a last request: an idle engine drains releases at its next one."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        for engine in engines:
            request_id = engine.add(prompt_of(5, salt=99), max_tokens=1)
            engine.run_until(request_id)
        if all(engine.num_free_blocks == engine.free_at_start for engine in engines) or time.monotonic() > deadline_s:
            break
        time.sleep(0.01)
    assert [engine.free_at_start for engine in engines] == [engine.num_free_blocks for engine in engines]


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1300])
def test_decode_gets_the_prompts_kv(make_engine: Make, num_tokens: int) -> None:
    """Goal: the right bytes in the right blocks around every edge. Method: compare all layers, heads and tokens."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(num_tokens)

    request_id = consumer.add(prompt, transfer=prefill(producer, prompt))
    while consumer.status(request_id) != "RUNNING":
        consumer.step()

    assert request_id in consumer.loaded
    assert consumer.holds_kv(prompt, consumer.block_ids(request_id), num_tokens=num_tokens - 1)
    consumer.run_until(request_id)
    assert [10, 11, 12, 13] == consumer.tokens[request_id]
    settle(producer, consumer)


def test_every_sleep_of_a_read_ends_with_its_news(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: an offer, the end of a copy and a verdict are heard at once, each where it comes in. Method: a minute's sleeps."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(300)
    transfer = prefill(producer, prompt)
    started_s = time.monotonic()

    with monkeypatch.context() as sleeps:
        sleeps.setattr(consumer.scheduler.get_kv_connector()._pacer, "_wait_s", SETTLE_S)
        request_id = consumer.add(prompt, transfer=transfer)
        consumer.step_to_running(request_id)

    assert time.monotonic() - started_s < FIRST_RENEWAL_S, "nobody but a timer ended a sleep"
    assert request_id in consumer.loaded
    consumer.run_until(request_id)
    settle(producer, consumer)


def test_a_local_prefix_is_not_read_again(make_engine: Make) -> None:
    """Goal: only what decode lacks is moved, and the shared prefix stays. Method: prime decode with the first blocks."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(300)
    primer = consumer.add(prompt[: 4 * BLOCK + 1], max_tokens=1)
    consumer.run_until(primer)

    request_id = consumer.add(prompt, transfer=prefill(producer, prompt))
    while consumer.status(request_id) != "RUNNING":
        consumer.step()

    assert request_id in consumer.loaded
    assert consumer.holds_kv(prompt, consumer.block_ids(request_id), num_tokens=299)
    consumer.run_until(request_id)
    settle(producer, consumer)


def test_a_prompt_decode_has_whole_is_released_unread(make_engine: Make) -> None:
    """Goal: a full local hit frees prefill's blocks at once. Method: the same prompt twice, then look at prefill."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(4 * BLOCK + 1)
    for _ in range(2):
        request_id = consumer.add(prompt, transfer=prefill(producer, prompt))
        consumer.run_until(request_id)
        assert [10, 11, 12, 13] == consumer.tokens[request_id]
    settle(producer, consumer)


@pytest.mark.parametrize("num_steps", range(8))
def test_an_abort_at_any_step_leaves_nothing(make_engine: Make, num_steps: int) -> None:
    """Goal: a client that leaves costs no block on either side. Method: abort decode's request after n steps."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(900)
    request_id = consumer.add(prompt, transfer=prefill(producer, prompt), max_tokens=50)
    for _ in range(num_steps):
        consumer.step()

    consumer.abort(request_id)

    settle(producer, consumer)


def test_an_abort_between_the_halves_of_a_step_leaves_nothing(make_engine: Make) -> None:
    """Goal: an abort that meets the report on its way. Method: abort between schedule and finish of every step."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    for num_steps in range(1, 7):
        prompt = prompt_of(400, salt=num_steps)
        request_id = consumer.add(prompt, transfer=prefill(producer, prompt), max_tokens=50)
        for _ in range(num_steps - 1):
            consumer.step()
        consumer.schedule()
        consumer.abort(request_id)
        consumer.finish()
    settle(producer, consumer)


def test_asynchronous_scheduling_gets_the_same_kv(make_engine: Make) -> None:
    """Goal: a step is scheduled before the last one's output is back. Method: vLLM's AsyncScheduler on both sides."""
    producer = make_engine("kv_producer", asynchronous=True)
    consumer = make_engine("kv_consumer", asynchronous=True)
    prompt = prompt_of(1100)
    source = producer.add(prompt, transfer={"do_remote_decode": True}, max_tokens=1)
    producer.schedule()
    while source not in producer.finished:
        producer.schedule()
        producer.finish()
    producer.finish()

    request_id = consumer.add(prompt, transfer=producer.params[source], max_tokens=3)
    consumer.schedule()
    while request_id not in consumer.finished:
        consumer.schedule()
        if consumer.scheduler.requests[request_id].status.name == "RUNNING":
            assert consumer.holds_kv(prompt, consumer.block_ids(request_id), num_tokens=1099)
        consumer.finish()
    consumer.finish()
    assert request_id in consumer.loaded
    settle(producer, consumer)


def test_a_dead_prefill_means_local_compute(make_engine: Make) -> None:
    """Goal: decode answers right without its prefill. Method: close the prefill engine before decode asks."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(200)
    params = prefill(producer, prompt)
    producer.close()

    request_id = consumer.add(prompt, transfer=params)
    consumer.run_until(request_id)

    assert [10, 11, 12, 13] == consumer.tokens[request_id]
    settle(consumer)


def test_another_prompt_never_gets_the_kv(make_engine: Make) -> None:
    """Goal: a transfer is bound to its prompt. Method: present one prompt's params with another prompt.

    The lease stays until its time is over: a list of prompts carries one set of params, and one of them may yet read it.
    """
    producer, consumer = make_engine("kv_producer", lease_ttl_s=1.0), make_engine("kv_consumer")
    params = prefill(producer, prompt_of(200))
    other = prompt_of(200, salt=3)

    request_id = consumer.add(other, transfer=params)
    while consumer.status(request_id) != "RUNNING":
        consumer.step()

    assert consumer.holds_kv(other, consumer.block_ids(request_id), num_tokens=200)
    consumer.run_until(request_id)
    settle(producer, consumer)


def test_children_of_one_prompt_each_read_it(make_engine: Make) -> None:
    """Goal: n>1 children share one transfer and each gets it. Method: three requests with one set of params."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(300)
    params = prefill(producer, prompt)

    children = [consumer.add(prompt, transfer=params) for _ in range(3)]
    consumer.run_until(*children)

    assert [[10, 11, 12, 13]] * 3 == [consumer.tokens[child] for child in children]
    settle(producer, consumer)


def test_a_preempted_request_computes_locally(make_engine: Make) -> None:
    """Goal: after the load remote KV is never asked for twice. Method: too few blocks for two running requests."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer", num_blocks=20)
    prompts = [prompt_of(250, salt=salt) for salt in range(2)]
    requests = [consumer.add(prompt, transfer=prefill(producer, prompt), max_tokens=120) for prompt in prompts]

    consumer.run_until(*requests)

    assert [list(range(10, 130))] * 2 == [consumer.tokens[request_id] for request_id in requests]
    settle(producer, consumer)


def test_prompt_logprobs_discard_the_match_and_release_it(make_engine: Make) -> None:
    """Goal: vLLM may throw our answer away after it asked. Method: prompt_logprobs."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(200)

    request_id = consumer.add(prompt, transfer=prefill(producer, prompt), prompt_logprobs=1)
    while consumer.status(request_id) != "RUNNING":
        consumer.step()

    assert consumer.holds_kv(prompt, consumer.block_ids(request_id), num_tokens=200)
    consumer.abort(request_id)
    settle(producer, consumer)


def test_a_reset_revokes_leases_and_readers_recompute(make_engine: Make) -> None:
    """Goal: new weights make old KV void. Method: reset prefill's cache before decode reads."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(200)
    params = prefill(producer, prompt)

    assert producer.connector.reset_cache()
    assert producer.scheduler.reset_prefix_cache()

    request_id = consumer.add(prompt, transfer=params)
    consumer.run_until(request_id, others=(producer,))
    assert [10, 11, 12, 13] == consumer.tokens[request_id]
    settle(producer, consumer)


def test_an_engine_that_is_both_serves_itself_through_another(make_engine: Make) -> None:
    """Goal: two kv_both engines that read from each other make progress. Method: cross requests at once."""
    first, second = make_engine("kv_both"), make_engine("kv_both")
    prompts = [prompt_of(400, salt=salt) for salt in range(2)]
    params = [prefill(first, prompts[0]), prefill(second, prompts[1])]

    on_second = second.add(prompts[0], transfer=params[0])
    on_first = first.add(prompts[1], transfer=params[1])
    first.run_until(on_first, others=(second,))
    second.run_until(on_second, others=(first,))

    assert on_first in first.loaded
    assert on_second in second.loaded
    assert [10, 11, 12, 13] == first.tokens[on_first] == second.tokens[on_second]
    settle(first, second)


HOSTILE = [
    [],
    7,
    "x",
    {"do_remote_prefill": 1},
    {"do_remote_prefill": True},
    {"do_remote_prefill": True, "transfer_id": "x"},
    {"do_remote_prefill": True, "transfer_id": "x", "remote_incarnation": "y", "remote_host": "127.0.0.1", "remote_port": 0},
    {"do_remote_prefill": True, "transfer_id": "x" * 10_000, "remote_incarnation": "y", "remote_host": "h", "remote_port": 1},
    {"do_remote_prefill": True, "transfer_id": None, "remote_host": {"a": []}, "remote_port": "22"},
    {"do_remote_decode": True, "transfer_id": 5},
    {"do_remote_decode": "yes"},
    {"do_remote_decode": True, "do_remote_prefill": True},
    {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_incarnation": "i",
        "remote_host": "203.0.113.9",
        "remote_port": 9,
        "remote_num_tokens": 5,
        "remote_prompt_digest": "",
    },
    {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_incarnation": "i",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "remote_num_tokens": 10**18,
        "remote_prompt_digest": "zz" * 32,
    },
]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_no_params_of_a_client_harm_an_engine(make_engine: Make, role: str) -> None:
    """Goal: any JSON may stand in kv_transfer_params. Method: hostile values to every role; all answered by local compute."""
    engine = make_engine(role)

    requests = [engine.add(prompt_of(70, salt=salt), transfer=hostile) for salt, hostile in enumerate(HOSTILE)]
    engine.run_until(*requests)

    assert [[10, 11, 12, 13]] * len(HOSTILE) == [engine.tokens[request_id] for request_id in requests]
    settle(engine)


def test_an_abort_before_admission_frees_prefill(make_engine: Make) -> None:
    """Goal: vLLM tells us of requests it rejected by adding and ending them at once. Method: the same two hooks."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    prompt = prompt_of(200)

    consumer.abort(consumer.add(prompt, transfer=prefill(producer, prompt)))

    settle(producer, consumer)
