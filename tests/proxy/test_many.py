"""Many clients at once. The two thousand of pain row R-4 are in tests/e2e, with the proxy as a process of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from vllm_mooncake_ascend.testing.fake_upstream import Script

NUM_CLIENTS = 300
"""More than the 100 at which HTTP clients stop by default."""


async def test_many_streams_are_open_at_once(bench: Any) -> None:
    """Goal: no limit of a library is met. Method: all streams wait behind their first event until all are there."""
    async with bench() as rig:
        gate = asyncio.Event()
        rig.decode.scripts.extend(Script(event_gate=gate) for _ in range(NUM_CLIENTS))
        have_begun = 0
        all_have_begun = asyncio.Event()

        async def stream() -> bytes:
            nonlocal have_begun
            async with client.post("/v1/completions", json={"prompt": "p", "stream": True}) as response:
                first = await response.content.readuntil(b"\n\n")
                have_begun += 1
                if have_begun == NUM_CLIENTS:
                    all_have_begun.set()
                return first + await response.content.read()

        async with aiohttp.ClientSession(rig.proxy.url, connector=aiohttp.TCPConnector(limit=0)) as client:
            streams = [asyncio.create_task(stream()) for _ in range(NUM_CLIENTS)]
            await all_have_begun.wait()
            in_flight = rig.value("requests_in_flight")
            gate.set()
            texts = await asyncio.gather(*streams)

        assert NUM_CLIENTS == in_flight
        assert 1 == len(set(texts))
        assert NUM_CLIENTS == rig.value("requests_total", endpoint="/v1/completions", status="200", pd_mode="remote")
