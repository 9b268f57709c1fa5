"""The concurrent flow: decode's leg goes beside prefill's where prefill's answer is known beforehand, and nothing but time
depends on it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vllm_mooncake_ascend.proxy.early import Producers
from vllm_mooncake_ascend.testing.fake_upstream import FakeVllm, Script
from vllm_mooncake_ascend.types import TransferId
from vllm_mooncake_ascend.wire import params as wire_params

ANSWER = "one two three"


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


async def until_seen(fake: FakeVllm, num_generations: int) -> None:
    """Wait until an instance has so many."""
    while len(fake.generations) < num_generations:
        fake.arrived.clear()
        await fake.arrived.wait()


async def held(rig: Any) -> tuple[asyncio.Task[Any], asyncio.Event]:
    """A second request whose prefill is held while its decode leg has gone; the gate lets prefill answer."""
    await rig.post()
    gate = asyncio.Event()
    rig.prefill.scripts.append(Script(head_gate=gate))
    request = asyncio.create_task(rig.post())
    await until_seen(rig.prefill, 2)
    await until_seen(rig.decode, 2)
    return request, gate


async def test_decode_is_asked_beside_prefill(bench: Any) -> None:
    """Goal: both compute at once, and meet under one id. Method: hold prefill's answer; look at what decode was told."""
    async with bench(flow="concurrent") as rig:
        request, gate = await held(rig)
        told = rig.decode.generations[1].body["kv_transfer_params"]
        wish = rig.prefill.generations[1].body["kv_transfer_params"]
        gate.set()
        status, answer = await request

        assert (200, ANSWER) == (status, text_of(answer))
        assert (wish["transfer_id"], 0, "") == (
            told["transfer_id"],
            told["remote_num_tokens"],
            told["remote_prompt_digest"],
        )
        assert (2, 2) == (len(rig.prefill.generations), len(rig.decode.generations))
        assert 1 == rig.value("early_decode_legs_total", result="used")
        assert 2 == rig.value("requests_total", endpoint="/v1/completions", status="200", pd_mode="remote")


async def test_the_first_request_to_an_instance_is_sequential(bench: Any) -> None:
    """Goal: nothing is foretold of a stranger. Method: hold the first prefill."""
    async with bench(flow="concurrent") as rig:
        gate = asyncio.Event()
        rig.prefill.scripts.append(Script(head_gate=gate))
        request = asyncio.create_task(rig.post())
        await until_seen(rig.prefill, 1)
        assert 0 == len(rig.decode.generations)
        gate.set()
        await request


async def test_the_sequential_flow_never_asks_early(bench: Any) -> None:
    """Goal: the setting is heeded. Method: the same without it."""
    async with bench() as rig:
        for _ in range(3):
            await rig.post()
        assert [7, 7, 7] == [seen.body["kv_transfer_params"]["remote_num_tokens"] for seen in rig.decode.generations]


async def test_a_stream_is_passed_on_from_an_early_leg(bench: Any) -> None:
    """Goal: the way of the answer is the same. Method: stream the second request."""
    async with bench(flow="concurrent") as rig:
        await rig.post()
        status, text = await rig.post(stream=True)

        assert (200, True, True) == (status, "one" in text, "[DONE]" in text)
        assert 1 == rig.value("early_decode_legs_total", result="used")


@pytest.mark.parametrize("change", ["incarnation", "transfer"])
async def test_an_answer_that_was_not_foretold_sends_the_leg_anew(bench: Any, change: str) -> None:
    """Goal: a restarted engine, or a renamed transfer, costs time and nothing else. Method: prefill answers otherwise."""
    async with bench(flow="concurrent") as rig:
        rig.decode.scripts.extend([Script(), Script(head_gate=asyncio.Event())])
        request, gate = await held(rig)
        rig.prefill.incarnation = "incarnation-2" if change == "incarnation" else rig.prefill.incarnation
        params_for = rig.prefill.params_for
        if change == "transfer":
            rig.prefill.params_for = lambda _: params_for("renamed")
        gate.set()
        status, answer = await request
        await rig.decode.aborted.wait()

        assert (200, ANSWER) == (status, text_of(answer))
        told = rig.decode.generations[2].body["kv_transfer_params"]
        assert rig.prefill.incarnation == told["remote_incarnation"]
        assert ("renamed" == told["transfer_id"]) == (change == "transfer")
        assert 1 == rig.value("early_decode_legs_total", result="dropped")


async def test_a_request_that_prefill_rejects_is_taken_back_from_decode(bench: Any) -> None:
    """Goal: the client gets prefill's words, decode computes nothing. Method: prefill answers 400 while decode waits."""
    async with bench(flow="concurrent") as rig:
        await rig.post()
        gate = asyncio.Event()
        rig.decode.scripts.append(Script(head_gate=asyncio.Event()))
        rig.prefill.scripts.append(Script(head_gate=gate, status=400, body=b'{"error": "too long"}'))
        request = asyncio.create_task(rig.post())
        await until_seen(rig.decode, 2)
        gate.set()

        assert (400, {"error": "too long"}) == await request
        await rig.decode.aborted.wait()


async def test_a_failed_prefill_is_tried_elsewhere(bench: Any) -> None:
    """Goal: each attempt has its own id and its own leg. Method: the first prefill instance fails the third request."""
    async with bench(flow="concurrent", num_prefills=2) as rig:
        await rig.post()
        await rig.post()
        rig.prefills[0].scripts.append(Script(status=500, body=b"{}"))
        status, answer = await rig.post()

        assert (200, ANSWER) == (status, text_of(answer))
        wish = rig.prefills[1].generations[1].body["kv_transfer_params"]["transfer_id"]
        assert wish == rig.decode.generations[-1].body["kv_transfer_params"]["transfer_id"]
        assert (1, 1) == tuple(rig.value("early_decode_legs_total", result=result) for result in ("used", "dropped"))


async def test_an_early_leg_that_fails_is_asked_again_elsewhere(bench: Any) -> None:
    """Goal: decode's failures are dealt with as ever. Method: the decode instance asked early breaks off."""
    async with bench(flow="concurrent", num_decodes=2) as rig:
        await rig.post()
        rig.decodes[1].scripts.append(Script(cut_after_events=0))
        status, answer = await rig.post()

        assert (200, ANSWER) == (status, text_of(answer))
        assert 7 == rig.decodes[0].generations[-1].body["kv_transfer_params"]["remote_num_tokens"]
        assert 1 == rig.value("retries_total", leg="decode", reason="reset")


async def test_a_client_that_leaves_ends_both_legs(bench: Any) -> None:
    """Goal: nobody computes for nobody. Method: leave while prefill computes and decode waits."""
    async with bench(flow="concurrent") as rig:
        rig.decode.scripts.extend([Script(), Script(head_gate=asyncio.Event())])
        request, _ = await held(rig)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await rig.prefill.aborted.wait()
        await rig.decode.aborted.wait()
        await rig.sender.came.wait()

        wish = rig.prefill.generations[1].body["kv_transfer_params"]["transfer_id"]
        assert [wish] == [params["transfer_id"] for params in rig.sender.released]


async def test_odd_params_of_an_earlier_answer_fail_no_request(bench: Any) -> None:
    """Goal: what cannot be foretold is asked one leg after the other, as ever. Method: a prefill engine whose params are none
    of ours."""
    async with bench(flow="concurrent") as rig:
        params_for = rig.prefill.params_for
        rig.prefill.params_for = lambda transfer_id: params_for(transfer_id) | {"remote_port": "none"}

        assert [200, 200] == [(await rig.post())[0] for _ in range(2)]
        assert ["none", "none"] == [seen.body["kv_transfer_params"]["remote_port"] for seen in rig.decode.generations]


async def test_an_answer_of_decode_that_nobody_takes_is_closed(bench: Any) -> None:
    """Goal: no connection is left when decode was faster than a prefill that then fails. Method: decode answers at once."""
    async with bench(flow="concurrent") as rig:
        await rig.post()
        gate = asyncio.Event()
        rig.prefill.scripts.append(Script(head_gate=gate, status=400, body=b"{}"))
        rig.decode.scripts.append(Script(event_gate=asyncio.Event()))
        request = asyncio.create_task(rig.post(stream=True))
        await until_seen(rig.decode, 2)
        await asyncio.sleep(0.05)
        gate.set()
        await request
        await rig.decode.aborted.wait()


# --- what is foretold --------------------------------------------------------------------------------------------------------


def params(incarnation: str = "i", **changes: Any) -> dict[str, Any]:
    return FakeVllm("prefill", incarnation=incarnation).params_for("t") | changes


def test_several_engines_behind_one_url_foretell_nothing() -> None:
    """Goal: decode is not sent to the wrong engine again and again. Method: answers of two producers in turn, one twice."""
    producers = Producers(foretells=True, secret=None)
    found = []
    for incarnation in ("a", "b", "a", "a", "b"):
        producers.learn("url", params(incarnation))
        found.append(producers.foretell("url", TransferId("t2"), 0.0) is not None)

    assert [True, False, False, True, False] == found


@pytest.mark.parametrize(
    ("given", "secret", "is_foretold"),
    [
        ({}, None, True),
        ({"remote_dp_size": 2}, None, False),
        ({"signature": "s"}, None, False),
        ({"signature": "s"}, b"secret of the cluster", True),
        ({}, b"secret of the cluster", False),
        ({"do_remote_prefill": False}, None, False),
        ({"remote_port": "none"}, None, False),
        ({"do_remote_prefill": "yes"}, None, False),
    ],
)
def test_who_cannot_know_foretells_nothing(given: dict[str, Any], secret: bytes | None, is_foretold: bool) -> None:
    """Goal: nothing that decode would refuse. Method: several DP ranks, signatures with and without our knowing the secret."""
    producers = Producers(foretells=True, secret=secret)
    producers.learn("url", params(**given))

    assert is_foretold == (producers.foretell("url", TransferId("t2"), 0.0) is not None)


def test_what_is_foretold_is_signed_as_prefill_signs() -> None:
    """Goal: engines with a secret accept it. Method: check it as decode does."""
    secret = b"secret of the cluster"
    signed = wire_params.issue(_transfer("t"), secret=secret, now_s=5.0)
    told = wire_params.foretell(signed, TransferId("t2"), secret=secret, now_s=9.0)

    found = wire_params.parse(told, secret=secret, now_s=9.0)
    assert isinstance(found, wire_params.RemotePrefill)
    assert ("t2", 0, b"") == (found.transfer_id, found.num_tokens, found.prompt_digest)


def _transfer(transfer_id: str) -> wire_params.RemotePrefill:
    found = wire_params.parse(params(transfer_id=transfer_id), secret=None, now_s=0.0)
    assert isinstance(found, wire_params.RemotePrefill)
    return found
