"""Releases on their way to producers: sent beside the client's answer, never before it.

A release that fails costs nothing but time: prefill's send lease ends by itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import MooncakeAscendError
from vllm_mooncake_ascend.proxy.metrics import ProxyMetrics
from vllm_mooncake_ascend.proxy.rewrite import JsonObject

logger = logging.getLogger(__name__)


class ReleaseSender(Protocol):
    """Says over a producer's side channel that no reader will come for a transfer."""

    async def release(self, params: JsonObject) -> None:
        """Deliver the release of the transfer named in `params`, bounded in time; twice is as good as once.

        Raises:
            MooncakeAscendError: the producer did not answer, or `params` name none.
        """

    async def close(self) -> None:
        """Close all sockets."""


class Releases:
    """The releases of one proxy that are under way."""

    def __init__(self, sender: ReleaseSender, metrics: ProxyMetrics) -> None:
        self._sender = sender
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, params: JsonObject) -> None:
        """Send the release soon."""
        if len(self._tasks) >= limits.MAX_RELEASES:
            self._metrics.released("dropped")
            return
        task = asyncio.create_task(self._send(params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let the releases under way end, for as long as a producer may take to answer; then close."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limits.PEER_ANSWER_S)
        for task in list(self._tasks):
            task.cancel()
        await self._sender.close()

    async def _send(self, params: JsonObject) -> None:
        transfer_id = params.get("transfer_id")
        try:
            await self._sender.release(params)
        except MooncakeAscendError as error:
            self._metrics.released("failed")
            logger.debug("transfer_id=%s release failed, its send lease will end it: %s", transfer_id, error)
        else:
            self._metrics.released("released")
            logger.debug("transfer_id=%s released: no decode engine will read it", transfer_id)
