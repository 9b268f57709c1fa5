"""The client of `bench proxy`: so many requests under way at once, each connection asking anew when it was answered."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import msgspec

from vllm_mooncake_ascend.errors import MooncakeAscendError

PATH = "/v1/completions"
ANSWER_S = 60.0
_DONE = b"data: [DONE]\n\n"

Ask = Callable[[], Awaitable[float]]
"""Ask once and take the whole answer; returns the seconds that a user waits (see `Client`)."""


class ProxyBenchFailed(MooncakeAscendError):
    """Somebody did not answer as it must, so there is nothing to measure."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one load."""

    num_requests: int
    seconds: float
    latencies_s: tuple[float, ...]

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.num_requests / self.seconds

    def latency_ms(self, percent: int) -> float:
        """A percentile."""
        if len(self.latencies_s) == 1:
            return 1e3 * self.latencies_s[0]
        return 1e3 * statistics.quantiles(self.latencies_s, n=100, method="inclusive")[percent - 1]


class Client:
    """Asks one URL for completions; use as an async context manager.

    A user waits for the whole answer, or, where it is streamed, for its first token.
    """

    def __init__(self, url: str, *, prompt: str, is_streamed: bool) -> None:
        self._url = url
        self._is_streamed = is_streamed
        self._body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 16, "stream": is_streamed}
        self._raw = json.dumps(self._body).encode()

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers={"Content-Type": "application/json"}
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self) -> float:
        """One request to what is asked."""
        started_s = time.monotonic()
        return await self._answer(self._url, self._raw, started_s)

    async def ask_both_legs(self, prefill_url: str) -> float:
        """What a proxy is for, done by the client: prefill first, then this client's URL, with what prefill said."""
        started_s = time.monotonic()
        wish = {**self._body, "max_tokens": 1, "stream": False}
        wish["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": f"{started_s:.9f}"}
        async with self._session.post(prefill_url + PATH, data=json.dumps(wish).encode()) as response:
            answer = await response.json()
        raw = json.dumps({**self._body, "kv_transfer_params": answer["kv_transfer_params"]}).encode()
        return await self._answer(self._url, raw, started_s)

    async def _answer(self, url: str, raw: bytes, started_s: float) -> float:
        async with self._session.post(url + PATH, data=raw) as response:
            first = await response.content.readany() if self._is_streamed else b""
            waited_s = time.monotonic() - started_s
            answer = first + await response.read()
            if not self._is_streamed:
                waited_s = time.monotonic() - started_s
        is_whole = answer.endswith(_DONE) if self._is_streamed else b'"choices"' in answer
        if response.status != 200 or not is_whole:
            raise ProxyBenchFailed(f"{url} answered with {response.status}: {answer[:200]!r}")
        return waited_s


async def run_load(ask: Ask, *, num_at_once: int, seconds: float) -> Load:
    """Ask for so long, so many at once; what is under way at the end is waited for.

    Raises:
        ProxyBenchFailed: an answer was wrong, or did not come.
    """
    started_s = time.monotonic()
    latencies_s: list[float] = []

    async def go_on() -> None:
        while not latencies_s or time.monotonic() < started_s + seconds:
            latencies_s.append(await ask())

    try:
        await asyncio.gather(*(go_on() for _ in range(num_at_once)))
    except (aiohttp.ClientError, asyncio.TimeoutError) as error:
        raise ProxyBenchFailed(f"no answer: {error!r}") from error
    return Load(num_requests=len(latencies_s), seconds=time.monotonic() - started_s, latencies_s=tuple(latencies_s))
