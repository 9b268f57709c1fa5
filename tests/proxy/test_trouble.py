"""What the client sees, and what is released, when instances refuse, fail, break or vanish."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.testing.fake_upstream import Script

REFUSAL = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'


async def test_a_refusal_of_prefill_is_passed_unchanged(bench: Any) -> None:
    """Goal: the client reads vLLM's own words. Method: status, bytes and type of a 400; decode is never asked."""
    async with bench(num_prefills=2) as rig:
        rig.prefill.scripts.append(Script(status=400, body=REFUSAL))
        async with rig.client.post("/v1/completions", json={"prompt": "p"}) as response:
            seen = (response.status, await response.read(), response.content_type)

        assert (400, REFUSAL, "application/json") == seen
        assert ([], [], []) == (rig.decode.seen, rig.prefills[1].seen, rig.sender.released)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_refusal_of_decode_is_passed_unchanged_and_releases(bench: Any, is_streamed: bool) -> None:
    """Goal: case R02: never an empty 200, no retry of a 400, prefill's KV let go. Method: decode refuses once."""
    async with bench(num_decodes=2) as rig:
        rig.decode.scripts.append(Script(status=400, body=REFUSAL))
        async with rig.client.post("/v1/completions", json={"prompt": "p", "stream": is_streamed}) as response:
            seen = (response.status, await response.read())
        await rig.sender.came.wait()

        assert (400, REFUSAL) == seen
        assert 1 == len(rig.sender.released)
        assert rig.sender.released[0] == rig.decode.generations[0].body["kv_transfer_params"]
        assert 1 == len(rig.decodes[0].generations + rig.decodes[1].generations)


async def test_a_failed_prefill_is_tried_on_another_with_a_new_id(bench: Any) -> None:
    """Goal: one retry before anything was promised. Method: the first prefill answers 500."""
    async with bench(num_prefills=2) as rig:
        rig.prefill.scripts.append(Script(status=500, body=b"{}"))
        status, _ = await rig.post()

        ids = [fake.generations[0].body["kv_transfer_params"]["transfer_id"] for fake in rig.prefills]
        assert (200, 2) == (status, len(set(ids)))
        assert ids[1] == rig.decode.generations[0].body["kv_transfer_params"]["transfer_id"]
        assert 1 == rig.value("retries_total", leg="prefill", reason="status")


async def test_a_failed_decode_is_tried_on_another_with_the_same_params(bench: Any) -> None:
    """Goal: prefill's work is not lost with a decode engine. Method: the first decode answers 500."""
    async with bench(num_decodes=2) as rig:
        rig.decode.scripts.append(Script(status=500, body=b"{}"))
        status, answer = await rig.post()

        params = [fake.generations[0].body["kv_transfer_params"] for fake in rig.decodes]
        assert (200, "one two three") == (status, answer["choices"][0]["text"])
        assert params[0] == params[1]
        assert (1, []) == (len(rig.prefill.generations), rig.sender.released)


async def test_a_killed_decode_is_tried_on_another(bench: Any) -> None:
    """Goal: a decode that dies before its first byte costs nothing. Method: its connection is reset, then its port closed."""
    async with bench(num_decodes=2) as rig:
        rig.decode.scripts.append(Script(cut_after_events=0))
        first, _ = await rig.post()
        await rig.decode.stop()
        second, _ = await rig.post()

        assert (200, 200) == (first, second)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_two_failed_decodes_end_in_an_error_and_a_release(bench: Any, is_streamed: bool) -> None:
    """Goal: a clear error in bounded tries. Method: both decodes answer 500; a third is not asked."""
    async with bench(num_decodes=3) as rig:
        for fake in rig.decodes:
            fake.scripts.append(Script(status=500, body=b"oops"))
        status, answer = await rig.post(stream=is_streamed)
        await rig.sender.came.wait()

        assert (502, "decode_unavailable") == (status, answer["error"]["type"])
        assert limits.LEG_ATTEMPTS == sum(len(fake.generations) for fake in rig.decodes)
        assert 1 == len(rig.sender.released)


async def test_an_error_as_first_event_counts_as_the_answer(bench: Any) -> None:
    """Goal: vLLM's 200 before it knows is not believed. Method: the first event is an error 500; the next decode serves."""
    failing = (b'data: {"error":{"message":"engine died","type":"x","param":null,"code":500}}\n\n', b"data: [DONE]\n\n")
    async with bench(num_decodes=2) as rig:
        rig.decode.scripts.append(Script(stream=failing))
        status, text = await rig.post(stream=True)

        assert 200 == status
        assert text.startswith('data: {"choices"')


async def test_keep_alive_comments_are_not_the_start_of_an_answer(bench: Any) -> None:
    """Goal: a stream that only keeps alive can still be replaced. Method: a comment, then the connection breaks."""
    async with bench(num_decodes=2) as rig:
        rig.decode.scripts.append(Script(stream=(b": keep-alive\n\n", b"data: x\n\n"), cut_after_events=1))
        status, text = await rig.post(stream=True)

        assert 200 == status
        assert "keep-alive" not in text


async def test_a_stream_that_breaks_ends_with_an_error_event_and_is_not_replayed(bench: Any) -> None:
    """Goal: no token twice, no silence. Method: decode dies in the middle of its third event."""
    async with bench(num_decodes=2) as rig:
        rig.decode.scripts.append(Script(cut_after_events=2))
        status, text = await rig.post(stream=True)

        events = text.split("\n\n")
        assert (200, 4, "") == (status, len(events), events[3])
        assert '"text":" two"' in events[1]
        assert 502 == json.loads(events[2].removeprefix("data: "))["error"]["code"]
        assert [] == rig.decodes[1].seen
        assert [] == rig.sender.released
        assert 1 == rig.value("broken_streams_total")


async def test_a_stream_without_its_end_is_a_broken_stream(bench: Any) -> None:
    """Goal: a truncated answer never looks whole. Method: the body ends properly, but [DONE] never came."""
    async with bench() as rig:
        rig.decode.scripts.append(Script(drop_done=True))
        _, text = await rig.post(stream=True)

        assert "data: [DONE]" not in text
        assert '"decode_lost"' in text


async def test_no_prefill_fails_by_policy(bench: Any) -> None:
    """Goal: case R18 with all prefills down, policy fail. Method: the ports are closed; 503 in JSON, decode is not asked."""
    async with bench(num_prefills=2) as rig:
        for fake in rig.prefills:
            await fake.stop()
        status, answer = await rig.post()

        assert (503, "prefill_unavailable") == (status, answer["error"]["type"])
        assert [] == rig.decode.seen


async def test_no_prefill_runs_on_decode_by_policy(bench: Any) -> None:
    """Goal: case R18 with all prefills down, policy local. Method: the answer is right and counted as a fall-back."""
    async with bench(on_prefill_unavailable="local") as rig:
        await rig.prefill.stop()
        status, answer = await rig.post()

        assert (200, "one two three") == (status, answer["choices"][0]["text"])
        assert "kv_transfer_params" not in rig.decode.generations[0].body
        assert 1 == rig.value("requests_total", endpoint="/v1/completions", status="200", pd_mode="local_fallback")


async def test_a_prefill_without_params_is_not_taken_silently(bench: Any) -> None:
    """Goal: an engine without the connector is named, not worked around. Method: its answer has no kv_transfer_params."""
    async with bench() as rig:
        rig.prefill.scripts.append(Script(body=b'{"choices":[]}'))
        status, answer = await rig.post()

        assert 502 == status
        assert "MooncakeConnectorV1" in answer["error"]["message"]


async def test_a_silent_prefill_is_given_up(bench: Any) -> None:
    """Goal: a stopped process does not hold a client for ever. Method: a very short silence bound; the answer never comes."""
    async with bench(silence_s=0.05) as rig:
        rig.prefill.scripts.append(Script(head_gate=asyncio.Event()))
        status, _ = await rig.post()
        await rig.prefill.aborted.wait()

        assert 504 == status


async def test_a_stream_that_falls_silent_is_ended(bench: Any) -> None:
    """Goal: no hanging stream. Method: the second event never comes; a very short silence bound."""
    async with bench(silence_s=0.05) as rig:
        rig.decode.scripts.append(Script(event_gate=asyncio.Event()))
        _, text = await rig.post(stream=True)
        await rig.decode.aborted.wait()

        assert '"decode_lost"' in text


async def test_a_broken_instance_cools_down_and_returns(bench: Any) -> None:
    """Goal: case R18: no traffic for the cool-down, then traffic again. Method: one reset, time moved by hand."""
    async with bench(num_decodes=2) as rig:
        rig.decode.scripts.append(Script(cut_after_events=0))
        for _ in range(3):
            await rig.post()
        during = len(rig.decode.generations)
        rig.now_s += limits.COOL_DOWN_S
        for _ in range(2):
            await rig.post()

        assert (1, 2) == (during, len(rig.decode.generations))


async def test_a_pooled_connection_closed_by_the_server_is_replaced(bench: Any) -> None:
    """Goal: uvicorn's keep-alive race is invisible. Method: the server closes its idle connections between two requests."""
    async with bench() as rig:
        await rig.post()
        rig.prefill.close_idle_connections()
        rig.decode.close_idle_connections()
        status, _ = await rig.post()

        assert 200 == status
        assert 0 == rig.value("retries_total", leg="prefill", reason="reset")


async def test_a_reset_on_a_reused_connection_is_no_failure_of_the_instance(bench: Any) -> None:
    """Goal: the keep-alive race is survived. Method: a pooled connection breaks as it is written on; the one decode serves."""
    async with bench() as rig:
        await rig.post()
        rig.decode.scripts.append(Script(cut_after_events=0))
        status, _ = await rig.post()

        assert (200, 3) == (status, len(rig.decode.generations))
        assert 0 == rig.value("retries_total", leg="decode", reason="reset")


async def test_a_failed_release_is_counted_and_harms_nobody(bench: Any) -> None:
    """Goal: a dead producer does not delay the client. Method: the sender fails; the answer is the same."""
    async with bench() as rig:
        rig.sender.fails = True
        rig.decode.scripts.append(Script(status=400, body=REFUSAL))
        status, _ = await rig.post()

    assert (400, 1) == (status, rig.value("releases_total", result="failed"))


async def test_releases_are_bounded(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a flood of leavers cannot fill the memory. Method: no release may be under way; it is dropped and counted."""
    monkeypatch.setattr(limits, "MAX_RELEASES", 0)
    async with bench() as rig:
        rig.decode.scripts.append(Script(status=400, body=REFUSAL))
        await rig.post()

    assert ([], 1) == (rig.sender.released, rig.value("releases_total", result="dropped"))


async def test_models_are_asked_elsewhere_when_a_decode_is_down(bench: Any) -> None:
    """Goal: passed calls have the same patience as generations. Method: the first decode's port is closed."""
    async with bench(num_decodes=2) as rig:
        await rig.decode.stop()
        async with rig.client.get("/v1/models") as response:
            answer = await response.json()

        assert rig.decodes[1].url == answer["from"]
