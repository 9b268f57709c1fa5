"""The whole way of a request that meets no trouble: client, prefill, decode, client."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest

from vllm_mooncake_ascend.testing.fake_upstream import Script


async def test_prefill_computes_and_decode_answers(bench: Any) -> None:
    """Goal: both legs are sent, in order, and the client gets decode's words. Method: one plain completion."""
    async with bench() as rig:
        status, answer = await rig.post(max_tokens=3)

        assert (200, "one two three") == (status, answer["choices"][0]["text"])
        assert (1, 1) == (len(rig.prefill.generations), len(rig.decode.generations))


async def test_decode_gets_the_params_of_prefill_unchanged(bench: Any) -> None:
    """Goal: fields that vLLM added survive the way. Method: compare what the fake prefill issued with what decode saw."""
    async with bench() as rig:
        await rig.post(max_tokens=3)

        transfer_id = rig.prefill.generations[0].body["kv_transfer_params"]["transfer_id"]
        assert rig.prefill.params_for(transfer_id) == rig.decode.generations[0].body["kv_transfer_params"]


async def test_decode_gets_the_clients_own_request(bench: Any) -> None:
    """Goal: nothing of the rewriting for prefill reaches decode. Method: send many options, look at decode's body."""
    asked = {"prompt": "p", "max_tokens": 9, "min_tokens": 2, "stop": ["x"], "n": 2, "logprobs": 1, "unknown": {"a": None}}
    async with bench() as rig:
        await rig.post(**asked)

        seen = rig.decode.generations[0].body
        del seen["kv_transfer_params"]
        assert asked == seen


async def test_each_request_has_a_transfer_id_of_its_own(bench: Any) -> None:
    """Goal: no two requests share KV. Method: two equal requests, two ids."""
    async with bench() as rig:
        await rig.post()
        await rig.post()

        assert 2 == len({seen.body["kv_transfer_params"]["transfer_id"] for seen in rig.prefill.generations})


async def test_a_stream_comes_through_byte_by_byte(bench: Any) -> None:
    """Goal: a stream is not re-written. Method: compare with the fake's own events."""
    async with bench() as rig:
        status, text = await rig.post(stream=True)

        expected = [b'data: {"choices":[{"index":0,"text":"%s"}]}\n\n' % word for word in (b"one", b" two", b" three")]
        assert (200, b"".join([*expected, b"data: [DONE]\n\n"])) == (status, text.encode())


async def test_an_event_reaches_the_client_before_the_next_exists(bench: Any) -> None:
    """Goal: tokens are not held back. Method: decode's second event waits until the client has seen the first."""
    async with bench() as rig:
        gate = asyncio.Event()
        rig.decode.scripts.append(Script(event_gate=gate))
        async with rig.client.post("/v1/completions", json={"prompt": "p", "stream": True}) as response:
            first = await response.content.readuntil(b"\n\n")
            gate.set()
            rest = await response.content.read()

        assert b"one" in first
        assert b"three" in rest


async def test_a_long_prompt_comes_through(bench: Any) -> None:
    """Goal: bodies of megabytes pass. Method: a million token ids arrive on both legs."""
    prompt = list(range(1_000_000))
    async with bench() as rig:
        raw = io.BytesIO(json.dumps({"prompt": prompt}).encode())
        async with rig.client.post("/v1/completions", data=raw) as response:
            await response.read()

        assert prompt == rig.prefill.generations[0].body["prompt"] == rig.decode.generations[0].body["prompt"]


async def test_chat_goes_the_same_way(bench: Any) -> None:
    """Goal: both endpoints are served. Method: a chat request; prefill is limited by both names of the limit."""
    async with bench() as rig:
        status, _ = await rig.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=50)

        body = rig.prefill.generations[0].body
        assert (200, 1, 1) == (status, body["max_tokens"], body["max_completion_tokens"])


async def test_params_sent_by_a_client_reach_no_engine(bench: Any) -> None:
    """Goal: a client cannot name engines to read from. Method: send hostile params in both places they could be."""
    hostile = {"do_remote_prefill": True, "remote_host": "evil", "transfer_id": "t"}
    async with bench() as rig:
        await rig.post(kv_transfer_params=hostile, vllm_xargs={"kv_transfer_params": "evil", "kept": 1})

        raw = rig.prefill.generations[0].raw + rig.decode.generations[0].raw
        assert b"evil" not in raw
        assert {"kept": 1} == rig.decode.generations[0].body["vllm_xargs"]


async def test_instances_take_turns(bench: Any) -> None:
    """Goal: load is spread over both roles. Method: four requests on two and two."""
    async with bench(num_prefills=2, num_decodes=2) as rig:
        for _ in range(4):
            await rig.post()

        assert [2, 2, 2, 2] == [len(fake.generations) for fake in rig.prefills + rig.decodes]


async def test_authorization_and_request_id_reach_both_legs(bench: Any) -> None:
    """Goal: engines with an API key work, and one id finds the request in every log. Method: send both headers."""
    async with bench() as rig:
        sent = {"Authorization": "Bearer key", "X-Request-Id": "mine", "X-Data-Parallel-Rank": "1"}
        async with rig.client.post("/v1/completions", json={"prompt": "p"}, headers=sent) as response:
            answered_id = response.headers["X-Request-Id"]

        for fake in (rig.prefill, rig.decode):
            headers = fake.generations[0].headers
            assert ("Bearer key", "mine") == (headers["authorization"], headers["x-request-id"])
            assert "x-data-parallel-rank" not in headers
        assert "mine" == answered_id


async def test_a_request_without_an_id_gets_one(bench: Any) -> None:
    """Goal: every request can be found. Method: send none; both legs and the answer have the same."""
    async with bench() as rig:
        async with rig.client.post("/v1/completions", json={"prompt": "p"}) as response:
            answered_id = response.headers["X-Request-Id"]

        assert {answered_id} == {fake.generations[0].headers["x-request-id"] for fake in (rig.prefill, rig.decode)}


@pytest.mark.parametrize(
    ("reason", "body"),
    [
        ("prompt_list", {"prompt": ["a", "b"]}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("beam_search", {"use_beam_search": True}),
    ],
)
async def test_what_prefill_is_no_use_for_goes_to_decode_alone(bench: Any, reason: str, body: dict[str, Any]) -> None:
    """Goal: no KV is computed that nobody would read. Method: prefill sees nothing, decode the body as it was."""
    async with bench() as rig:
        status, _ = await rig.post(**body)

        assert (200, []) == (status, rig.prefill.seen)
        assert "kv_transfer_params" not in rig.decode.generations[0].body
        assert (1, 1) == (
            rig.value("local_requests_total", reason=reason),
            rig.value("requests_total", endpoint="/v1/completions", status="200", pd_mode="local"),
        )


async def test_nothing_is_released_when_decode_reads(bench: Any) -> None:
    """Goal: a release never races a read. Method: a request that goes well releases nothing."""
    async with bench() as rig:
        await rig.post()
        await rig.post(stream=True)

    assert [] == rig.sender.released


async def test_cached_tokens_are_those_of_prefill(bench: Any) -> None:
    """Goal: tokens that came over the wire are not told as cached. Method: prefill had 4 cached, decode says 7."""
    async with bench(cached_tokens={"prefill": 4, "decode": 7}) as rig:
        _, whole = await rig.post()
        _, streamed = await rig.post(stream=True, stream_options={"include_usage": True})

        last = json.loads(streamed.split("\n\n")[-3].removeprefix("data: "))
        assert [4, 4] == [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (whole, last)]


async def test_cached_tokens_of_a_failed_prefill_do_not_count(bench: Any) -> None:
    """Goal: decode's own figure stands when it computed the prompt. Method: prefill tells 4, but gives no params."""
    useless = b'{"usage":{"prompt_tokens_details":{"cached_tokens":4}}}'
    async with bench(cached_tokens={"prefill": 4, "decode": 7}, on_prefill_unavailable="local") as rig:
        rig.prefill.scripts.append(Script(body=useless))
        _, answer = await rig.post()

        assert 7 == answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_stream_has_usage_only_when_asked(bench: Any) -> None:
    """Goal: the proxy adds no usage. Method: a stream without include_usage."""
    async with bench(cached_tokens={"prefill": 4, "decode": 7}) as rig:
        _, streamed = await rig.post(stream=True)

        assert "usage" not in streamed


async def test_models_are_those_of_decode(bench: Any) -> None:
    """Goal: clients can list models. Method: GET passes to decode with its query."""
    async with bench() as rig, rig.client.get("/v1/models?x=1") as response:
        answer = await response.json()

        assert {"from": rig.decode.url, "path": "/v1/models"} == answer


async def test_tokenize_passes_its_body(bench: Any) -> None:
    """Goal: helper calls work as on an engine. Method: the body arrives as it was sent."""
    async with bench() as rig:
        async with rig.client.post("/tokenize", data=b'{"prompt" : "x"}', headers={"Content-Type": "application/json"}):
            pass

        assert b'{"prompt" : "x"}' == rig.decode.seen[0].raw
