"""Two thousand clients of one proxy at once (pain row R-4), with the command as a process and doubles as engines."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys

import aiohttp
import pytest

from vllm_mooncake_ascend.testing.fake_upstream import FakeVllm, Script

NUM_CLIENTS = 2_000
TEST_S = 120.0


def need_files(wanted: int) -> None:
    """Raise the limit of open files to what the test needs, or skip where the system forbids it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} open files, the system allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


@pytest.mark.e2e
def test_two_thousand_streams_are_open_at_once() -> None:
    """Goal: every client gets its whole stream. Method: all wait behind their first event until all are there."""
    need_files(4 * NUM_CLIENTS)
    asyncio.run(asyncio.wait_for(_streams_at_once(), TEST_S))


async def _streams_at_once() -> None:
    async with FakeVllm("prefill") as prefill, FakeVllm("decode") as decode:
        gate = asyncio.Event()
        decode.scripts.extend(Script(event_gate=gate) for _ in range(NUM_CLIENTS))
        command = (sys.executable, "-m", "vllm_mooncake_ascend.cli.main", "proxy", "--port", "0")
        process = await asyncio.create_subprocess_exec(
            *command, "--prefill", prefill.url, "--decode", decode.url, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        url = (await process.stdout.readline()).decode().split()[-1]
        answers = await _ask_all(url, gate)
        process.send_signal(signal.SIGTERM)
        await process.communicate()

    assert {(200, True)} == set(answers)
    assert 0 == process.returncode


async def _ask_all(url: str, gate: asyncio.Event) -> list[tuple[int, bool]]:
    """Status and completeness of every answer; `gate` opens when all streams have begun."""
    num_begun = 0

    async def ask(client: aiohttp.ClientSession) -> tuple[int, bool]:
        nonlocal num_begun
        async with client.post("/v1/completions", json={"prompt": "p", "stream": True}) as response:
            await response.content.readuntil(b"\n\n")
            num_begun += 1
            if num_begun == NUM_CLIENTS:
                gate.set()
            return response.status, (await response.content.read()).endswith(b"data: [DONE]\n\n")

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as client:
        return await asyncio.gather(*(ask(client) for _ in range(NUM_CLIENTS)))
