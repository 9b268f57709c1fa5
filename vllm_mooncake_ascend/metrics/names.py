"""Every metric of the connector, as data: name, kind, label, the label's values, help.

Machines count by the names in `p2p.counters`, shells by those below; statistics, Prometheus and the docs take all they
say from here. A label has a bounded set of values: one that is not listed is counted as `other`, so that no peer and no
client can make series grow.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vllm_mooncake_ascend.p2p import counters
from vllm_mooncake_ascend.types import Outcome

PREFIX = "mooncake_ascend:"
OTHER = "other"

# Names that shells count by; those of the machines stand in p2p.counters.
LEASES_OPEN = "leases_open"
BLOCKS_PINNED = "blocks_pinned"
LOADS_IN_FLIGHT = "loads_in_flight"
BLOCKS_QUARANTINED = "quarantined_blocks"
READ_DURATION = "kv_read_duration_seconds"
FENCES = "engine_fences_total"
REQUESTS_IGNORED = "requests_ignored_total"
MESSAGES_RECEIVED = "side_channel_messages_total"
MESSAGES_DROPPED = "side_channel_messages_dropped_total"
CONNECTIONS_REFUSED = "connections_refused_total"
INVARIANTS_BROKEN = "broken_invariants_total"


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


_OUTCOMES = tuple(outcome.value for outcome in Outcome)
_REASONS = tuple(value for name, value in vars(counters).items() if name.isupper() and value and not value.endswith("_total"))
"""Every reason a machine may give; one set for all, as no machine takes a reason from a peer."""
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


def _counted(name: str, help_text: str, *, by: Literal["", "reason", "outcome"] = "") -> Metric:
    """A counter of the machines."""
    values = {"": (), "reason": _REASONS, "outcome": _OUTCOMES}[by]
    return Metric(name=name, kind="counter", label=by, values=values, help=help_text)


_PREFILL = (
    _counted(counters.TRANSFERS_ANNOUNCED, "Prefill requests whose KV will be offered."),
    _counted(counters.TRANSFERS_RENAMED, "Transfers announced under an id that was taken; they got a fresh one."),
    _counted(counters.TRANSFERS_REFUSED, "Transfers not offered because too many are remembered."),
    _counted(counters.LEASES_OPENED, "Prefills that ended with KV and keep it for decode engines."),
    _counted(counters.LEASES_ENDED, "Transfers whose blocks are kept no longer.", by="reason"),
    _counted(counters.PREFILLS_WITHOUT_KV, "Prefills that were aborted or failed before their KV was whole."),
    _counted(counters.PREFILLS_PREEMPTED, "Prefills vLLM preempted."),
    _counted(counters.READS_CONFIRMED, "Reads whose end decode engines told, by held or lost.", by="reason"),
    _counted(counters.READERS_REFUSED, "Subscriptions answered with no.", by="reason"),
    Metric(name=LEASES_OPEN, kind="gauge", help="Transfers whose blocks are kept for decode engines."),
    Metric(name=BLOCKS_PINNED, kind="gauge", help="KV blocks kept for decode engines."),
)

_DECODE = (
    _counted(counters.REQUESTS_ARRIVED, "Requests whose KV is to come from a prefill engine."),
    _counted(counters.REQUESTS_REFUSED, "Of these, requests whose prefill engine was not even asked.", by="reason"),
    _counted(counters.LOADS_DONE, "Requests with all their remote KV in place.", by="reason"),
    _counted(counters.LOADS_FAILED, "Requests whose remote KV did not come.", by="reason"),
    _counted(counters.LOADS_LEFT, "Requests that needed no remote KV after all."),
    _counted(counters.LOADS_ABORTED, "Requests that ended before their remote KV came."),
    _counted(counters.READS_ORDERED, "Reads ordered from the workers."),
    _counted(counters.READS_ENDED, "Reads that ended, per worker.", by="outcome"),
    _counted(counters.READ_BYTES, "KV bytes read from prefill engines."),
    _counted(counters.READ_DESCRIPTORS, "Byte runs given to the transfer engine."),
    _counted(counters.READ_SECONDS, "Seconds of all reads, each from its first engine call to its last."),
    _counted(counters.READS_OVERDUE, "Reads that a worker did not end within every bound it has."),
    _counted(counters.QUARANTINES, "Reads of unknown outcome, whose blocks stay out of use for a while."),
    _counted(counters.PEERS_LOST, "Prefill engines that fell silent, broke off, left or restarted.", by="reason"),
    _counted(counters.PEERS_FORGOTTEN, "Prefill engines forgotten because nothing was read from them for long."),
    _counted(counters.PEERS_REFUSED, "Prefill engines whose KV does not fit this engine."),
    _counted(counters.ORDERS_IGNORED, "Read orders that a worker did not know what to do with."),
    _counted(counters.CALLS_ENDED, "Calls of the transfer engine.", by="outcome"),
    Metric(name=READ_DURATION, kind="histogram", buckets=_SECONDS, help="Seconds of one read of one worker."),
    Metric(
        name=FENCES,
        kind="counter",
        label="outcome",
        values=("fenced", "not_fenced"),
        help="Attempts to make sure, after a call of unknown outcome, that nothing can land any more.",
    ),
    Metric(name=LOADS_IN_FLIGHT, kind="gauge", help="Requests waiting for or reading remote KV."),
    Metric(name=BLOCKS_QUARANTINED, kind="gauge", help="Blocks kept out of use because bytes may still land in them."),
)

_BOTH = (
    _counted(counters.MESSAGES_IGNORED, "Messages and events that meant nothing (any more).", by="reason"),
    Metric(
        name=REQUESTS_IGNORED,
        kind="counter",
        label="reason",
        values=("bad_params",),
        help="Requests whose kv_transfer_params could not be served; they are computed locally.",
    ),
    Metric(name=MESSAGES_RECEIVED, kind="counter", help="Valid messages received from peers."),
    Metric(
        name=MESSAGES_DROPPED,
        kind="counter",
        label="reason",
        values=("malformed", "version", "frames", "crowded", "queue_full", "no_route", "not_sendable", "not_allowed"),
        help="Messages from and to peers that were dropped; peers repeat what matters.",
    ),
    Metric(
        name=CONNECTIONS_REFUSED,
        kind="counter",
        label="reason",
        values=("address", "key"),
        help="Connections refused: neither from this host nor from `peers`, or without the cluster secret.",
    ),
    Metric(
        name=INVARIANTS_BROKEN,
        kind="counter",
        label="where",
        values=("producer", "consumer", "reader"),
        help="Bugs of ours: a transfer was failed because its state machine broke. Please report it with the log.",
    ),
)

METRICS = _PREFILL + _DECODE + _BOTH
BY_NAME = {metric.name: metric for metric in METRICS}
