"""Carries out one exchange: sends its legs, passes the answer on, and tells the exchange what happened.

No decision is taken here that `exchange` or `routing` could take. Whatever ends a request (an answer, a client that left,
a shutdown, a bug), the leg under way is closed and the exchange is ended, so that what must be released is released.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec
from aiohttp import web

from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.proxy import exchange, headers, replies, rewrite, sse, usage
from vllm_mooncake_ascend.proxy.backend import Backend
from vllm_mooncake_ascend.proxy.early import Asked, EarlyLeg
from vllm_mooncake_ascend.proxy.exchange import Exchange, Leg, Plan
from vllm_mooncake_ascend.proxy.rewrite import Endpoint, JsonObject
from vllm_mooncake_ascend.proxy.routing import finding_of_loss, finding_of_status
from vllm_mooncake_ascend.proxy.upstream import Answer, Question, StreamAnswer, UpstreamLost
from vllm_mooncake_ascend.runtime.clock import wall_s
from vllm_mooncake_ascend.types import TransferId

_JSON = "application/json"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asked, as far as the legs need it."""

    method: str
    path: str
    """With its query."""
    headers: headers.Headers
    request_id: str
    endpoint: Endpoint | None
    """None: a call that is passed to decode as it is, with `raw`."""
    body: JsonObject
    """The client's body, stripped; of use with an endpoint."""
    raw: bytes | None
    content_type: str | None


class Relay:
    """The shell of one client request."""

    def __init__(self, backend: Backend, request: web.Request, call: Call, plan: Plan) -> None:
        self._backend = backend
        self._request = request
        self._call = call
        self._exchange = Exchange(plan)
        self._answer: Answer | None = None
        """Of the leg asked last, with the instance that gave it."""
        self._instance = ""
        self._early: EarlyLeg | None = None
        self._response: web.StreamResponse | None = None
        self._cached_tokens: int | None = None

    @property
    def pd_mode(self) -> exchange.PdMode:
        """Where the prompt was computed."""
        return self._exchange.pd_mode

    @property
    def has_begun(self) -> bool:
        """Whether the head of an answer may have gone to the client."""
        return self._response is not None and self._response.prepared

    async def run(self) -> web.StreamResponse:
        """Serve the request to its end.

        Raises:
            ConnectionResetError, asyncio.CancelledError: the client has left.
        """
        try:
            actions = self._exchange.begin()
            while True:
                event = await self._perform_all(actions)
                if self._exchange.ended:
                    break
                assert event is not None, "an exchange that goes on waits for something"
                actions = self._exchange.handle(event)
            assert self._response is not None, "an exchange that ended has answered"
            return self._response
        finally:
            self._drop_answer()
            self._drop_early()
            if not self._exchange.ended:
                self._release_all(self._exchange.handle(exchange.ClientLeft()))

    async def _perform_all(self, actions: list[exchange.Action]) -> exchange.Event | None:
        event: exchange.Event | None = None
        for action in actions:
            event = await self._perform(action)
        return event

    async def _perform(self, action: exchange.Action) -> exchange.Event | None:
        """Do one thing; the event it is answered by, if any."""
        match action:
            case exchange.AskPrefill(transfer_id=transfer_id, avoid=avoid):
                assert self._call.endpoint is not None, "only generations have a prefill leg"
                body = rewrite.for_prefill(self._call.body, self._call.endpoint, transfer_id)
                return await self._ask("prefill", avoid, rewrite.as_bytes(body), beside=transfer_id)
            case exchange.AskDecode(params=params, avoid=avoid):
                if self._early is not None and params is not None and not avoid and self._early.serves(params):
                    return await self._take(self._early)
                self._drop_early()
                return await self._ask("decode", avoid, self._decode_body(params))
            case exchange.PassAnswer():
                return await self._pass_answer()
            case exchange.AnswerError(status=status, kind=kind, message=message):
                self._answer_error(status, kind, message)
            case exchange.EndStream(message=message):
                await self._end_stream(message)
            case exchange.Release() | exchange.Abandon():
                self._release(action)
            case exchange.CountRetry(leg=leg, reason=reason):
                self._backend.metrics.retried(leg, reason)
        return None

    def _release_all(self, actions: list[exchange.Action]) -> None:
        """What is left to do when nobody waits for an answer."""
        for action in actions:
            assert isinstance(action, exchange.Release | exchange.Abandon), "a client that left gets no answer"
            self._release(action)

    def _release(self, action: exchange.Release | exchange.Abandon) -> None:
        """Of an answer that never came only the transfer's id is known; its producer is the one of the answer before."""
        match action:
            case exchange.Release(params=params):
                self._backend.releases.submit(params)
            case exchange.Abandon(transfer_id=transfer_id):
                last = self._backend.producers.last(self._instance)
                if last is not None:
                    self._backend.releases.submit({**last, "transfer_id": transfer_id})

    def _decode_body(self, params: JsonObject | None) -> bytes | None:
        if self._call.endpoint is None:
            return self._call.raw
        return rewrite.as_bytes(rewrite.for_decode(self._call.body, params))

    async def _ask(
        self, leg: Leg, avoid: tuple[str, ...], body: bytes | None, *, beside: TransferId | None = None
    ) -> exchange.Event:
        """Send a leg to the next instance in turn and wait for its answer; `beside` that of prefill decode's may go already."""
        self._drop_answer()
        self._drop_early()
        instance = self._backend.routings[leg].choose(avoid, self._backend.clock())
        if instance is None:
            return exchange.NoInstance()
        self._instance = instance
        if beside is not None:
            self._begin_early(instance, beside)
        event, self._answer = await self._send(leg, instance, body)
        if leg == "prefill" and isinstance(event, exchange.LegAnswered) and event.status < 300:
            return msgspec.structs.replace(event, params=self._params_of_prefill())
        return event

    async def _send(self, leg: Leg, instance: str, body: bytes | None) -> Asked:
        """Send a leg to an instance; what became of it."""
        call = self._call
        content_type = call.content_type if call.endpoint is None else _JSON
        passed = headers.to_instance(call.headers, call.request_id, content_type)
        question = Question(instance=instance, method=call.method, path=call.path, headers=passed, body=body)
        began_s = self._backend.clock()
        try:
            answer = await self._backend.upstream.ask(question)
        except UpstreamLost as lost:
            self._backend.learn(leg, instance, "request", finding_of_loss(lost.reason))
            self._backend.metrics.leg_ended(leg, lost.reason, self._backend.clock() - began_s)
            return exchange.LegLost(instance=instance, reason=lost.reason, detail=str(lost)), None
        self._backend.learn(leg, instance, "request", finding_of_status(answer.status))
        self._backend.metrics.leg_ended(leg, f"{answer.status // 100}xx", self._backend.clock() - began_s)
        return exchange.LegAnswered(instance=instance, status=answer.status), answer

    def _begin_early(self, prefill: str, transfer_id: TransferId) -> None:
        """Send decode's leg beside that of this prefill instance, where it is known what prefill will answer."""
        params = self._backend.producers.foretell(prefill, transfer_id, wall_s())
        decode = None if params is None else self._backend.routings["decode"].choose((), self._backend.clock())
        if params is not None and decode is not None:
            leg = self._send("decode", decode, self._decode_body(params))
            self._early = EarlyLeg(params, decode, leg, lambda: self._backend.metrics.early_leg_ended("dropped"))

    async def _take(self, early: EarlyLeg) -> exchange.Event:
        """Decode's leg is under way already."""
        self._drop_answer()
        self._instance = early.instance
        event, self._answer = await early.take()
        self._early = None
        self._backend.metrics.early_leg_ended("used")
        return event

    def _drop_early(self) -> None:
        if self._early is not None:
            self._early.drop()
            self._early = None

    def _params_of_prefill(self) -> JsonObject | None:
        assert self._answer is not None, "an answered leg has its answer"
        try:
            answer = rewrite.parse_object(self._answer.body)
        except RemoteProtocolError:
            return None
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict) or not params:
            return None
        self._cached_tokens = usage.cached_tokens_of(answer)
        self._backend.producers.learn(self._instance, params)
        return params

    async def _pass_answer(self) -> exchange.Event:
        answer = self._answer
        assert answer is not None, "an answered leg has its answer"
        passed = headers.to_client(answer.headers, self._call.request_id)
        if isinstance(answer, StreamAnswer):
            return await self._pass_stream(answer, web.StreamResponse(status=answer.status, headers=passed))
        body = answer.body
        if self._cached_tokens is not None and answer.status < 300:
            body = usage.corrected_body(body, self._cached_tokens)
        self._response = web.Response(status=answer.status, headers=passed, body=body)
        return exchange.AnswerPassed()

    async def _pass_stream(self, answer: StreamAnswer, response: web.StreamResponse) -> exchange.Event:
        """Pass events on, whole ones only, until the stream ends or breaks off."""
        self._response = response
        with self._patience():
            await response.prepare(self._request)
        events = answer.first_events
        while events:
            with self._patience():
                await response.write(b"".join(map(self._corrected, events)))
            try:
                events = await answer.more()
            except UpstreamLost as lost:
                self._backend.learn("decode", self._instance, "request", finding_of_loss(lost.reason))
                self._backend.metrics.stream_broke()
                return exchange.StreamBroke(instance=self._instance, detail=str(lost))
        with self._patience():
            await response.write_eof()
        return exchange.AnswerPassed()

    def _corrected(self, event: bytes) -> bytes:
        return event if self._cached_tokens is None else usage.corrected_event(event, self._cached_tokens)

    def _answer_error(self, status: int, kind: str, message: str) -> None:
        body = replies.error_body(message, kind=kind, status=status)
        self._response = web.Response(
            status=status, body=body, content_type=_JSON, headers={headers.REQUEST_ID: self._call.request_id}
        )

    async def _end_stream(self, message: str) -> None:
        assert self._response is not None, "a stream that broke off had begun"
        with self._patience():
            await self._response.write(sse.event_of(replies.error_body(message, kind="decode_lost", status=502)))
            await self._response.write_eof()

    @contextlib.contextmanager
    def _patience(self) -> Iterator[None]:
        """A client that takes nothing for `silence_s` counts as gone: its connection is cut, which cancels us."""
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client has closed the connection")
        timer = asyncio.get_running_loop().call_later(self._backend.silence_s, transport.abort)
        try:
            yield
        finally:
            timer.cancel()

    def _drop_answer(self) -> None:
        if self._answer is not None:
            self._answer.close()
            self._answer = None
