"""Tests of the proxy against doubles of vLLM on loopback. Coroutine tests run in a loop of their own, bounded in time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest

from vllm_mooncake_ascend.proxy.app import ProxyServer
from vllm_mooncake_ascend.proxy.settings import ProxySettings, checked
from vllm_mooncake_ascend.testing.fake_upstream import FakeVllm, RecordingSender

_TEST_S = 30.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test; its fixtures are the synchronous ones it names."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), _TEST_S))
    return True


class Bench:
    """A proxy in front of fakes, and a client."""

    def __init__(self, prefills: list[FakeVllm], decodes: list[FakeVllm]) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self.sender = RecordingSender()
        self.now_s = 1_000.0
        self.proxy: ProxyServer
        self.client: aiohttp.ClientSession

    @property
    def prefill(self) -> FakeVllm:
        return self.prefills[0]

    @property
    def decode(self) -> FakeVllm:
        return self.decodes[0]

    async def post(self, path: str = "/v1/completions", **body: Any) -> tuple[int, Any]:
        """Status and JSON (or text) of one request; a short prompt unless the body has one."""
        if "messages" not in body:
            body.setdefault("prompt", "a prompt")
        async with self.client.post(path, json=body) as response:
            is_json = response.content_type == "application/json"
            return response.status, await (response.json() if is_json else response.text())

    def value(self, name: str, **labels: str) -> float:
        """A metric of the proxy; 0 when it was never counted."""
        return self.proxy.metrics.registry.get_sample_value(f"mooncake_ascend_proxy_{name}", labels) or 0.0


@pytest.fixture
def bench() -> Callable[..., AbstractAsyncContextManager[Bench]]:
    """Opens a bench: `async with bench(num_decodes=2, on_prefill_unavailable="local") as rig`."""
    return open_bench


@asynccontextmanager
async def open_bench(num_prefills: int = 1, num_decodes: int = 1, **settings: Any) -> AsyncIterator[Bench]:
    """Start everything; at the end check that nothing of the proxy is left: no request, no task."""
    before = asyncio.all_tasks()
    cached = settings.pop("cached_tokens", {"prefill": None, "decode": None})
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        prefills = [await enter(FakeVllm("prefill", cached_tokens=cached["prefill"])) for _ in range(num_prefills)]
        decodes = [await enter(FakeVllm("decode", cached_tokens=cached["decode"])) for _ in range(num_decodes)]
        rig = Bench(prefills, decodes)
        chosen = ProxySettings(
            prefill_urls=tuple(fake.url for fake in prefills),
            decode_urls=tuple(fake.url for fake in decodes),
            host="127.0.0.1",
            port=0,
        )
        chosen = checked(msgspec.structs.replace(chosen, **settings))
        rig.proxy = ProxyServer(chosen, rig.sender, clock=lambda: rig.now_s)
        await rig.proxy.start(probe_interval_s=None)
        rig.client = await enter(aiohttp.ClientSession(rig.proxy.url))
        try:
            yield rig
        finally:
            await rig.client.close()
            await rig.proxy.stop()
        assert rig.value("requests_in_flight") == 0
    assert asyncio.all_tasks() == before
