"""cli.bench.pd_asking against a server on loopback that speaks vLLM's streams: what is read, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping

import pytest
from aiohttp import web

from vllm_mooncake_ascend.cli.bench.pd_asking import ANSWER_TOKENS, Answer, Handover, Way, ask_by
from vllm_mooncake_ascend.cli.demo_client import RequestFailed, new_session

Body = dict[str, object]
EVENTS = [
    {
        "choices": [
            {
                "logprobs": {
                    "tokens": [f"token_id:{10 + number}"],
                    "top_logprobs": [{f"token_id:{10 + number}": -0.5, "token_id:1": -0.75}],
                }
            }
        ]
    }
    for number in range(ANSWER_TOKENS)
]
ANSWERED = {"do_remote_prefill": True, "remote_host": "here"}


def asked(way: Callable[[str], Way], respond: Callable[[web.Request, Body], Awaitable[web.StreamResponse]]) -> Answer:
    """One prompt to a server that answers so; `way` is given its URL."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await respond(request, await request.json())

    async def run() -> Answer:
        app = web.Application()
        app.router.add_post("/{side}/v1/completions", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with new_session() as session:
                return await ask_by(session, way(f"http://127.0.0.1:{runner.addresses[0][1]}"), [5, 6, 7])
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def one_url(url: str) -> Way:
    return Way(subject="plain", flow="one url", url=f"{url}/decode")


async def stream(request: web.Request, events: list[Mapping[str, object]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def test_tokens_and_margins_are_read() -> None:
    """Goal: the ids that are compared, the next best ones, and by how much each was the best."""

    async def respond(request: web.Request, _body: Body) -> web.StreamResponse:
        return await stream(request, EVENTS)

    answer = asked(one_url, respond)
    assert tuple(range(10, 10 + ANSWER_TOKENS)) == answer.token_ids
    assert ((1,) * ANSWER_TOKENS, (0.25,) * ANSWER_TOKENS) == (answer.next_ids, answer.margins)
    assert answer.first_token_s > 0


@pytest.mark.parametrize("flow", ["prefill first", "both at once"])
def test_both_engines_are_told_of_one_transfer(flow: str) -> None:
    """Goal: legs as the handover wants them. Method: a handover that says all itself; bodies as they came."""
    bodies: dict[str, Body] = {}

    async def respond(request: web.Request, body: Body) -> web.StreamResponse:
        bodies[request.match_info["side"]] = body
        if request.match_info["side"] == "prefill":
            return web.json_response({"choices": [], "kv_transfer_params": ANSWERED})
        return await stream(request, EVENTS)

    handover = Handover(prefill={"do_remote_decode": True}, decode={"do_remote_prefill": True})
    asked(lambda url: legs(url, flow, handover), respond)
    prefill, decode = (bodies[side]["kv_transfer_params"] for side in ("prefill", "decode"))
    assert isinstance(prefill, dict)
    assert isinstance(decode, dict)
    assert prefill["transfer_id"] == decode["transfer_id"]
    assert (1, ANSWER_TOKENS) == (bodies["prefill"]["max_tokens"], bodies["decode"]["max_tokens"])


def test_decode_is_told_what_prefill_answered() -> None:
    """Goal: where a handover leaves it to prefill."""
    params: list[object] = []

    async def respond(request: web.Request, body: Body) -> web.StreamResponse:
        if request.match_info["side"] == "prefill":
            return web.json_response({"choices": [], "kv_transfer_params": ANSWERED})
        params.append(body["kv_transfer_params"])
        return await stream(request, EVENTS)

    asked(lambda url: legs(url, "prefill first", Handover(prefill={"do_remote_decode": True})), respond)
    assert [ANSWERED] == params


def legs(url: str, flow: str, handover: Handover) -> Way:
    sides = {"prefill_url": f"{url}/prefill", "decode_url": f"{url}/decode"}
    return Way(subject="peer", flow="both at once" if flow == "both at once" else "prefill first", handover=handover, **sides)


@pytest.mark.parametrize(
    ("events", "words"),
    [(EVENTS[:-1], "7 of 8 tokens"), ([*EVENTS[:2], {"error": "no KV"}], "no KV")],
    ids=["too few tokens", "an error in the stream"],
)
def test_half_an_answer_is_none(events: list[Mapping[str, object]], words: str) -> None:
    """Goal: nothing is timed that was not answered."""

    async def respond(request: web.Request, _body: Body) -> web.StreamResponse:
        return await stream(request, events)

    with pytest.raises(RequestFailed, match=words):
        asked(one_url, respond)


def test_a_refusal_is_told_in_the_engines_words() -> None:
    """Goal: the status and what stands in the body."""

    async def respond(_request: web.Request, _body: Body) -> web.StreamResponse:
        return web.Response(status=500, text="engine is dead")

    with pytest.raises(RequestFailed, match="500: engine is dead"):
        asked(one_url, respond)
