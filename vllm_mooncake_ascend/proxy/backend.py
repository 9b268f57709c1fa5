"""What every request of one proxy shares."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.proxy.early import Producers
from vllm_mooncake_ascend.proxy.exchange import Leg
from vllm_mooncake_ascend.proxy.metrics import ProxyMetrics
from vllm_mooncake_ascend.proxy.release import Releases
from vllm_mooncake_ascend.proxy.routing import Finding, Routing, Source
from vllm_mooncake_ascend.proxy.upstream import Upstream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Backend:
    """The instances, the way to them and the books about them. A dataclass: these are shells, not values."""

    routings: dict[Leg, Routing]
    upstream: Upstream
    releases: Releases
    metrics: ProxyMetrics
    clock: Callable[[], float]
    """Monotonic seconds."""
    silence_s: float
    """How long either side of a request may keep still."""
    producers: Producers

    def learn(self, role: Leg, url: str, source: Source, finding: Finding | None) -> None:
        """Let routing know what a request to, or a probe of, an instance showed; tell the operator when that puts it out."""
        routing, now_s = self.routings[role], self.clock()
        was_usable = routing.is_usable(url, now_s)
        routing.learn(url, source, finding, now_s)
        is_usable = routing.is_usable(url, now_s)
        self.metrics.instance_usable(role, url, usable=is_usable)
        if was_usable and not is_usable:
            logger.warning(
                "role=%s instance=%s gets no requests for %.0f s: its %s failed", role, url, limits.COOL_DOWN_S, source
            )
