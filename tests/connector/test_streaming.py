"""Decode reads while prefill computes: real schedulers, real connectors, a real Mooncake engine over loopback, no model.

After every test each engine has all its blocks back and nothing of ours left (`settle`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from tests.connector.conftest import pool_options
from tests.connector.test_two_engines import BLOCK, prefill, prompt_of, settle
from vllm_mooncake_ascend.types import TransferId
from vllm_mooncake_ascend.wire.params import foretell

pytestmark = pytest.mark.engine

Make = Callable[..., Any]
CHUNK = 4 * BLOCK


class Pair:
    """A prefill engine of small chunks and a decode engine, which have met; requests go to both at once."""

    def __init__(self, make: Make, *, prefill_options: Any = None, decode_options: Any = None, mode: str = "stream") -> None:
        producer_options = {"chunk": CHUNK, "transfer_mode": mode, **(prefill_options or {})}
        self.producer = make("kv_producer", **producer_options)
        self.consumer = make("kv_consumer", **{"transfer_mode": mode, **(decode_options or {})})
        self._earlier = prefill(self.producer, prompt_of(3, salt=77))
        self.run(self.consumer.add(prompt_of(3, salt=77), transfer=self._earlier, max_tokens=1))
        self.consumer.take_count("kv_read_bytes_total")

    def add(self, prompt: list[int], **options: Any) -> tuple[str, str]:
        """Give both engines a prompt; the ids of prefill's request and decode's."""
        transfer_id = uuid.uuid4().hex
        wish = {"do_remote_decode": True, "transfer_id": transfer_id}
        source = self.producer.add(prompt, transfer=wish, max_tokens=1)
        params = foretell(self._earlier, TransferId(transfer_id), secret=None, now_s=time.time())
        return source, self.consumer.add(prompt, transfer=params, **options)

    def step(self) -> None:
        """One step of each engine that has something to do, and a moment for messages and bytes."""
        for engine in (self.producer, self.consumer):
            if engine.scheduler.has_requests():
                engine.step()
        time.sleep(0.005)

    def run(self, *request_ids: str) -> None:
        """Step until these requests of decode have ended."""
        deadline_s = time.monotonic() + 60.0
        while not all(request_id in self.consumer.finished for request_id in request_ids):
            assert time.monotonic() < deadline_s, "a request does not end"
            self.step()

    def run_loaded(self, prompt: list[int], request_id: str) -> None:
        """Step until decode's request runs: on the KV of prefill, which must be that of the prompt."""
        while self.consumer.status(request_id) != "RUNNING":
            self.step()
        self.assert_loaded(prompt, request_id)

    def assert_loaded(self, prompt: list[int], request_id: str) -> None:
        assert request_id in self.consumer.loaded
        assert self.consumer.holds_kv(prompt, self.consumer.block_ids(request_id), num_tokens=len(prompt) - 1)

    def settle(self) -> None:
        settle(self.producer, self.consumer)


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1300])
def test_decode_gets_the_prompts_kv(make_engine: Make, num_tokens: int) -> None:
    """Goal: the right bytes in the right blocks around every edge. Method: compare all layers, heads and tokens."""
    pair = Pair(make_engine)
    prompt = prompt_of(num_tokens)
    _, request_id = pair.add(prompt)
    pair.run_loaded(prompt, request_id)
    pair.run(request_id)
    assert [10, 11, 12, 13] == pair.consumer.tokens[request_id]
    pair.settle()


def test_bytes_are_here_before_the_prefill_has_ended(make_engine: Make) -> None:
    """Goal: only the last chunk is left to be moved. Method: hold prefill before its last step and look at decode's blocks."""
    pair = Pair(make_engine)
    prompt = prompt_of(8 * CHUNK)
    source, request_id = pair.add(prompt)
    for _ in range(7):
        pair.producer.step()
    assert source not in pair.producer.finished

    written = 6 * CHUNK
    deadline_s = time.monotonic() + 30.0
    while not (block_ids := pair.consumer.block_ids(request_id)) or not pair.consumer.holds_kv(
        prompt, block_ids, num_tokens=written
    ):
        assert time.monotonic() < deadline_s, "nothing comes before the prefill has ended"
        pair.consumer.step()
        time.sleep(0.005)
    assert "WAITING_FOR_REMOTE_KVS" == pair.consumer.status(request_id)

    pair.run(request_id)
    assert request_id in pair.consumer.loaded
    pair.settle()


@pytest.mark.parametrize(
    "modes", [("stream", "after_prefill"), ("after_prefill", "stream"), ("after_prefill", "after_prefill")]
)
def test_an_engine_that_does_not_stream_gets_all_at_the_end(make_engine: Make, modes: tuple[str, str]) -> None:
    """Goal: engines of different settings work together. Method: requests to both at once, one side or none streams; nothing
    may be read before the prefill has ended."""
    pair = Pair(make_engine, prefill_options={"transfer_mode": modes[0]}, decode_options={"transfer_mode": modes[1]})
    prompt = prompt_of(5 * CHUNK)
    source, request_id = pair.add(prompt)
    while source not in pair.producer.finished:
        pair.step()
        assert source in pair.producer.finished or not pair.consumer.block_ids(request_id)

    pair.run(request_id)
    assert request_id in pair.consumer.loaded
    pair.settle()


def test_a_longer_local_prefix_is_not_read_again(make_engine: Make) -> None:
    """Goal: only what decode lacks is moved. Method: decode has five chunks of six before prefill has computed one."""
    pair = Pair(make_engine)
    prompt = prompt_of(6 * CHUNK)
    primer = pair.consumer.add(prompt[: 5 * CHUNK + 1], max_tokens=1)
    pair.run(primer)

    _, request_id = pair.add(prompt)
    pair.run_loaded(prompt, request_id)
    pair.run(request_id)
    assert pair.consumer.take_count("kv_read_bytes_total") == CHUNK * 2 * 2 * 2 * 64 * 4
    pair.settle()


def test_a_prefix_hit_of_prefill_is_offered_with_its_first_chunk(make_engine: Make) -> None:
    """Goal: what prefill need not compute is read as well. Method: the same prefix before."""
    pair = Pair(make_engine)
    prompt = prompt_of(8 * CHUNK)
    prefix = pair.producer.add(prompt[: 5 * CHUNK], max_tokens=1)
    pair.producer.run_until(prefix)

    _, request_id = pair.add(prompt)
    pair.run_loaded(prompt, request_id)
    pair.run(request_id)
    pair.settle()


@pytest.mark.parametrize("num_steps", range(0, 12))
def test_decodes_client_leaves_at_any_step(make_engine: Make, num_steps: int) -> None:
    """Goal: an abort costs no block on either side. Method: abort decode's request after n steps of both; prefill goes on."""
    pair = Pair(make_engine)
    source, request_id = pair.add(prompt_of(7 * CHUNK + 5), max_tokens=50)
    for _ in range(num_steps):
        pair.step()

    pair.consumer.abort(request_id)
    pair.producer.run_until(source, others=(pair.consumer,))

    pair.settle()


@pytest.mark.parametrize("num_steps", range(0, 8))
def test_prefills_request_is_aborted_at_any_step(make_engine: Make, num_steps: int) -> None:
    """Goal: decode computes itself what prefill will not. Method: abort prefill's request after n steps of both."""
    pair = Pair(make_engine)
    prompt = prompt_of(7 * CHUNK + 5)
    source, request_id = pair.add(prompt)
    for _ in range(num_steps):
        pair.step()

    pair.producer.abort(source)
    pair.run(request_id)

    assert [10, 11, 12, 13] == pair.consumer.tokens[request_id]
    assert request_id not in pair.consumer.loaded
    pair.settle()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_preempted_prefill_is_read_again(make_engine: Make, asynchronous: bool, prefix_caching: bool) -> None:
    """Goal: blocks that vLLM takes from a running prefill spoil nothing. Method: a request that grows into the
    last block while most of the prompt is read."""
    pair = Pair(
        make_engine,
        prefill_options={"num_blocks": 30, "chunk": BLOCK + 1, "asynchronous": asynchronous, "prefix_caching": prefix_caching},
    )
    prompt = prompt_of(24 * BLOCK)
    rival = pair.producer.add(prompt_of(5 * BLOCK - 9, salt=5), max_tokens=200)
    pair.producer.step()
    source, request_id = pair.add(prompt)
    num_preemptions = 0
    while pair.consumer.status(request_id) != "RUNNING":
        pair.step()
        request = pair.producer.scheduler.requests.get(source)
        num_preemptions = max(num_preemptions, 0 if request is None else request.num_preemptions)
        if num_preemptions and rival not in pair.producer.finished:
            pair.producer.abort(rival)
            pair.producer.finished[rival] = "abort"

    assert num_preemptions >= 1
    pair.assert_loaded(prompt, request_id)
    pair.run(request_id)
    assert 1 <= pair.consumer.take_count("reads_begun_again_total")
    assert [10, 11, 12, 13] == pair.consumer.tokens[request_id]
    pair.settle()


def test_a_reset_in_the_midst_of_a_prefill(make_engine: Make) -> None:
    """Goal: new weights make what was read void. Method: reset prefill's cache with its running requests after two chunks."""
    pair = Pair(make_engine)
    prompt = prompt_of(6 * CHUNK)
    _, request_id = pair.add(prompt)
    for _ in range(3):
        pair.step()

    assert pair.producer.connector.reset_cache()
    assert pair.producer.scheduler.reset_prefix_cache(reset_running_requests=True)

    pair.run(request_id)
    assert [10, 11, 12, 13] == pair.consumer.tokens[request_id]
    assert 1 <= pair.consumer.take_count("reads_begun_again_total")
    pair.settle()


def test_asynchronous_scheduling_streams_the_same_kv(make_engine: Make) -> None:
    """Goal: a chunk is offered when its output is back, though the next step is scheduled before. Method: vLLM's
    AsyncScheduler on both sides, two steps in flight on prefill."""
    pair = Pair(make_engine, prefill_options={"asynchronous": True}, decode_options={"asynchronous": True})
    prompt = prompt_of(9 * CHUNK)
    source, request_id = pair.add(prompt)
    pair.producer.schedule()
    while source not in pair.producer.finished:
        pair.producer.schedule()
        pair.producer.finish()
        pair.consumer.step()
        time.sleep(0.005)
    pair.producer.finish()
    while pair.consumer.status(request_id) != "RUNNING":
        pair.consumer.step()

    pair.assert_loaded(prompt, request_id)
    pair.run(request_id)
    pair.settle()


def test_each_rank_streams(make_engine: Make) -> None:
    """Goal: each rank reads its heads of each chunk, and all of them have read before it counts. Method: two ranks a side."""
    pair = Pair(make_engine, prefill_options={"tensor_parallel": 2}, decode_options={"tensor_parallel": 2})
    prompt = prompt_of(6 * CHUNK + 7)
    _, request_id = pair.add(prompt)
    pair.run_loaded(prompt, request_id)
    pair.run(request_id)
    pair.settle()


def test_several_streams_at_once(make_engine: Make) -> None:
    """Goal: streams do not mix. Method: four prompts, two with a common prefix, as many as the bound on pins lets be offered
    early."""
    pair = Pair(make_engine, prefill_options={"num_blocks": 100}, decode_options={"num_blocks": 100})
    common = prompt_of(3 * CHUNK, salt=3)
    prompts = [prompt_of(5 * CHUNK, salt=1), common + [7] * CHUNK, common + [8] * CHUNK, prompt_of(CHUNK + 3, salt=2)]
    legs = [pair.add(prompt) for prompt in prompts]

    pair.run(*(request_id for _, request_id in legs))

    assert {request_id for _, request_id in legs} <= pair.consumer.loaded
    assert [[10, 11, 12, 13]] * 4 == [pair.consumer.tokens[request_id] for _, request_id in legs]
    pair.settle()


def test_an_engine_of_both_roles_reads_at_the_end(make_engine: Make) -> None:
    """Goal: two engines that prefill for each other cannot hold each other's blocks. Method: a decode engine of both roles must
    have no block before the prefill has ended."""
    producer = make_engine("kv_both", chunk=CHUNK, transfer_mode="stream")
    consumer = make_engine("kv_both", transfer_mode="stream")
    earlier = prefill(producer, prompt_of(3))
    first = consumer.add(prompt_of(3), transfer=earlier, max_tokens=1)
    consumer.run_until(first)
    source = producer.add(prompt_of(500), transfer={"do_remote_decode": True, "transfer_id": "t"}, max_tokens=1)
    params = foretell(earlier, TransferId("t"), secret=None, now_s=time.time())
    request_id = consumer.add(prompt_of(500), transfer=params)
    while source not in producer.finished:
        producer.step()
        consumer.step()
        time.sleep(0.005)
        assert source in producer.finished or not consumer.block_ids(request_id)

    consumer.run_until(request_id)
    assert request_id in consumer.loaded
    settle(producer, consumer)


def test_a_prefill_streams_and_saves_into_the_pool(make_engine: Make, pool_master: Any) -> None:
    """Goal: two followers of one prefill do not confuse their steps. Method: both connectors in one; decode reads while the
    pool saves; an engine with the pool alone then loads all of it."""
    pool = pool_options(pool_master, tenant=uuid.uuid4().hex)
    both = {**pool, "connector": "MooncakeConnectorV1", "prefix_pooling": True}
    pair = Pair(make_engine, prefill_options=both, decode_options=both)
    other = make_engine("kv_both", **pool)
    prompt = prompt_of(7 * CHUNK + 9)
    _, request_id = pair.add(prompt)
    pair.run_loaded(prompt, request_id)
    pair.run(request_id)
    pair.settle()

    loaded = other.add(prompt, max_tokens=2)
    while other.status(loaded) != "RUNNING":
        other.step()
    assert other.holds_kv(prompt, other.block_ids(loaded), num_tokens=7 * CHUNK)
    other.run_until(loaded)
    assert loaded in other.loaded
    settle(other)
