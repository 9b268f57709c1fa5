"""What two engines made by hand must survive: hostile hosts, ids that come again, full pools, odd moments.

As in `test_two_engines`, every test ends with all blocks back on each engine (`settle`).
"""

from __future__ import annotations

import time

import pytest

pytest.importorskip("vllm")
pytest.importorskip("mooncake")

from tests.connector.test_two_engines import BLOCK, Make, prefill, prompt_of, settle

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
    engine.run_until(request_id, max_steps=20_000)

    assert [10, 11, 12, 13] == engine.tokens[request_id]
    settle(engine)


def test_a_request_id_that_comes_again_is_read_again(make_engine: Make) -> None:
    """Goal: request ids may repeat once their request has ended. Method: two transfers under one id, one after the other."""
    producer, consumer = make_engine("kv_producer"), make_engine("kv_consumer")
    for salt in range(2):
        prompt = prompt_of(200, salt=salt)
        consumer.add(prompt, transfer=prefill(producer, prompt), request_id="again")
        for _ in range(400):
            if consumer.status("again") == "RUNNING":
                break
            consumer.step()
        assert "RUNNING" == consumer.status("again")
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
    from vllm_mooncake_ascend.connectors.scheduler_side import _worker_step
    from vllm_mooncake_ascend.p2p import actions
    from vllm_mooncake_ascend.types import Incarnation
    from vllm_mooncake_ascend.wire.steps import PeerRanks

    share = actions.ShareLayout(peer=PeerRanks(incarnation=Incarnation("p"), ranks=()))
    forget = actions.ForgetLayout(incarnation="p")

    assert [(), ("p",), ()] == [_worker_step(seen).forget for seen in ([forget, share], [share, forget], [share])]
