"""The command itself, as a process."""

from __future__ import annotations

import asyncio
import signal
import sys

import aiohttp

from vllm_mooncake_ascend.testing.fake_upstream import FakeVllm, Script

COMMAND = (sys.executable, "-m", "vllm_mooncake_ascend.cli.main", "proxy", "--port", "0")


async def started(*options: str) -> asyncio.subprocess.Process:
    """The command, with its output to be read."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*COMMAND, *options, stdout=pipe, stderr=pipe)


async def test_the_command_serves_and_ends_with_its_requests_done() -> None:
    """Goal: start on a free port, serve, end on SIGTERM only when answers are out. Method: a request held during the end."""
    async with FakeVllm("prefill") as prefill, FakeVllm("decode") as decode:
        process = await started("--prefill", prefill.url, "--decode", decode.url)
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().split()[-1]
        gate = asyncio.Event()
        decode.scripts.append(Script(event_gate=gate))
        async with (
            aiohttp.ClientSession(url) as client,
            client.post("/v1/completions", json={"prompt": "p", "stream": True}) as response,
        ):
            await response.content.readuntil(b"\n\n")
            process.send_signal(signal.SIGTERM)
            gate.set()
            rest = await response.content.read()
        _, errors = await process.communicate()

    assert rest.endswith(b"data: [DONE]\n\n")
    assert (0, False) == (process.returncode, b"Traceback" in errors)


async def test_a_wrong_url_ends_the_command_with_a_remedy() -> None:
    """Goal: no traceback for the operator's mistake. Method: a URL without its scheme."""
    process = await started("--prefill", "10.0.0.1:8000", "--decode", "http://10.0.0.2:8000")
    _, errors = await process.communicate()

    assert 2 == process.returncode
    assert b"expected http://HOST:PORT" in errors
    assert b"Traceback" not in errors
