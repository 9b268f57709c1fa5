"""A double of vLLM's HTTP surface: real sockets, scripted answers, no engine.

It answers as a prefill engine (`kv_transfer_params` in the response) or as a decode engine (whole, or as a stream when
the request asks for one) and remembers what it was asked. A test may put `Script`s before it, each used by one
generation; without one it answers well. Waiting is by events the test holds, never by time.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import Any

import msgspec
from aiohttp import web

from vllm_mooncake_ascend.errors import PeerLost
from vllm_mooncake_ascend.proxy.exchange import Leg
from vllm_mooncake_ascend.proxy.rewrite import JsonObject

WORDS = ("one", " two", " three")
"""What decode generates, a token an event."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        """The body as JSON."""
        value: dict[str, Any] = json.loads(self.raw)
        return value


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """How to answer one generation otherwise than well."""

    status: int = 200
    body: bytes | None = None
    """Instead of the answer: sent as JSON."""
    stream: tuple[bytes, ...] | None = None
    """Instead of the events; each is written by itself."""
    head_gate: asyncio.Event | None = None
    """The status line waits for it."""
    event_gate: asyncio.Event | None = None
    """All events but the first wait for it."""
    cut_after_events: int | None = None
    """The connection is reset after so many events; 0: before the status line."""
    drop_done: bool = False
    """The stream ends as HTTP says, but without its [DONE]."""


class RecordingSender:
    """Stands for the producers' side channels: keeps what was released there."""

    def __init__(self) -> None:
        self.released: list[JsonObject] = []
        self.came = asyncio.Event()
        self.fails = False

    async def release(self, params: JsonObject) -> None:
        """Take the release, or fail as a silent producer makes it fail."""
        if self.fails:
            raise PeerLost("the producer does not answer")
        self.released.append(params)
        self.came.set()

    async def close(self) -> None:
        """Nothing is open."""


class FakeVllm:
    """One instance. Use as an async context manager; `url` is its address."""

    def __init__(self, role: Leg, *, incarnation: str = "incarnation-1", cached_tokens: int | None = None) -> None:
        self.role: Leg = role
        self.incarnation = incarnation
        self.cached_tokens = cached_tokens
        self.scripts: deque[Script] = deque()
        self.seen: list[Seen] = []
        self.is_well = True
        """What /health answers."""
        self.arrived = asyncio.Event()
        """Set when a generation arrives."""
        self.aborted = asyncio.Event()
        """Set when the asker closes the connection before the answer is whole."""
        self.url = ""

    async def __aenter__(self) -> FakeVllm:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_get("/health", self._health)
        for path in ("/v1/completions", "/v1/chat/completions"):
            application.router.add_post(path, self._generate)
        application.router.add_route("*", "/{rest:.*}", self._echo)
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=4_096).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Close the port and every connection, as a process that ends does. Twice is as good as once."""
        await self._runner.cleanup()

    @property
    def generations(self) -> list[Seen]:
        """The requests that asked for tokens."""
        return [seen for seen in self.seen if seen.path.endswith("completions")]

    def close_idle_connections(self) -> None:
        """Close kept-alive connections at once, as uvicorn does after its 5 s."""
        server = self._runner.server
        assert server is not None, "the fake is running"
        for connection in list(server.connections):
            connection.close()
            if connection.transport is not None:
                connection.transport.abort()

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self.is_well else 503)

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        await self._remember(request)
        return web.json_response({"from": self.url, "path": request.path})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen = await self._remember(request)
        script = self.scripts.popleft() if self.scripts else Script()
        self.arrived.set()
        try:
            return await self._answer(request, seen.body, script)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    async def _remember(self, request: web.Request) -> Seen:
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(method=request.method, path=request.path, headers=headers, raw=await request.read())
        self.seen.append(seen)
        return seen

    async def _answer(self, request: web.Request, body: dict[str, Any], script: Script) -> web.StreamResponse:
        if script.head_gate is not None:
            await script.head_gate.wait()
        if script.cut_after_events == 0:
            _reset(request)
        is_streamed = script.stream is not None or (script.body is None and script.status == 200 and body.get("stream") is True)
        if is_streamed:
            return await self._stream(request, body, script)
        answer = script.body if script.body is not None else json.dumps(self._completion(body)).encode()
        return web.Response(status=script.status, body=answer, content_type="application/json")

    async def _stream(self, request: web.Request, body: dict[str, Any], script: Script) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        events = script.stream if script.stream is not None else tuple(self._events(body))
        if script.drop_done:
            events = tuple(event for event in events if b"[DONE]" not in event)
        for count, event in enumerate(events):
            if script.cut_after_events is not None and count >= script.cut_after_events:
                await response.write(event[: len(event) // 2])
                _reset(request)
            if count == 1 and script.event_gate is not None:
                await script.event_gate.wait()
            await response.write(event)
        await response.write_eof()
        return response

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        text = "x" if self.role == "prefill" else "".join(WORDS)
        answer: dict[str, Any] = {
            "id": "cmpl-1",
            "object": "text_completion",
            "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
            "usage": self._usage(),
        }
        if self.role == "prefill":
            answer["kv_transfer_params"] = self.params_for(body["kv_transfer_params"]["transfer_id"])
        return answer

    def params_for(self, transfer_id: str) -> dict[str, Any]:
        """What a prefill engine returns for a transfer, a field of vLLM's own included."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_incarnation": self.incarnation,
            "remote_host": "127.0.0.1",
            "remote_port": 5_555,
            "remote_num_tokens": 7,
            "remote_prompt_digest": "ab" * 32,
            "issued_at_s": 1_800_000_000,
            "added_by_vllm": 1.5,
        }

    def _events(self, body: dict[str, Any]) -> list[bytes]:
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "text": word}]} for word in WORDS]
        if (body.get("stream_options") or {}).get("include_usage"):
            chunks.append({"choices": [], "usage": self._usage()})
        data = [json.dumps(chunk, separators=(",", ":")).encode() for chunk in chunks]
        return [b"data: " + line + b"\n\n" for line in [*data, b"[DONE]"]]

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": len(WORDS), "total_tokens": 7 + len(WORDS)}
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


def _reset(request: web.Request) -> None:
    """Break the connection as a killed process does."""
    assert request.transport is not None, "the asker is there"
    request.transport.abort()
    raise asyncio.CancelledError
