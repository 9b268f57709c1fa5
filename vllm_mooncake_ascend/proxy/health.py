"""Probes of the instances: is anyone ready, and who is not to get requests.

An instance answers `GET /health` with 200 while its engine runs; vLLM answers 503 there when the engine has died.
"""

from __future__ import annotations

import asyncio
import logging

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.proxy.backend import Backend
from vllm_mooncake_ascend.proxy.exchange import Leg
from vllm_mooncake_ascend.proxy.routing import Finding, finding_of_loss
from vllm_mooncake_ascend.proxy.upstream import UpstreamLost

logger = logging.getLogger(__name__)

Ready = dict[Leg, int]
"""Instances of each role that answered the last round of probes well."""


def _tell_if_failed(loop: asyncio.Task[None]) -> None:
    if not loop.cancelled() and loop.exception() is not None:
        logger.error("instances are no longer probed: a bug of this proxy", exc_info=loop.exception())


class Health:
    """Probes all instances in rounds; callers that come while a round runs share it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._round: asyncio.Task[Ready] | None = None
        self._loop: asyncio.Task[None] | None = None

    def start(self, interval_s: float) -> None:
        """Probe every `interval_s` from now on."""
        assert self._loop is None, "started once"
        self._loop = asyncio.create_task(self._probe_for_ever(interval_s))
        self._loop.add_done_callback(_tell_if_failed)

    async def close(self) -> None:
        """End the probes."""
        tasks = [task for task in (self._loop, self._round) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def probe_all(self) -> Ready:
        """How many instances of each role are well right now."""
        if self._round is None or self._round.done():
            self._round = asyncio.create_task(self._probe_round())
        return await asyncio.shield(self._round)  # a caller that leaves does not end the round of the others

    async def _probe_for_ever(self, interval_s: float) -> None:
        while True:
            await self.probe_all()
            await asyncio.sleep(interval_s)

    async def _probe_round(self) -> Ready:
        backend = self._backend
        places = [(role, url) for role, routing in backend.routings.items() for url in routing.urls]
        findings = await asyncio.gather(*(self._probe(url) for _, url in places))
        ready: Ready = dict.fromkeys(backend.routings, 0)
        for (role, url), finding in zip(places, findings, strict=True):
            backend.learn(role, url, "probe", finding)
            ready[role] += finding is Finding.SOUND
        return ready

    async def _probe(self, url: str) -> Finding | None:
        try:
            status = await asyncio.wait_for(self._backend.upstream.probe(url), limits.PROBE_ANSWER_S)
        except asyncio.TimeoutError:
            return Finding.SUSPECT
        except UpstreamLost as lost:
            return finding_of_loss(lost.reason)
        return Finding.SOUND if status == 200 else Finding.BROKEN
