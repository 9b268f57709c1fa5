"""The HTTP client side: one leg to one instance, its answer, and what is known when it breaks.

    foreign failure                                         reason
    ------------------------------------------------------  -----------
    no connection: refused, unknown host, TLS               unreachable
    nothing came for `silence_s`, no connection in time     silent
    the connection broke                                    reset
    something came that is no HTTP, no event, too large     malformed
    this process may open no more files or ports            exhausted

Connections are pooled, but dropped before uvicorn closes them. The race that remains (the server closes a pooled
connection while we write on it) shows as a reset before any answer on a connection used before; then the leg is sent once
more on a new connection. A generation has no side effect that a second one could double, and nothing was answered.

Where the answer is a stream, `ask` returns with its first event: a status line says little, vLLM sends it before the
engine has seen the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
from collections.abc import Iterator
from types import SimpleNamespace

import aiohttp
import msgspec
import yarl
from aiohttp.tracing import Trace

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import PeerLost, RemoteProtocolError
from vllm_mooncake_ascend.proxy import replies, sse
from vllm_mooncake_ascend.proxy.exchange import LossReason
from vllm_mooncake_ascend.proxy.headers import Headers


class UpstreamLost(PeerLost):
    """An instance gave no answer, or not the whole of it."""

    def __init__(self, reason: LossReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: LossReason = reason


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request to one instance."""

    instance: str
    method: str
    path: str
    """With its query."""
    headers: Headers
    body: bytes | None


class Answer:
    """What an instance answered: whole, or the first events of a stream and `more` of them."""

    def __init__(self, response: aiohttp.ClientResponse, *, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body
        self._response = response

    def close(self) -> None:
        """End the leg. If the instance is not done, its connection is closed, so that vLLM aborts the request."""
        self._response.close()


class StreamAnswer(Answer):
    """An answer that comes in events."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        super().__init__(response, status=response.status, headers=list(response.headers.items()), body=b"")
        self.first_events: list[bytes] = []
        """Those read before anything was decided; `more` comes after them."""
        self._splitter = sse.EventSplitter()
        self._is_done = False

    async def more(self) -> list[bytes]:
        """The next complete events; none when the stream has ended as it should.

        Raises:
            UpstreamLost: it broke off, or fell silent.
        """
        if self._is_done:
            await self._finish()
            return []
        with _translated():
            events: list[bytes] = []
            while not events:
                chunk = await self._response.content.readany()
                if not chunk:
                    raise UpstreamLost("reset", "the stream ended without [DONE]")
                events = self._splitter.feed(chunk)
        self._is_done = sse.is_done(events[-1])
        return events

    async def _finish(self) -> None:
        """Read the end of the HTTP body, so that the connection can be used again. The client has all it will get."""
        with contextlib.suppress(UpstreamLost), _translated():
            await self._response.content.readany()


class _Connection:
    """What happened on the connection of one attempt."""

    def __init__(self) -> None:
        self.is_reused = False
        self.has_answered = False


class _PacedConnector(aiohttp.TCPConnector):
    """Opens a bounded number of connections to one instance at a time; the others wait, and their clocks with them.

    A burst of thousands of clients would else keep this process so busy that connections are opened in time but seen too
    late, and a healthy instance would be taken for a silent one.
    """

    def __init__(self, *, keepalive_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_s)
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        """A pooled connection or a new one."""
        turns = self._turns.setdefault(req.url.raw_authority, asyncio.Semaphore(limits.CONNECTS_AT_ONCE))
        async with turns:
            return await super().connect(req, traces, timeout)


class Upstream:
    """Asks instances. Belongs to one event loop."""

    def __init__(self, silence_s: float) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, connect=limits.UPSTREAM_CONNECT_S, sock_read=silence_s)
        self._pooled = self._session(_PacedConnector(keepalive_s=limits.UPSTREAM_KEEPALIVE_S))
        self._fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True))

    async def ask(self, question: Question) -> Answer:
        """Send `question` and wait for the whole answer, or for the first event of a stream.

        Raises:
            UpstreamLost: there was no such answer.
        """
        connection = _Connection()
        try:
            return await self._ask_once(self._pooled, question, connection)
        except UpstreamLost as lost:
            is_stale = lost.reason == "reset" and connection.is_reused and not connection.has_answered
            if not is_stale:
                raise
        return await self._ask_once(self._fresh, question, connection)

    async def probe(self, instance: str) -> int:
        """Status of the instance's /health, asked on a connection of its own: it must not queue behind requests.

        Raises:
            UpstreamLost: as `ask`.
        """
        question = Question(instance=instance, method="GET", path="/health", headers=[], body=None)
        answer = await self._ask_once(self._fresh, question, _Connection())
        answer.close()
        return answer.status

    async def close(self) -> None:
        """Close all connections."""
        await self._pooled.close()
        await self._fresh.close()

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=self._timeout,
            trace_configs=[trace],
            skip_auto_headers=("Content-Type",),
        )

    async def _ask_once(self, session: aiohttp.ClientSession, question: Question, connection: _Connection) -> Answer:
        url = yarl.URL(question.instance + question.path, encoded=True)
        with _translated():
            response = await session.request(
                question.method,
                url,
                headers=question.headers,
                data=_payload(question.body),
                allow_redirects=False,
                trace_request_ctx=connection,
            )
            connection.has_answered = True
            try:
                return await _read(response)
            except BaseException:
                response.close()
                raise


def _payload(body: bytes | None) -> io.BytesIO | None:
    """A body that aiohttp writes piece by piece: a large one must not hold up the other requests."""
    return None if body is None else io.BytesIO(body)


async def _note_reuse(
    _session: aiohttp.ClientSession,
    context: SimpleNamespace,
    _params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.is_reused = True


async def _read(response: aiohttp.ClientResponse) -> Answer:
    if response.status == 200 and response.content_type == "text/event-stream":
        return await _begin_stream(response)
    body = bytearray()
    while chunk := await response.content.readany():
        body += chunk
        if len(body) > limits.MAX_BODY_BYTES:
            raise UpstreamLost("malformed", f"the answer is larger than {limits.MAX_BODY_BYTES} bytes")
    return Answer(response, status=response.status, headers=list(response.headers.items()), body=bytes(body))


async def _begin_stream(response: aiohttp.ClientResponse) -> Answer:
    """Wait for the first event with data. Comments before it are dropped: they keep alive what has not begun."""
    stream = StreamAnswer(response)
    while True:
        events = await stream.more()
        for index, event in enumerate(events):
            data = sse.data_of(event)
            if data is None:
                continue
            status = replies.error_status(data)
            if status is not None:
                headers = [("Content-Type", "application/json")]
                return Answer(response, status=status, headers=headers, body=data)
            stream.first_events = events[index:]
            return stream


_REASONS: tuple[tuple[type[Exception], LossReason], ...] = (
    (aiohttp.ClientConnectorError, "unreachable"),
    (asyncio.TimeoutError, "silent"),
    (aiohttp.ServerDisconnectedError, "reset"),
    (aiohttp.ClientOSError, "reset"),
    (aiohttp.ClientConnectionError, "reset"),
    (aiohttp.ClientPayloadError, "reset"),
    (aiohttp.ClientError, "malformed"),
    (RemoteProtocolError, "malformed"),
)
"""First match holds. Source: class tree of aiohttp/client_exceptions.py (3.11 to 3.14)."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM})


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn what aiohttp and our event reader raise into UpstreamLost."""
    try:
        yield
    except tuple(kind for kind, _ in _REASONS) as error:
        reason = next(reason for kind, reason in _REASONS if isinstance(error, kind))
        if isinstance(error, OSError) and error.errno in _EXHAUSTED:
            reason = "exhausted"
        raise UpstreamLost(reason, str(error) or type(error).__name__) from error
