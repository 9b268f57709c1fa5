"""What the operator may choose about the machines of a transfer. Everything else is a bound in `limits`."""

from __future__ import annotations

import msgspec

from vllm_mooncake_ascend import limits


class ProducerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of the send leases of one prefill engine."""

    lease_ttl_s: float
    """Unread blocks are held this long after the last acknowledged renewal."""
    lease_max_s: float
    """No lease outlives the end of its prefill by more than this."""
    max_pinned_blocks: int
    """Blocks that all leases together may hold; never passed."""
    streams: bool = False
    """Offer whole blocks while their prefill still runs, to readers that ask for it; otherwise all at once, at the end."""
    unknown_wait_s: float = limits.UNKNOWN_TRANSFER_WAIT_S
    """How long somebody may wait for a transfer that no prefill has announced."""

    def __post_init__(self) -> None:
        assert 0 < self.lease_ttl_s <= self.lease_max_s, "a lease must be able to last one ttl"
        assert self.max_pinned_blocks >= 0


class ConsumerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of the reads of one decode engine."""

    num_ranks: int
    """Workers of this engine: each answers every OrderRead once."""
    fail_on_load_error: bool
    """load_failure_policy "fail": a request whose KV cannot come ends with an error; otherwise it computes locally."""
    can_report_unknown_at_once: bool
    """A failed receive gives the request other blocks (vLLM >= 0.30), so that a pin is all the quarantine needs; else the
    report itself waits until nothing can land."""
    min_remote_tokens: int = limits.MIN_REMOTE_TOKENS
    offer_wait_s: float = limits.OFFER_WAIT_S
    """How long a request may wait for the end of its prefill."""
    read_wait_s: float = limits.READ_WAIT_S
    """Upper bound on the reads of one request."""
    lease_ttl_s: float = limits.LEASE_TTL_S
    """Renewals are paced by this until a producer has told its own."""
    streams: bool = False
    """Read blocks while the prefill still runs, where the producer offers that."""

    def __post_init__(self) -> None:
        assert self.num_ranks >= 1
        assert self.min_remote_tokens >= 1
        assert self.lease_ttl_s > 0


class ReaderSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Of the reads of one decode worker."""

    read_wait_s: float = limits.READ_WAIT_S
    """No engine call of a read starts later than this after its order."""
