"""Records of the conversation with one producer. They decide nothing; `peers` does."""

from __future__ import annotations

import dataclasses
import enum

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.p2p.fetches import PeerKey, ReaderIds
from vllm_mooncake_ascend.types import RequestId, TransferId
from vllm_mooncake_ascend.wire import messages

MessageKey = tuple[str, TransferId, RequestId]
"""Kind of question, and about which reader."""


class PeerState(enum.Enum):
    """What is known of a peer's layout."""

    ASKED = "asked"
    KNOWN = "known"
    REFUSED = "refused"


class Standing(enum.Enum):
    """How far a subscription of ours has come."""

    ASKED = "asked"
    PENDING = "pending"
    """Acknowledged, so it is renewed; it asks again at each renewal, lest the news of the prefill's end was lost."""
    READY = "ready"
    """Acknowledged and offered."""


@dataclasses.dataclass(slots=True)
class Unanswered:
    """A message that is repeated until it is answered."""

    message: messages.FromReader
    first_sent_s: float
    next_send_s: float


@dataclasses.dataclass(slots=True)
class Peer:
    """One producer."""

    key: PeerKey
    state: PeerState = PeerState.ASKED
    ranks: tuple[RankLayout, ...] = ()
    is_shared: bool = False
    """The workers have its layout."""
    readers: dict[ReaderIds, Standing] = dataclasses.field(default_factory=dict)
    """Our readers with it."""
    unanswered: dict[MessageKey, Unanswered] = dataclasses.field(default_factory=dict)
    """In order of `next_send_s`."""
    renewals: dict[int, tuple[float, tuple[ReaderIds, ...]]] = dataclasses.field(default_factory=dict)
    """When each was sent, and for whom."""
    renew_at_s: float | None = None
    lease_ttl_s: float = limits.LEASE_TTL_S
    silent_since_s: float | None = None
    """When the first message was sent that nothing was heard after."""
    num_unheard: int = 0
    """Moments since then at which something was sent: many messages at once are one."""
    sent_at_s: float = 0.0
    """The last of these moments."""
    used_at_s: float = 0.0

    @property
    def is_idle(self) -> bool:
        return not self.readers and not self.unanswered
