"""What the proxy counts, under the names Prometheus sees. One registry for each proxy, so that two in one process differ."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_mooncake_ascend.proxy.exchange import FailureReason, Leg, PdMode
from vllm_mooncake_ascend.proxy.rewrite import LocalReason

_PREFIX = "mooncake_ascend_proxy"
_LEG_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
CLIENT_LEFT = "client_left"


class ProxyMetrics:
    """Counters of one proxy."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            f"{_PREFIX}_requests",
            "Client requests ended, by endpoint, status (client_left when nobody took the answer) and where the prompt ran.",
            ["endpoint", "status", "pd_mode"],
            registry=self.registry,
        )
        self._in_flight = Gauge(f"{_PREFIX}_requests_in_flight", "Client requests now served.", registry=self.registry)
        self._leg_seconds = Histogram(
            f"{_PREFIX}_leg_seconds",
            "From sending a leg to its whole answer, or to the first event of a streamed one.",
            ["leg", "outcome"],
            buckets=_LEG_SECONDS,
            registry=self.registry,
        )
        self._retries = Counter(
            f"{_PREFIX}_retries", "Legs sent again to another instance.", ["leg", "reason"], registry=self.registry
        )
        self._early = Counter(
            f"{_PREFIX}_early_decode_legs",
            "Decode legs sent while prefill computed: used, or dropped (prefill failed or answered otherwise, client left).",
            ["result"],
            registry=self.registry,
        )
        self._local = Counter(
            f"{_PREFIX}_local_requests",
            "Requests sent to decode alone because of what they ask for.",
            ["reason"],
            registry=self.registry,
        )
        self._broken_streams = Counter(
            f"{_PREFIX}_broken_streams", "Streamed answers that broke off in the middle.", registry=self.registry
        )
        self._releases = Counter(
            f"{_PREFIX}_releases",
            "Releases of prefill's KV for which no reader will come, by result.",
            ["result"],
            registry=self.registry,
        )
        self._usable = Gauge(
            f"{_PREFIX}_instance_usable",
            "1 while requests go to the instance, 0 while it cools down.",
            ["role", "instance"],
            registry=self.registry,
        )

    def request_began(self) -> None:
        """A client request is being served."""
        self._in_flight.inc()

    def request_ended(self, endpoint: str, status: str, pd_mode: PdMode) -> None:
        """It has been answered, or its client has left."""
        self._in_flight.dec()
        self._requests.labels(endpoint, status, pd_mode).inc()

    def leg_ended(self, leg: Leg, outcome: str, seconds: float) -> None:
        """`outcome`: class of the status (2xx, 4xx, 5xx...) or reason of the loss."""
        self._leg_seconds.labels(leg, outcome).observe(seconds)

    def retried(self, leg: Leg, reason: FailureReason) -> None:
        """A leg is sent to another instance."""
        self._retries.labels(leg, reason).inc()

    def early_leg_ended(self, result: str) -> None:
        """`result`: used or dropped."""
        self._early.labels(result).inc()

    def went_local(self, reason: LocalReason) -> None:
        """A request was sent to decode alone by its kind."""
        self._local.labels(reason).inc()

    def stream_broke(self) -> None:
        """An answer broke off with bytes already at the client."""
        self._broken_streams.inc()

    def released(self, result: str) -> None:
        """`result`: released, failed (the send lease's time frees the blocks), or dropped (too many under way)."""
        self._releases.labels(result).inc()

    def instance_usable(self, role: Leg, url: str, *, usable: bool) -> None:
        """Whether requests go to the instance now."""
        self._usable.labels(role, url).set(usable)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
