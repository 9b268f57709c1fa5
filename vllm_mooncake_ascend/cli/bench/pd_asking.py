"""Asking engines as `bench pd` does: streamed, greedy, with what is needed to time and to compare the answers.

A way is how a prompt is answered: by one URL (a plain engine, or our proxy), or by a prefill and a decode engine that are asked
here, one after the other or both at once, for peers that come with no proxy.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

import aiohttp
import msgspec

from vllm_mooncake_ascend.cli.demo_client import REQUEST_TIMEOUT_S, RequestFailed, stream_events

JsonObject = Mapping[str, object]
"""A body or a part of one; what is in it is the API's business."""
Flow = Literal["one url", "prefill first", "both at once"]

MODEL_NAME = "bench"
ANSWER_TOKENS = 8
"""Tokens of an answer that is compared."""
_TOKEN_ID = "token_id:"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came back for one prompt."""

    token_ids: tuple[int, ...]
    next_ids: tuple[int, ...]
    """Of each token: the next best one."""
    margins: tuple[float, ...]
    """Of each token: by how much its log probability exceeds that of the next best one."""
    first_token_s: float
    """From sending the first request for this prompt to the first token."""


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params` of both legs, for who asks both engines himself."""

    prefill: JsonObject
    decode: JsonObject | None = None
    """None: what prefill has answered."""

    def prefill_params(self, transfer_id: str) -> JsonObject:
        return {**self.prefill, "transfer_id": transfer_id}

    def decode_params(self, transfer_id: str, answered: JsonObject) -> JsonObject:
        return answered if self.decode is None else {**self.decode, "transfer_id": transfer_id}


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are answered."""

    subject: str
    flow: Flow
    url: str = ""
    """Of a plain engine or a proxy; for a flow of one URL."""
    prefill_url: str = ""
    decode_url: str = ""
    handover: Handover | None = None


async def ask_by(session: aiohttp.ClientSession, way: Way, prompt: Sequence[int]) -> Answer:
    """One prompt this way.

    Raises:
        RequestFailed: an engine answered with an error, incompletely, or not in time.
    """
    if way.flow == "one url":
        return await ask(session, way.url, prompt)
    assert way.handover is not None, "only a proxy knows by itself"
    transfer_id = str(uuid.uuid4())
    prefill = ask_prefill(session, way.prefill_url, prompt, way.handover.prefill_params(transfer_id))
    if way.flow == "both at once":
        params = way.handover.decode_params(transfer_id, {})
        _, answer = await asyncio.gather(prefill, ask(session, way.decode_url, prompt, params=params))
        return answer
    started_s = time.monotonic()
    answered = await prefill
    prefill_s = time.monotonic() - started_s
    params = way.handover.decode_params(transfer_id, answered)
    answer = await ask(session, way.decode_url, prompt, params=params)
    return msgspec.structs.replace(answer, first_token_s=prefill_s + answer.first_token_s)


async def ask(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], *, params: JsonObject | None = None) -> Answer:
    """A few tokens from the server at `url`.

    Raises:
        RequestFailed: as `ask_by`.
    """
    body = _body(prompt, max_tokens=ANSWER_TOKENS, params=params)
    body |= {"logprobs": 2, "return_tokens_as_token_ids": True}
    token_ids: list[int] = []
    next_ids: list[int] = []
    margins: list[float] = []
    first_s: float | None = None
    started_s = time.monotonic()
    async for event in _events(session, url, body):
        for choice in event.get("choices", ()):
            found = choice.get("logprobs") or {}
            if found.get("tokens") and first_s is None:
                first_s = time.monotonic() - started_s
            token_ids += map(_token_id, found.get("tokens", ()))
            ranked = [sorted(best.items(), key=lambda one: -one[1]) for best in found.get("top_logprobs", ())]
            next_ids += [_token_id(some[1][0]) for some in ranked if len(some) > 1]
            margins += [some[0][1] - some[1][1] for some in ranked if len(some) > 1]
    if first_s is None or len(token_ids) != ANSWER_TOKENS or len(margins) != ANSWER_TOKENS:
        raise RequestFailed(f"{url} answered {len(token_ids)} of {ANSWER_TOKENS} tokens, {len(margins)} with the next best one")
    return Answer(token_ids=tuple(token_ids), next_ids=tuple(next_ids), margins=tuple(margins), first_token_s=first_s)


async def ask_prefill(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], params: JsonObject) -> JsonObject:
    """The prefill leg; returns the `kv_transfer_params` of the answer, empty where there are none.

    Raises:
        RequestFailed: as `ask_by`.
    """
    body = _body(prompt, max_tokens=1, params=params) | {"stream": False}
    try:
        async with session.post(f"{url}/v1/completions", json=body, timeout=_timeout()) as response:
            if response.status != 200:
                raise RequestFailed(f"{url} answered {response.status}: {(await response.text())[:300]}")
            answered = (await response.json()).get("kv_transfer_params")
            return answered if isinstance(answered, dict) else {}
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RequestFailed(f"{url} gave no answer: {error!r}") from error


async def keep_running(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], *, max_tokens: int, arrivals_s: list[float]
) -> None:
    """A request that runs until cancelled; notes when each of its tokens came, on the monotonic clock."""
    async for event in _events(session, url, _body(prompt, max_tokens=max_tokens, params=None)):
        if event.get("choices"):
            arrivals_s.append(time.monotonic())


def _body(prompt: Sequence[int], *, max_tokens: int, params: JsonObject | None) -> dict[str, object]:
    body: dict[str, object] = {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return body if params is None else {**body, "kv_transfer_params": params}


async def _events(session: aiohttp.ClientSession, url: str, body: JsonObject) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer."""
    try:
        async with session.post(f"{url}/v1/completions", json=body, timeout=_timeout()) as response:
            if response.status != 200:
                raise RequestFailed(f"{url} answered {response.status}: {(await response.text())[:300]}")
            async for event in stream_events(response, url):
                yield event
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RequestFailed(f"{url} gave no answer: {error!r}") from error


def _token_id(name: str) -> int:
    return int(name.removeprefix(_TOKEN_ID))


def _timeout() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
