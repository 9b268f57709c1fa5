"""What every request of one proxy shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_mooncake_ascend.proxy.exchange import Leg
from vllm_mooncake_ascend.proxy.metrics import ProxyMetrics
from vllm_mooncake_ascend.proxy.release import Releases
from vllm_mooncake_ascend.proxy.routing import Routing
from vllm_mooncake_ascend.proxy.upstream import Upstream


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
