"""Sends the demo's requests to an OpenAI server and reads an engine's metrics."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from vllm_mooncake_ascend.cli.demo_prompts import Prompt
from vllm_mooncake_ascend.cli.scrape import totals_of
from vllm_mooncake_ascend.errors import MooncakeAscendError

REQUEST_TIMEOUT_S = 180.0
MAX_LINE_BYTES = 1 << 20


class RequestFailed(MooncakeAscendError):
    """A server answered a demo request with an error, or not as the API promises."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back for one prompt."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    ttft_seconds: float
    """From sending to the first piece of text; without streaming the first token arrives with the whole answer."""
    seconds: float

    def same_as(self, other: Answer) -> bool:
        """True when both say the same, in as many tokens, and end for the same reason."""
        return (self.text, self.finish_reason, self.completion_tokens) == (
            other.text,
            other.finish_reason,
            other.completion_tokens,
        )


class _Reading:
    """Collects an answer from one or more response objects."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._first_text_s: float | None = None
        self._text = ""
        self._finish_reason = ""
        self._usage: dict[str, int] = {}

    def add(self, piece: dict[str, Any]) -> None:
        """Take in a whole response or one event of a stream."""
        self._usage = piece.get("usage") or self._usage
        for choice in piece.get("choices", ()):
            message = choice.get("message") or choice.get("delta") or {}
            text = choice.get("text") or message.get("content") or ""
            if text and self._first_text_s is None:
                self._first_text_s = time.monotonic()
            self._text += text
            self._finish_reason = choice.get("finish_reason") or self._finish_reason

    def answer(self, where: str) -> Answer:
        """The whole answer.

        Raises:
            RequestFailed: the server sent no usage or never ended the answer.
        """
        if not self._usage or not self._finish_reason:
            raise RequestFailed(f"{where} sent an incomplete answer: {self._text[:80]!r}")
        ended_s = time.monotonic()
        return Answer(
            text=self._text,
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage["prompt_tokens"],
            completion_tokens=self._usage["completion_tokens"],
            ttft_seconds=(self._first_text_s or ended_s) - self._started_s,
            seconds=ended_s - self._started_s,
        )


async def ask(session: aiohttp.ClientSession, url: str, model: str, prompt: Prompt) -> Answer:
    """Send one prompt to the server at `url`.

    Raises:
        RequestFailed: the answer is an error or incomplete, or did not come in time.
    """
    where = f"{url}{prompt.path} ({prompt.name})"
    reading = _Reading()
    try:
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with session.post(url + prompt.path, json=prompt.body(model), timeout=timeout) as response:
            if response.status != 200:
                raise RequestFailed(f"{where} answered {response.status}: {(await response.text())[:500]}")
            if not prompt.stream:
                reading.add(await response.json())
            else:
                async for event in stream_events(response, where):
                    reading.add(event)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RequestFailed(f"{where} gave no answer within {REQUEST_TIMEOUT_S:.0f} s: {error!r}") from error
    return reading.answer(where)


async def stream_events(response: aiohttp.ClientResponse, where: str) -> AsyncIterator[dict[str, Any]]:
    """The events of a server-sent stream; every event of vLLM is one `data:` line.

    Raises:
        RequestFailed: one of them is an error.
    """
    async for line in response.content:
        if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line[len(b"data:") :])
        if "error" in event:
            raise RequestFailed(f"{where} broke off: {event['error']}")
        yield event


async def read_metrics(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """All samples of a server's `/metrics`, summed over their labels."""
    async with session.get(url + "/metrics", timeout=aiohttp.ClientTimeout(total=10)) as response:
        response.raise_for_status()
        return totals_of(await response.text())


def new_session() -> aiohttp.ClientSession:
    """A client session without connection limits that keeps no idle connection: servers close those after 5 s."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), read_bufsize=MAX_LINE_BYTES, trust_env=False
    )
