"""Names for the identities and outcomes that every room speaks of. Knows nothing of the rest."""

from __future__ import annotations

import enum
from typing import NewType

RequestId = NewType("RequestId", str)
"""vLLM's request id, unique among the live requests of one engine."""

TransferId = NewType("TransferId", str)
"""One movement of one prompt's KV cache from a producer; a new attempt has a new id."""

Incarnation = NewType("Incarnation", str)
"""Random id of one start of one engine (one DP rank). A restarted engine has another."""

PeerAddress = NewType("PeerAddress", str)
"""Where a producer's side channel listens: `host:port`, IPv6 hosts in brackets."""

Session = NewType("Session", str)
"""`host:port` by which Mooncake Transfer Engine knows one worker's registered memory."""


class Outcome(enum.Enum):
    """What is known after an engine call about the bytes of its target.

    The order is the order of badness: of several outcomes the worst one speaks for all (`worst`).
    """

    DONE = "done"
    """Every byte is in place."""
    REFUSED = "refused"
    """The call was not started (our own check said no); no byte moved and none will."""
    FAILED = "failed"
    """The call failed and nothing of it can land any more; the target holds an undefined mix of old and new bytes."""
    UNKNOWN = "unknown"
    """The call failed and bytes may still land. Nothing of the target may be reused before that is resolved."""


_BADNESS = (Outcome.DONE, Outcome.REFUSED, Outcome.FAILED, Outcome.UNKNOWN)


def worst(outcomes: list[Outcome]) -> Outcome:
    """The outcome that speaks for all of `outcomes` (at least one)."""
    assert outcomes, "an outcome of nothing is not an outcome"
    return max(outcomes, key=_BADNESS.index)
