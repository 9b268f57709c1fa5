"""The HTTP server of the proxy: routes, what is refused at the door, and how it starts and stops.

    POST /v1/completions, /v1/chat/completions      two legs (`relay`), or decode alone where prefill is of no use
    GET  /v1/models, /version; POST /tokenize,
         /detokenize                                passed to a decode instance as they are
    GET  /health                                    200 while this process serves
    GET  /ready                                     200 while a prefill and a decode instance are well, else 503
    GET  /metrics                                   Prometheus
    anything else                                   404 that names the above

A client that closes its connection cancels its handler; the relay then closes the leg under way and releases. To stop,
the proxy closes its port, lets running requests end for `drain_s`, then cancels what is left and lets releases through.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from aiohttp import web

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import ConfigError, MooncakeAscendError, RemoteProtocolError
from vllm_mooncake_ascend.proxy import headers, metrics, replies, rewrite
from vllm_mooncake_ascend.proxy.backend import Backend
from vllm_mooncake_ascend.proxy.early import Producers
from vllm_mooncake_ascend.proxy.exchange import Plan
from vllm_mooncake_ascend.proxy.health import Health
from vllm_mooncake_ascend.proxy.relay import Call, Relay
from vllm_mooncake_ascend.proxy.release import Releases, ReleaseSender
from vllm_mooncake_ascend.proxy.rewrite import Endpoint
from vllm_mooncake_ascend.proxy.routing import Routing
from vllm_mooncake_ascend.proxy.settings import ProxySettings
from vllm_mooncake_ascend.proxy.upstream import Upstream
from vllm_mooncake_ascend.types import TransferId

logger = logging.getLogger(__name__)

_GENERATIONS: dict[str, Endpoint] = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}
_PASSED = {"/v1/models": "GET", "/version": "GET", "/tokenize": "POST", "/detokenize": "POST"}
_OWN = ("/health", "/ready", "/metrics")
SERVED = (*_GENERATIONS, *_PASSED, *_OWN)
_BACKLOG_CONNECTIONS = 4_096
_LAST_WORDS_S = 1.0


class _Visit:
    """What the door knows of a request it let in."""

    def __init__(self) -> None:
        self.relay: Relay | None = None


class ProxyServer:
    """One running proxy."""

    def __init__(self, settings: ProxySettings, sender: ReleaseSender, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._sender = sender
        self._clock = clock
        self.metrics = metrics.ProxyMetrics()
        self.url = ""
        """Where it listens, once started."""
        self._running: set[asyncio.Task[object]] = set()
        self._is_idle = asyncio.Event()
        self._is_draining = False

    async def start(self, *, probe_interval_s: float | None = limits.PROBE_INTERVAL_S) -> None:
        """Listen, and begin to probe the instances unless `probe_interval_s` is None.

        Raises:
            ConfigError: the port cannot be had.
        """
        settings = self._settings
        self._is_idle.set()
        self._backend = Backend(
            routings={"prefill": Routing(settings.prefill_urls), "decode": Routing(settings.decode_urls)},
            upstream=Upstream(settings.silence_s),
            releases=Releases(self._sender, self.metrics),
            metrics=self.metrics,
            clock=self._clock,
            silence_s=settings.silence_s,
            producers=Producers(foretells=settings.flow == "concurrent", secret=settings.cluster_secret),
        )
        self._health = Health(self._backend)
        self._runner = web.AppRunner(
            self._application(), handler_cancellation=True, access_log=None, shutdown_timeout=_LAST_WORDS_S
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, settings.host, settings.port, backlog=_BACKLOG_CONNECTIONS).start()
        except OSError as error:
            await self.stop()
            raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error}; name another --port") from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        if probe_interval_s is not None:
            self._health.start(probe_interval_s)

    async def stop(self) -> None:
        """Take nothing new, let what runs end within `drain_s`, cancel the rest, deliver releases."""
        self._is_draining = True
        for site in list(self._runner.sites):
            await site.stop()
        await self._wait_idle(self._settings.drain_s)
        for task in list(self._running):
            task.cancel()
        await self._wait_idle(_LAST_WORDS_S)
        await self._health.close()
        await self._runner.cleanup()
        await self._backend.releases.close()
        await self._backend.upstream.close()

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=limits.MAX_BODY_BYTES)
        application.router.add_get("/health", self._answer_health)
        application.router.add_get("/ready", self._answer_ready)
        application.router.add_get("/metrics", self._answer_metrics)
        application.router.add_route("*", "/{rest:.*}", self._serve)
        return application

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Count every request that is not about the proxy itself, and bound how many run."""
        if self._is_draining or len(self._running) >= self._settings.max_requests:
            what = "is shutting down" if self._is_draining else f"serves {len(self._running)} requests, its limit"
            refusal = _error(503, "overloaded", f"this proxy {what}; try again", {"Retry-After": "1"})
            refusal.force_close()
            return refusal
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"
        self._running.add(task)
        self._is_idle.clear()
        self.metrics.request_began()
        visit = _Visit()
        status = metrics.CLIENT_LEFT
        try:
            response = await self._answer(request, visit)
            status = str(response.status)
            return response
        except ConnectionResetError:
            return web.Response(status=499)  # nobody reads it: the client has left
        finally:
            endpoint = request.path if request.path in _GENERATIONS or request.path in _PASSED else "other"
            self.metrics.request_ended(endpoint, status, visit.relay.pd_mode if visit.relay is not None else "none")
            self._running.discard(task)
            if not self._running:
                self._is_idle.set()

    async def _answer(self, request: web.Request, visit: _Visit) -> web.StreamResponse:
        """The answer, or what went wrong as the API would tell it."""
        try:
            return await self._dispatch(request, visit)
        except web.HTTPException as error:
            return _error(error.status, "invalid_request", f"{error.reason}: {request.method} {request.path}")
        except web.RequestPayloadError as error:
            refusal = _error(400, "invalid_request", f"the body cannot be read: {error}")
            refusal.force_close()  # where the next request begins is not known
            return refusal
        except RemoteProtocolError as error:
            return _error(400, "invalid_request", str(error))
        except (MooncakeAscendError, AssertionError):
            if visit.relay is not None and visit.relay.has_begun:
                raise  # all that can be done is to cut the connection, and aiohttp does
            logger.exception("request_id=%s a bug of this proxy ended it", request.headers.get(headers.REQUEST_ID))
            return _error(500, "internal_error", "this proxy failed; its log tells why")

    async def _dispatch(self, request: web.Request, visit: _Visit) -> web.StreamResponse:
        path, method = request.path, request.method
        if path in _GENERATIONS and method == "POST":
            return await self._generate(request, visit)
        if method == _PASSED.get(path):
            return await self._pass(request, visit)
        if path in _GENERATIONS or path in _PASSED or path in _OWN:
            allowed = "POST" if path in _GENERATIONS else _PASSED.get(path, "GET")
            return _error(405, "method_not_allowed", f"{path} is served for {allowed} only", {"Allow": allowed})
        return _error(404, "not_found", f"this proxy does not serve {path}; it serves {', '.join(SERVED)}")

    async def _generate(self, request: web.Request, visit: _Visit) -> web.StreamResponse:
        endpoint = _GENERATIONS[request.path]
        body = rewrite.stripped(rewrite.parse_object(await _body_of(request)))
        reason = rewrite.reason_for_local(body, endpoint)
        if reason is not None:
            self.metrics.went_local(reason)
        num_ids = 0 if reason is not None else limits.LEG_ATTEMPTS
        plan = Plan(
            transfer_ids=tuple(TransferId(uuid.uuid4().hex) for _ in range(num_ids)),
            on_prefill_unavailable=self._settings.on_prefill_unavailable,
            has_prompt=True,
        )
        call = Call(
            method="POST",
            path=request.rel_url.raw_path_qs,
            headers=list(request.headers.items()),
            request_id=_request_id_of(request),
            endpoint=endpoint,
            body=body,
            raw=None,
            content_type=None,
        )
        visit.relay = Relay(self._backend, request, call, plan)
        return await visit.relay.run()

    async def _pass(self, request: web.Request, visit: _Visit) -> web.StreamResponse:
        call = Call(
            method=request.method,
            path=request.rel_url.raw_path_qs,
            headers=list(request.headers.items()),
            request_id=_request_id_of(request),
            endpoint=None,
            body={},
            raw=await _body_of(request) or None,
            content_type=request.headers.get("Content-Type"),
        )
        plan = Plan(transfer_ids=(), on_prefill_unavailable="fail", has_prompt=False)
        visit.relay = Relay(self._backend, request, call, plan)
        return await visit.relay.run()

    async def _answer_health(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "draining" if self._is_draining else "ok"})

    async def _answer_ready(self, _request: web.Request) -> web.StreamResponse:
        ready = await self._health.probe_all()
        is_ready = all(ready.values()) and not self._is_draining
        status = {"ready": is_ready, "draining": self._is_draining, "well_instances": dict(ready)}
        return web.json_response(status, status=200 if is_ready else 503)

    async def _answer_metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _wait_idle(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._is_idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            logger.warning("%d requests still run after %.0f s", len(self._running), timeout_s)


async def _body_of(request: web.Request) -> bytes:
    try:
        return await asyncio.wait_for(request.read(), limits.CLIENT_BODY_S)
    except asyncio.TimeoutError as error:
        raise web.HTTPRequestTimeout from error


def _request_id_of(request: web.Request) -> str:
    return headers.usable_request_id(request.headers.get(headers.REQUEST_ID), uuid.uuid4().hex)


def _error(status: int, kind: str, message: str, extra: dict[str, str] | None = None) -> web.Response:
    body = replies.error_body(message, kind=kind, status=status)
    return web.Response(status=status, body=body, content_type="application/json", headers=extra)
