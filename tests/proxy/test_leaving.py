"""Clients that leave, at each stage: the leg under way is closed, and what prefill holds is released (case R01)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from vllm_mooncake_ascend.testing.fake_upstream import Script


async def _leave_when(rig: Any, moment: asyncio.Event, *, is_streamed: bool = True) -> None:
    """Post, wait for `moment`, and close the client's connection."""
    request = asyncio.create_task(rig.post(stream=is_streamed))
    await moment.wait()
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)


async def test_leaving_during_prefill_aborts_it(bench: Any) -> None:
    """Goal: vLLM stops computing. Method: prefill holds its first answer ever; it must see its connection close. Where its
    producer is reached is not known yet, so nothing is released."""
    async with bench() as rig:
        rig.prefill.scripts.append(Script(head_gate=asyncio.Event()))
        await _leave_when(rig, rig.prefill.arrived)
        await rig.prefill.aborted.wait()

    assert ([], []) == (rig.sender.released, rig.decode.seen)


async def test_leaving_during_prefill_releases_what_it_may_have_finished(bench: Any) -> None:
    """Goal: a prefill that ends while its client leaves is not held until its send lease ends. Method: one request passes,
    which shows where the producer is; of the next one prefill holds the answer while the client leaves."""
    async with bench() as rig:
        await rig.post()
        answered = rig.decode.generations[0].body["kv_transfer_params"]
        rig.prefill.arrived.clear()
        rig.prefill.scripts.append(Script(head_gate=asyncio.Event()))
        await _leave_when(rig, rig.prefill.arrived)
        await rig.sender.came.wait()

    wanted = rig.prefill.generations[1].body["kv_transfer_params"]["transfer_id"]
    assert [{**answered, "transfer_id": wanted}] == rig.sender.released


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_leaving_before_decode_answers_aborts_and_releases(bench: Any, is_streamed: bool) -> None:
    """Goal: nothing stays pinned between the legs. Method: decode holds its status line while the client leaves."""
    async with bench() as rig:
        rig.decode.scripts.append(Script(head_gate=asyncio.Event()))
        await _leave_when(rig, rig.decode.arrived, is_streamed=is_streamed)
        await rig.sender.came.wait()
        await rig.decode.aborted.wait()

    assert [rig.decode.generations[0].body["kv_transfer_params"]] == rig.sender.released


async def test_leaving_after_the_first_token_aborts_decode_only(bench: Any) -> None:
    """Goal: decode has read the KV and answers for it. Method: read one event, leave; no release."""
    async with bench() as rig:
        rig.decode.scripts.append(Script(event_gate=asyncio.Event()))
        async with rig.client.post("/v1/completions", json={"prompt": "p", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await rig.decode.aborted.wait()

    assert [] == rig.sender.released


async def test_fifty_clients_that_leave_between_the_legs_leave_nothing(bench: Any) -> None:
    """Goal: case R01 in small. Method: fifty held decodes, fifty leavers, fifty releases, counters at zero."""
    async with bench() as rig:
        rig.decode.scripts.extend(Script(head_gate=asyncio.Event()) for _ in range(50))
        requests = [asyncio.create_task(rig.post()) for _ in range(50)]
        while len(rig.decode.generations) < 50:
            rig.decode.arrived.clear()
            await rig.decode.arrived.wait()
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        while len(rig.sender.released) < 50:
            rig.sender.came.clear()
            await rig.sender.came.wait()

    assert 50 == len({params["transfer_id"] for params in rig.sender.released})
    assert 50 == rig.value("requests_total", endpoint="/v1/completions", status="client_left", pd_mode="remote")


async def test_a_client_that_takes_nothing_is_cut_off(bench: Any) -> None:
    """Goal: a stalled client does not hold decode for ever. Method: more events than any buffer holds, never read."""
    async with bench(silence_s=0.2) as rig:
        events = tuple(b"data: " + b"x" * 1_000_000 + b"\n\n" for _ in range(40))
        rig.decode.scripts.append(Script(stream=events))
        async with rig.client.post("/v1/completions", json={"prompt": "p", "stream": True}):
            await rig.decode.aborted.wait()

    assert 1 == rig.value("requests_total", endpoint="/v1/completions", status="client_left", pd_mode="remote")
