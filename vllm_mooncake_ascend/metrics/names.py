"""Every metric of the connector, as data: name, kind, label, the label's values, help.

Machines count by the names in `p2p.counters` and `pool.counters`, shells by those below; statistics, Prometheus and the docs
take all they say from here. A label has a bounded set of values: one that is not listed is counted as `other`, so that no
peer and no client can make series grow.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from vllm_mooncake_ascend.p2p import counters
from vllm_mooncake_ascend.pool import counters as pool_counters
from vllm_mooncake_ascend.types import Outcome

PREFIX = "mooncake_ascend:"
OTHER = "other"

# Names that shells count by; those of the machines stand in p2p.counters and pool.counters.
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

POOL_REQUESTS_WAITING = "pool_requests_waiting"
POOL_LOADS_IN_FLIGHT = "pool_loads_in_flight"
POOL_SAVES_IN_FLIGHT = "pool_saves_in_flight"
POOL_BLOCKS_PINNED = "pool_blocks_pinned"
POOL_BLOCKS_QUARANTINED = "pool_blocks_quarantined"
POOL_QUEUE_DEPTH = "pool_queue_depth"
POOL_BREAKER_OPEN = "pool_breaker_open"
POOL_HASHES_PRIVATE = "pool_hashes_private"
POOL_LOOKUP_DURATION = "pool_lookup_duration_seconds"
POOL_GET_DURATION = "pool_get_duration_seconds"
POOL_PUT_DURATION = "pool_put_duration_seconds"
POOL_STORE_ERRORS = "pool_store_errors_total"
"""Keys by the code the store answered with: of every `KeyResult` that has a `reason`, `str(code)`."""

STORE_CODES = (
    *(-1, -10, -101, -103, -200, -400, -500, -600, -601),
    *(-700, -701, -702, -705, -706, -707, -710, -712, -714),
    *(-800, -801, -900, -901, -1010, -1011, -1101, -1102, -1103, -1700, -1701),
)
"""Codes of errors that a label may have. `engines.store_codes` says what they mean; a test holds the two together."""


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
_POOL_REASONS = tuple(
    value for name, value in vars(pool_counters).items() if name.isupper() and value and not value.endswith("_total")
)
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_LOOKUP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)


def _counted(name: str, help_text: str, *, by: Literal["", "reason", "outcome"] = "") -> Metric:
    """A counter of the machines of a transfer."""
    values = {"": (), "reason": _REASONS, "outcome": _OUTCOMES}[by]
    return Metric(name=name, kind="counter", label=by, values=values, help=help_text)


def _pooled(name: str, help_text: str, *, by: Literal["", "reason", "outcome"] = "") -> Metric:
    """A counter of the machines of the pool."""
    values = {"": (), "reason": _POOL_REASONS, "outcome": _OUTCOMES}[by]
    return Metric(name=name, kind="counter", label=by, values=values, help=help_text)


def _gauge(name: str, help_text: str) -> Metric:
    return Metric(name=name, kind="gauge", help=help_text)


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
    _counted(counters.READS_BEGUN_AGAIN, "Reads of a running prefill that began anew because it was preempted."),
    _counted(counters.READS_ENDED, "Reads that ended, per worker.", by="outcome"),
    _counted(counters.READ_BYTES, "KV bytes read from prefill engines."),
    _counted(counters.READ_DESCRIPTORS, "Byte runs given to the transfer engine."),
    _counted(
        counters.READ_SECONDS,
        "Seconds of all reads, each from its first engine call to its last, less its waits for prefill.",
    ),
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

_POOL = (
    _pooled(pool_counters.LOOKUPS_ENDED, "Looks into the pool, by hit, miss, or why there was none.", by="reason"),
    _pooled(pool_counters.LOOKUPS_TOO_LATE, "Answers to lookups that nobody waited for any more."),
    _pooled(
        pool_counters.HIT_TOKENS,
        "Tokens whose load from the pool was ordered. vLLM counts hits of its own cache as `vllm:prefix_cache_hits`.",
    ),
    _pooled(pool_counters.LOADS_ENDED, "Loads of requests, by done, or why they failed.", by="reason"),
    _pooled(pool_counters.LOADED_TOKENS, "Tokens that were loaded."),
    _pooled(pool_counters.LOADS_ABORTED, "Loads whose requests ended before them."),
    _pooled(pool_counters.LOADS_OVERDUE, "Loads that a worker did not end within every bound it has."),
    _pooled(
        pool_counters.QUARANTINES,
        "Gets and saves of unknown outcome. Their blocks stay out of use: of a get until the store is fenced, of a save (put) "
        "for a while.",
        by="reason",
    ),
    _pooled(pool_counters.SAVES_ORDERED, "Saves of computed chunks ordered from the workers."),
    _pooled(pool_counters.SAVES_ENDED, "Saves of chunks, by done, or why they are not in the pool.", by="reason"),
    _pooled(pool_counters.BLOCKS_SHARED, "Blocks not saved because the pool has them, or another save puts them."),
    _pooled(pool_counters.STALE_PROGRESS, "Progress of a step that a preemption or a reset has made void."),
    _pooled(pool_counters.GETS_ENDED, "Keys got, per worker.", by="outcome"),
    _pooled(pool_counters.GETS_MISSING, "Keys that were gone when they were got: evicted, or lost with their owner."),
    _pooled(pool_counters.GET_BYTES, "KV bytes got from the pool."),
    _pooled(pool_counters.PUTS_ENDED, "Keys put, per worker.", by="outcome"),
    _pooled(pool_counters.PUTS_REPEATED, "Puts tried once more because the store was full for a moment."),
    _pooled(pool_counters.PUT_BYTES, "KV bytes put into the pool."),
    _pooled(pool_counters.FENCES, "Attempts to make sure, after a get of unknown outcome, that nothing can land.", by="reason"),
    _pooled(pool_counters.BREAKER_OPENED, "Times that the scheduler or a worker found the store dead, and went on without it."),
    _pooled(pool_counters.BREAKER_CLOSED, "Times that one of them found it healthy again."),
    _pooled(pool_counters.EVENTS_IGNORED, "Events of the pool that meant nothing (any more)."),
    Metric(
        name=POOL_STORE_ERRORS,
        kind="counter",
        label="code",
        values=("0", *(str(code) for code in STORE_CODES)),
        help="Keys that the store answered with an error, by Mooncake's code; the table below has their meanings.",
    ),
    Metric(name=POOL_LOOKUP_DURATION, kind="histogram", buckets=_LOOKUP_SECONDS, help="Seconds of one lookup's store call."),
    Metric(name=POOL_GET_DURATION, kind="histogram", buckets=_SECONDS, help="Seconds of one get call of one worker."),
    Metric(name=POOL_PUT_DURATION, kind="histogram", buckets=_SECONDS, help="Seconds of one put call of one worker."),
    _gauge(POOL_REQUESTS_WAITING, "Requests held back for a lookup or a load."),
    _gauge(POOL_LOADS_IN_FLIGHT, "Loads of the worker that told last which have not ended."),
    _gauge(POOL_SAVES_IN_FLIGHT, "Saves that hold blocks."),
    _gauge(POOL_BLOCKS_PINNED, "KV blocks kept for loads and saves."),
    _gauge(POOL_BLOCKS_QUARANTINED, "Blocks of loads given up, in which bytes may still land."),
    _gauge(POOL_QUEUE_DEPTH, "Blocks that wait to be put, at the worker that told last."),
    _gauge(POOL_BREAKER_OPEN, "1: the scheduler makes no lookups because the store does not answer."),
    _gauge(POOL_HASHES_PRIVATE, "1: no other engine can have this one's block hashes; its log says why."),
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
        values=("producer", "consumer", "reader", "pool_scheduler", "pool_worker"),
        help="Bugs of ours: a transfer was failed because its state machine broke. Please report it with the log.",
    ),
)

METRICS = _PREFILL + _DECODE + _POOL + _BOTH
BY_NAME = {metric.name: metric for metric in METRICS}
