"""The proxy as a process: what `vllm-mooncake-ascend proxy` runs."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from collections.abc import Callable

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.proxy.app import ProxyServer
from vllm_mooncake_ascend.proxy.farewell import Farewells
from vllm_mooncake_ascend.proxy.settings import ProxySettings, checked

logger = logging.getLogger(__name__)

_FILES_PER_REQUEST = 3
"""The client's connection, decode's, and prefill's, which stays in the pool for a while."""
_FILES_RESERVED = 128


def run_proxy(settings: ProxySettings, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; running requests then have `settings.drain_s` to end.

    Args:
        settings: what to serve; URLs in any form that `checked` accepts.
        on_ready: told the URL once the port is open.

    Raises:
        ConfigError: a setting is wrong, or the port cannot be had.
    """
    settings = checked(settings)
    settings = msgspec.structs.replace(settings, max_requests=min(settings.max_requests, _max_requests()))
    asyncio.run(_serve(settings, on_ready))


async def _serve(settings: ProxySettings, on_ready: Callable[[str], None]) -> None:
    is_told_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, is_told_to_stop.set)
    server = ProxyServer(settings, Farewells(settings.cluster_secret))
    await server.start()
    on_ready(server.url)
    await is_told_to_stop.wait()
    logger.info("told to stop; running requests have %.0f s", settings.drain_s)
    await server.stop()


def _max_requests() -> int:
    """How many requests at once the system allows, after its limit of open files is raised as far as it goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return limits.MAX_CLIENT_REQUESTS
    allowed = max(1, (hard - _FILES_RESERVED) // _FILES_PER_REQUEST)
    if allowed < limits.MAX_CLIENT_REQUESTS:
        logger.info("%d open files are allowed (ulimit -Hn): at most %d requests are served at once", hard, allowed)
    return min(allowed, limits.MAX_CLIENT_REQUESTS)
