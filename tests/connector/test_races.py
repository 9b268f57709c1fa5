"""What two engines made by hand must survive: hostile hosts, ids that come again, full pools, odd moments.

As in `test_two_engines`, every test ends with all blocks back on each engine (`settle`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from tests.connector.test_two_engines import BLOCK, Make, prefill, prompt_of, settle
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.connectors import versions
from vllm_mooncake_ascend.engines.base import ReadResult
from vllm_mooncake_ascend.types import Outcome

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("host", ["::1%a b", "::1%/x", "::1%\u00e9", "::1%;y"])
def test_no_host_name_of_a_client_ends_the_engine(make_engine: Make, host: str) -> None:
    """Goal: what the API takes for an address ZMQ may not. Method: loopback addresses with odd zones, then a plain request."""
    engine = make_engine("kv_consumer")
    hostile = {
        "do_remote_prefill": True,
        "transfer_id": "t",
        "remote_incarnation": "i",
        "remote_host": host,
        "remote_port": 9,
        "remote_num_tokens": 70,
        "remote_prompt_digest": "",
    }

    request_id = engine.add(prompt_of(70), transfer=hostile)
    engine.run_until(request_id)

    assert [10, 11, 12, 13] == engine.tokens[request_id]
    settle(engine)


def test_a_request_id_that_comes_again_is_read_again(make_engine: Make) -> None:
    """Goal: request ids may repeat once their request has ended. Method: two transfers under one id, one after the other."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    for salt in range(2):
        prompt = prompt_of(200, salt=salt)
        consumer.add(prompt, transfer=prefill(producer, prompt), request_id="again")
        consumer.step_to_running("again")
        assert consumer.holds_kv(prompt, consumer.block_ids("again"), num_tokens=199)
        consumer.abort("again")
        consumer.step()
    settle(producer, consumer)


def test_an_engine_full_of_leases_does_not_spin(make_engine: Make) -> None:
    """Goal: a prefill that waits for leased blocks costs no core. Method: fill the pool with leases, time empty steps."""
    producer = make_engine("kv_producer", num_blocks=24, lease_ttl_s=1.0)
    prefill(producer, prompt_of(20 * BLOCK))
    waiting = producer.add(prompt_of(10 * BLOCK, salt=1), transfer={"do_remote_decode": True}, max_tokens=1)
    producer.step()

    start_s = time.monotonic()
    for _ in range(20):
        producer.step()

    assert "WAITING" == producer.status(waiting)
    assert time.monotonic() - start_s > 20 * 0.004
    producer.run_until(waiting)
    settle(producer)


def test_a_shared_prefix_fills_the_bound_once(make_engine: Make) -> None:
    """Goal: leases of one long system prompt all fit. Method: many prompts that share most blocks, a small pool."""
    producer, consumer = make_engine("kv_producer", num_blocks=64), make_engine("kv_consumer", num_blocks=128)
    shared = prompt_of(30 * BLOCK)
    prompts = [shared + prompt_of(20, salt=salt) for salt in range(6)]
    params = [prefill(producer, prompt) for prompt in prompts]

    assert [6] == [producer.connector._scheduling._shell.gauges()["leases_open"]]
    requests = [consumer.add(prompt, transfer=given) for prompt, given in zip(prompts, params, strict=True)]
    consumer.run_until(*requests)
    settle(producer, consumer)


def test_a_producer_met_again_between_two_steps_stays_known() -> None:
    """Goal: a forgotten and rediscovered peer is readable for ever after. Method: both within what one step carries."""
    from vllm_mooncake_ascend.connectors.p2p_scheduler_side import _worker_step
    from vllm_mooncake_ascend.p2p import actions
    from vllm_mooncake_ascend.types import Incarnation
    from vllm_mooncake_ascend.wire.steps import PeerRanks

    share = actions.ShareLayout(peer=PeerRanks(incarnation=Incarnation("p"), ranks=()))
    forget = actions.ForgetLayout(incarnation="p")

    assert [(), ("p",), ()] == [_worker_step(seen).forget for seen in ([forget, share], [share, forget], [share])]


def test_two_ranks_move_their_own_heads(make_engine: Make) -> None:
    """Goal: tensor parallel engines read each other's KV. Method: one worker connector a rank, vLLM's aggregator."""
    producer, consumer = make_engine("kv_producer", tensor_parallel=2), make_engine("kv_consumer", tensor_parallel=2)
    for num_tokens in (33, 600):
        prompt = prompt_of(num_tokens, salt=num_tokens)
        request_id = consumer.add(prompt, transfer=prefill(producer, prompt))
        consumer.step_to_running(request_id)
        assert consumer.holds_kv(prompt, consumer.block_ids(request_id), num_tokens=num_tokens - 1)
        assert request_id in consumer.loaded
        consumer.run_until(request_id)
    settle(producer, consumer)


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1)])
def test_unequal_ranks_compute_locally(make_engine: Make, prefill_ranks: int, decode_ranks: int) -> None:
    """Goal: what is not supported costs no answer and no block. Method: engines of one and two ranks."""
    producer = make_engine("kv_producer", tensor_parallel=prefill_ranks)
    consumer = make_engine("kv_consumer", tensor_parallel=decode_ranks)
    prompt = prompt_of(100)
    request_id = consumer.add(prompt, transfer=prefill(producer, prompt))
    consumer.run_until(request_id)
    assert (set(), [10, 11, 12, 13]) == (consumer.loaded, consumer.tokens[request_id])
    settle(producer, consumer)


@pytest.mark.parametrize("num_steps", range(5))
def test_an_abort_between_the_halves_of_a_step_of_two_ranks(make_engine: Make, num_steps: int) -> None:
    """Goal: ranks may end a read in different steps, and the request at any time. Method: abort with a step under way."""
    producer, consumer = make_engine("kv_producer", tensor_parallel=2), make_engine("kv_consumer", tensor_parallel=2)
    prompt = prompt_of(900)
    request_id = consumer.add(prompt, transfer=prefill(producer, prompt), max_tokens=50)
    for _ in range(num_steps):
        consumer.step()
    consumer.schedule()
    consumer.abort(request_id)
    consumer.finish()
    settle(producer, consumer)


@pytest.mark.parametrize("num_steps", range(1, 7))
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_abort_with_two_steps_under_way(make_engine: Make, num_steps: int, prefix_caching: bool) -> None:
    """Goal: asynchronous scheduling has a report, an abort and another step in flight at once. Method: all of it by hand."""
    producer = make_engine("kv_producer", prefix_caching=prefix_caching)
    consumer = make_engine("kv_consumer", asynchronous=True, prefix_caching=prefix_caching)
    prompt = prompt_of(900)
    request_id = consumer.add(prompt, transfer=prefill(producer, prompt), max_tokens=50)
    consumer.schedule()
    for _ in range(num_steps):
        consumer.schedule()
        consumer.finish()
    consumer.abort(request_id)
    if consumer.scheduler.has_requests():
        consumer.schedule()
        consumer.finish()
    consumer.finish()
    settle(producer, consumer)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted_prefills_offer_only_whole_kv(make_engine: Make, asynchronous: bool) -> None:
    """Goal: a prefill that lost its blocks offers those it has at its end. Method: a pool too small for what runs; decode
    reads, and what it loads is right."""
    producer = make_engine("kv_producer", num_blocks=24, chunk=64, asynchronous=asynchronous, lease_ttl_s=1.0)
    consumer = make_engine("kv_consumer", num_blocks=128)
    prompts = [prompt_of(9 * BLOCK + 5, salt=salt) for salt in range(4)]
    sources = [producer.add(p, transfer={"do_remote_decode": True}, max_tokens=40, ignore_eos=True) for p in prompts]
    _drive(producer, sources, asynchronous=asynchronous)
    for prompt, source in zip(prompts, sources, strict=True):
        if producer.params[source] is None:
            continue
        request_id = consumer.add(prompt, transfer=producer.params[source])
        consumer.step_to_running(request_id)
        assert consumer.holds_kv(prompt, consumer.block_ids(request_id), num_tokens=len(prompt) - 1)
        consumer.run_until(request_id)
    settle(producer, consumer)


def _drive(engine: Any, request_ids: list[str], *, asynchronous: bool) -> None:
    """Run requests to their end, one step ahead where scheduling is asynchronous."""
    if asynchronous:
        engine.schedule()
    engine.drive(*request_ids)


class LateEngine:
    """A transfer engine without a fence whose reads end UNKNOWN; what they asked for lands when the test says so."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._asked: list[tuple[Any, Any]] = []

    def read(self, session: Any, batch: Any) -> ReadResult:
        self._asked.append((session, batch))
        return ReadResult(outcome=Outcome.UNKNOWN, reason="the test wants it so")

    def fence(self) -> bool:
        return False

    def land(self) -> None:
        """The late bytes come: garbage."""
        for _, batch in self._asked:
            for address, length_bytes in zip(batch.local_addresses.tolist(), batch.lengths_bytes.tolist(), strict=True):
                ctypes.memset(address, 0x7F, length_bytes)

    def close(self) -> None:
        self._engine.close()


@pytest.mark.parametrize(("num_local_blocks", "num_ranks"), [(0, 1), (3, 1), (3, 2)])
def test_late_bytes_of_an_unknown_read_meet_no_kv(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, num_local_blocks: int, num_ranks: int
) -> None:
    """Goal: blocks in which bytes may land are nobody's. Method: a read without a fence; its bytes come when the request,
    and others with it, run (0.30+), or shortly before its report (older)."""
    producer = make_engine("kv_producer", tensor_parallel=num_ranks)
    consumer = make_engine("kv_consumer", num_blocks=50, tensor_parallel=num_ranks)
    monkeypatch.setattr(limits, "QUARANTINE_S", 1.5)  # after they checked that theirs is long enough
    runner = consumer.workers[-1]._working._worker._runner
    late = runner._engine = LateEngine(runner._engine)
    prompt, other = prompt_of(300), prompt_of(400, salt=1)
    if num_local_blocks:
        consumer.run_until(consumer.add(prompt[: num_local_blocks * BLOCK + 1], max_tokens=1))

    request_id = consumer.add(prompt, transfer=prefill(producer, prompt), max_tokens=8)
    beside = consumer.add(other, max_tokens=500)
    while beside not in consumer.scheduler.requests or consumer.status(beside) != "RUNNING" or not late._asked:
        consumer.step()
    if versions.HAS_FAILED_RECEIVES:
        consumer.step_to_running(request_id)
    late.land()
    assert consumer.holds_kv(other, consumer.block_ids(beside), num_tokens=len(other))
    consumer.step_to_running(request_id)
    consumer.step()
    assert consumer.holds_kv(prompt, consumer.block_ids(request_id), num_tokens=len(prompt))
    consumer.run_until(request_id, beside)
    assert ({request_id}, set()) == (consumer.not_loaded, consumer.loaded)
    settle(producer, consumer)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_read_that_fails_follows_the_policy(make_engine: Make, policy: str, num_ranks: int) -> None:
    """Goal: a failed load is computed again, or fails its request, by `load_failure_policy`. Method: prefill answers, but
    the engine of its last worker is gone."""
    producer = make_engine("kv_producer", tensor_parallel=num_ranks)
    consumer = make_engine("kv_consumer", tensor_parallel=num_ranks, load_failure_policy=policy)
    prompt = prompt_of(300)
    params = prefill(producer, prompt)
    producer.workers[-1].shutdown()

    request_id = consumer.add(prompt, transfer=params)
    consumer.run_until(request_id)

    expected = ("length", [10, 11, 12, 13]) if policy == "recompute" else ("error", [])
    assert expected == (consumer.finished[request_id], consumer.tokens[request_id])
    assert {request_id} == consumer.not_loaded
    settle(producer, consumer)


class SlowEngine:
    """A transfer engine whose reads wait until the test lets them go on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.is_reading = threading.Event()
        self.may_go_on = threading.Event()

    def read(self, session: Any, batch: Any) -> ReadResult:
        self.is_reading.set()
        self.may_go_on.wait(30.0)
        result: ReadResult = self._engine.read(session, batch)
        return result

    def fence(self) -> bool:
        return bool(self._engine.fence())


@pytest.mark.parametrize("is_aborted", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_behind_the_others_is_waited_for(make_engine: Make, is_aborted: bool, asynchronous: bool) -> None:
    """Goal: nothing runs on, and nobody else gets, blocks that one rank still reads into. Method: the second rank's call
    stands still for many steps; the request waits, or is aborted meanwhile."""
    producer = make_engine("kv_producer", tensor_parallel=2)
    consumer = make_engine("kv_consumer", tensor_parallel=2, asynchronous=asynchronous)
    runner = consumer.workers[-1]._working._worker._runner
    slow = runner._engine = SlowEngine(runner._engine)
    prompt = prompt_of(300)
    request_id = consumer.add(prompt, transfer=prefill(producer, prompt), max_tokens=2)
    if asynchronous:
        consumer.schedule()
    while not slow.is_reading.is_set():
        consumer.schedule()
        consumer.finish()
    if is_aborted:
        consumer.abort(request_id)
    for _ in range(30):
        consumer.schedule()
        consumer.finish()
    assert (set(), set()) == (consumer.loaded, consumer.not_loaded)
    assert consumer.free_at_start - 10 == consumer.num_free_blocks

    slow.may_go_on.set()
    while request_id in consumer.scheduler.requests:
        consumer.schedule()
        consumer.finish()
    while consumer.steps:
        consumer.finish()

    expected = ({request_id}, set(), []) if is_aborted else (set(), {request_id}, [10, 11])
    assert expected == (consumer.not_loaded, consumer.loaded, consumer.tokens[request_id])
    settle(producer, consumer)
