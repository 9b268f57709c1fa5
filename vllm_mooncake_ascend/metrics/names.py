"""Every metric of the connector, as data: name, kind, label, the label's values, help.

Machines count by these names (`p2p.actions.Count`); statistics, Prometheus and the docs take all they say from here. A
label has a bounded set of values: one that is not listed is counted as `other`, so that no peer and no client can make
series grow.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PREFIX = "mooncake_ascend:"
OTHER = "other"


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `label` empty: it has none of its own (vLLM adds model and engine to all)."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def bounded(self, value: str) -> str:
        """`value` if it is one of the label's, else `other`."""
        return value if value in self.values else OTHER


_OUTCOMES = ("done", "refused", "failed", "unknown")
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)

_DECODE = (
    Metric(name="kv_reads_total", kind="counter", label="outcome", values=_OUTCOMES, help="KV reads that ended, per worker."),
    Metric(name="kv_read_bytes_total", kind="counter", help="KV bytes read from prefill engines."),
    Metric(name="kv_read_descriptors_total", kind="counter", help="Byte runs given to the transfer engine."),
    Metric(name="kv_read_seconds", kind="histogram", buckets=_SECONDS, help="Seconds from a read's first call to its last."),
    Metric(
        name="engine_fences_total",
        kind="counter",
        label="outcome",
        values=("fenced", "not_fenced"),
        help="Attempts to make sure, after a call of unknown outcome, that nothing can land any more.",
    ),
    Metric(
        name="loads_total",
        kind="counter",
        label="outcome",
        values=("done", "failed"),
        help="Requests whose KV was to come from a prefill engine, by how that ended.",
    ),
    Metric(
        name="load_failures_total",
        kind="counter",
        label="reason",
        values=(
            "gone",
            "lost",
            "peer_lost",
            "restarted",
            "goodbye",
            "incompatible",
            "digest",
            "deadline",
            "refused",
            "failed",
            "unknown",
            "full",
            "broken",
        ),
        help="Loads that failed, by reason; the request follows load_failure_policy.",
    ),
    Metric(name="loads_in_flight", kind="gauge", help="Requests waiting for or reading remote KV."),
    Metric(name="quarantined_blocks", kind="gauge", help="Blocks kept out of use because bytes may still land in them."),
)

_PREFILL = (
    Metric(name="leases_opened_total", kind="counter", help="Transfers offered to decode engines."),
    Metric(
        name="leases_ended_total",
        kind="counter",
        label="reason",
        values=("released", "read", "expired", "revoked", "withdrawn", "no_kv", "reset", "closed"),
        help="Transfers whose blocks are kept no longer, by reason.",
    ),
    Metric(name="leases_open", kind="gauge", help="Transfers whose blocks are kept for decode engines."),
    Metric(name="blocks_pinned", kind="gauge", help="KV blocks kept for decode engines."),
)

_BOTH = (
    Metric(
        name="requests_ignored_total",
        kind="counter",
        label="reason",
        values=("bad_params",),
        help="Requests whose kv_transfer_params could not be served; they are computed locally.",
    ),
    Metric(name="side_channel_messages_total", kind="counter", help="Valid messages received from peers."),
    Metric(
        name="side_channel_messages_dropped_total",
        kind="counter",
        label="reason",
        values=("malformed", "version", "frames", "crowded", "queue_full", "no_route", "not_sendable", "not_allowed"),
        help="Messages from and to peers that were dropped; peers repeat what matters.",
    ),
    Metric(
        name="peers_refused_total",
        kind="counter",
        label="reason",
        values=("address", "key"),
        help="Connections refused: neither this host nor in `peers`, or without the cluster secret.",
    ),
    Metric(name="peers_disconnected_total", kind="counter", help="Prefill engines whose connection broke or never came up."),
    Metric(
        name="broken_invariants_total",
        kind="counter",
        label="where",
        values=("producer", "consumer", "reader"),
        help="Bugs of ours: a transfer was failed because its state machine was broken. Please report with the log.",
    ),
)

METRICS = _DECODE + _PREFILL + _BOTH
BY_NAME = {metric.name: metric for metric in METRICS}
