"""Records of the consumer: one request's wish for remote KV, and the law of it. Decides nothing.

States of a fetch:

    UNKNOWN      not in the table
    ASKING       subscribed, nothing heard of the transfer
    PENDING      the producer has the reader; its prefill runs, or its layout has not come yet
    READY        offered, whole or as far as the prefill is, fits and is of our prompt; waits for vLLM to allocate blocks
    READING      the workers read, or wait for the prefill to go on
    STOPPING     nothing will come of the read; waits until every rank has ended it
    CONFIRMING   every byte is in place; waits for the producer's word that they were the right ones
    QUARANTINED  bytes may still land in its blocks: pinned until none can
    DOOMED       failed before blocks were allocated, and vLLM is to fail it: takes blocks only to report them failed
    SPENT        nothing more will come; answers 0 tokens until vLLM ends the request

vLLM is owed exactly one report from the moment it allocates blocks for remote tokens, also for a request it has aborted.
"""

from __future__ import annotations

import dataclasses
import enum

from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.p2p.events import BlockTable
from vllm_mooncake_ascend.types import Incarnation, Outcome, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire.messages import Offer
from vllm_mooncake_ascend.wire.params import RemotePrefill

PeerKey = tuple[PeerAddress, Incarnation]
"""One start of one engine at one address."""
ReaderIds = tuple[TransferId, RequestId]
"""A transfer and the local request that reads it."""


class FetchState(enum.Enum):
    """See the module's table."""

    UNKNOWN = "unknown"
    ASKING = "asking"
    PENDING = "pending"
    READY = "ready"
    READING = "reading"
    STOPPING = "stopping"
    CONFIRMING = "confirming"
    QUARANTINED = "quarantined"
    DOOMED = "doomed"
    SPENT = "spent"


class FetchInput(enum.Enum):
    """What can happen to a fetch."""

    ARRIVED = "request arrived"
    WELCOMED = "layout accepted"
    OFFERED_PENDING = "Offer(pending)"
    OFFERED_READY = "Offer(ready)"
    OFFERED_GAP = "Offer that does not join what is known"
    GONE = "Gone, or gone in Renewed"
    PEER_LOST = "peer lost"
    PEER_REPLACED = "peer restarted or incompatible"
    ALLOCATED = "blocks allocated"
    NOT_ALLOCATED = "no remote tokens wanted"
    RANK_FAILED = "a rank failed, others still read"
    READ_DONE = "all ranks: done"
    READ_FAILED = "all ranks: worst refused or failed"
    READ_UNKNOWN = "all ranks: worst unknown"
    HELD = "Verdict(held)"
    LOST = "Verdict(lost)"
    ENDED = "request ended"
    LATE = "time is over"


@dataclasses.dataclass(slots=True)
class Fetch:
    """One request's wish for remote KV."""

    request_id: RequestId
    transfer: RemotePrefill
    prompt_digest: bytes
    num_prompt_tokens: int
    state: FetchState = FetchState.UNKNOWN
    give_up_at_s: float = 0.0
    """When it has waited long enough for its prefill."""
    offer: Offer | None = None
    """The latest usable one."""
    acknowledged_s: float = 0.0
    """When the latest acknowledged Subscribe or Renew was sent: the lease is sure for one ttl from then."""
    block_ids: BlockTable = ()
    """vLLM's table of the request."""
    loaded_block_ids: tuple[int, ...] = ()
    """The blocks remote KV is written to."""
    first_token: int = 0
    end_token: int = 0
    """What is to be read: tokens [first_token, end_token)."""
    ordered_token: int = 0
    """Ordered so far, of this generation: tokens [first_token, ordered_token)."""
    generation: int = 0
    """Of the prefill, that the parts ordered last are of."""
    num_parts: int = 0
    """Ordered so far."""
    is_pinned: bool = False
    """They are pinned: a rank writes to them, or bytes may still land."""
    outcomes: dict[int, Outcome] = dataclasses.field(default_factory=dict)
    """How the read of each rank ended."""
    read_ended_at_s: float = 0.0
    has_grace: bool = False
    """Its verdict was waited for a little longer, because this process itself was late."""
    owes_report: bool = False
    """vLLM waits for the one report of this request."""
    is_over: bool = False
    """vLLM has ended the request."""

    @property
    def peer_key(self) -> PeerKey:
        return (self.transfer.address, self.transfer.incarnation)

    @property
    def ids(self) -> ReaderIds:
        return (self.transfer.transfer_id, self.request_id)


_S, _I = FetchState, FetchInput
_FAILED = (_S.SPENT, _S.DOOMED)
_REFUSE = "release; doomed when vLLM is to fail the request"
_LOSE = "doomed when vLLM is to fail the request"
_MISFIT = "release to a misfit; doomed when vLLM is to fail the request"
_LEAVE = "release"
_STOP = "release, CancelRead"
_AGAIN = "Subscribe again"
_NEWER = "keep it if it is newer; refuse what makes no sense"
_MORE = "if it is newer OrderRead of what it adds, of all again after a preemption; CancelRead if it makes no sense"
_REPORT = "report failed"

FETCH_LAW: Law[FetchState, FetchInput] = Law(
    {
        _S.UNKNOWN: {
            _I.ARRIVED: Cell(
                "Hello to a new peer, Subscribe; refused where it cannot work, a misfit's transfer released",
                (_S.ASKING, _S.SPENT, _S.DOOMED),
            ),
        },
        _S.ASKING: {
            _I.WELCOMED: Cell("nothing", (_S.ASKING,)),
            _I.OFFERED_PENDING: Cell(
                "renew from now on; keep what is written if we stream; refuse another prompt", (_S.PENDING, _S.READY, *_FAILED)
            ),
            _I.OFFERED_READY: Cell(
                "keep the offer; refuse another prompt or an offer that makes no sense", (_S.READY, _S.PENDING, *_FAILED)
            ),
            _I.OFFERED_GAP: Cell(_AGAIN, (_S.ASKING,)),
            _I.GONE: Cell(_REFUSE, _FAILED),
            _I.PEER_LOST: Cell(_LOSE, _FAILED),
            _I.PEER_REPLACED: Cell(_MISFIT, _FAILED),
            _I.ALLOCATED: Cell("release, report failed: vLLM did not wait for our answer", (_S.SPENT,)),
            _I.NOT_ALLOCATED: Cell(_LEAVE, (_S.SPENT,)),
            _I.ENDED: Cell(_LEAVE, (_S.UNKNOWN,)),
            _I.LATE: Cell(_REFUSE, _FAILED),
        },
        _S.PENDING: {
            _I.WELCOMED: Cell("use the offer if there is one", (_S.PENDING, _S.READY, *_FAILED)),
            _I.OFFERED_PENDING: Cell(
                "keep what is written if we stream; refuse another prompt", (_S.PENDING, _S.READY, *_FAILED)
            ),
            _I.OFFERED_READY: Cell(
                "keep the offer; refuse another prompt or an offer that makes no sense", (_S.READY, _S.PENDING, *_FAILED)
            ),
            _I.OFFERED_GAP: Cell(_AGAIN, (_S.PENDING,)),
            _I.GONE: Cell(_REFUSE, _FAILED),
            _I.PEER_LOST: Cell(_LOSE, _FAILED),
            _I.PEER_REPLACED: Cell(_MISFIT, _FAILED),
            _I.ALLOCATED: Cell("release, report failed: vLLM did not wait for our answer", (_S.SPENT,)),
            _I.NOT_ALLOCATED: Cell(_LEAVE, (_S.SPENT,)),
            _I.ENDED: Cell(_LEAVE, (_S.UNKNOWN,)),
            _I.LATE: Cell(_REFUSE, _FAILED),
        },
        _S.READY: {
            _I.OFFERED_PENDING: Cell(_NEWER, (_S.READY, *_FAILED)),
            _I.OFFERED_READY: Cell(_NEWER, (_S.READY, *_FAILED)),
            _I.OFFERED_GAP: Cell(_AGAIN, (_S.READY,)),
            _I.GONE: Cell(_REFUSE, _FAILED),
            _I.PEER_LOST: Cell(_LOSE, _FAILED),
            _I.PEER_REPLACED: Cell(_MISFIT, _FAILED),
            _I.ALLOCATED: Cell("pin, ShareLayout once, OrderRead; report failed beyond the offer", (_S.READING, _S.SPENT)),
            _I.NOT_ALLOCATED: Cell(_LEAVE, (_S.SPENT,)),
            _I.ENDED: Cell(_LEAVE, (_S.UNKNOWN,)),
            _I.LATE: Cell("refuse if its prefill has not ended", (_S.READY, *_FAILED)),
        },
        _S.READING: {
            _I.OFFERED_PENDING: Cell(_MORE, (_S.READING, _S.STOPPING)),
            _I.OFFERED_READY: Cell(_MORE, (_S.READING, _S.STOPPING)),
            _I.OFFERED_GAP: Cell(_AGAIN, (_S.READING,)),
            _I.GONE: Cell(_STOP, (_S.STOPPING,)),
            _I.PEER_LOST: Cell("CancelRead", (_S.STOPPING,)),
            _I.PEER_REPLACED: Cell("CancelRead; release to a misfit", (_S.STOPPING,)),
            _I.RANK_FAILED: Cell("ReadDone(not ok), CancelRead", (_S.STOPPING,)),
            _I.READ_DONE: Cell("ReadDone(ok)", (_S.CONFIRMING,)),
            _I.READ_FAILED: Cell("ReadDone(not ok), unpin, report failed", (_S.SPENT,)),
            _I.READ_UNKNOWN: Cell("ReadDone(not ok), report failed now or after the quarantine", (_S.QUARANTINED,)),
            _I.ENDED: Cell(_STOP, (_S.STOPPING,)),
            _I.LATE: Cell(_STOP + ": its prefill has not ended, or a rank is overdue", (_S.STOPPING,)),
        },
        _S.STOPPING: {
            _I.READ_DONE: Cell("unpin, report failed", (_S.SPENT, _S.UNKNOWN)),
            _I.READ_FAILED: Cell("unpin, report failed", (_S.SPENT, _S.UNKNOWN)),
            _I.READ_UNKNOWN: Cell("report failed now or after the quarantine", (_S.QUARANTINED,)),
            _I.NOT_ALLOCATED: Cell("nothing: reported while a rank was overdue", (_S.STOPPING,)),
            _I.ENDED: Cell("nothing yet: the ranks have not ended", (_S.STOPPING,)),
            _I.LATE: Cell("a rank is overdue: report failed if pins suffice, keep the blocks in any case", (_S.STOPPING,)),
        },
        _S.CONFIRMING: {
            _I.OFFERED_PENDING: Cell("nothing: it is older", (_S.CONFIRMING,)),
            _I.OFFERED_READY: Cell("nothing: the same", (_S.CONFIRMING,)),
            _I.GONE: Cell("nothing: the verdict decides", (_S.CONFIRMING,)),
            _I.HELD: Cell("unpin, report received", (_S.SPENT,)),
            _I.LOST: Cell("unpin, report failed", (_S.SPENT,)),
            _I.PEER_LOST: Cell("unpin, report by the time rule", (_S.SPENT,)),
            _I.PEER_REPLACED: Cell("unpin, report failed", (_S.SPENT,)),
            _I.ENDED: Cell("unpin, report failed", (_S.UNKNOWN,)),
            _I.LATE: Cell("unpin, report by the time rule; once a moment more if we were late", (_S.SPENT, _S.CONFIRMING)),
        },
        _S.QUARANTINED: {
            _I.NOT_ALLOCATED: Cell("nothing", (_S.QUARANTINED,)),
            _I.ENDED: Cell("nothing yet: bytes may still land", (_S.QUARANTINED,)),
            _I.LATE: Cell("unpin, report failed if not yet done", (_S.SPENT, _S.UNKNOWN)),
        },
        _S.DOOMED: {
            _I.ALLOCATED: Cell(_REPORT, (_S.SPENT,)),
            _I.NOT_ALLOCATED: Cell("nothing: computed locally after all", (_S.SPENT,)),
            _I.ENDED: Cell("nothing", (_S.UNKNOWN,)),
        },
        _S.SPENT: {
            _I.ALLOCATED: Cell("report failed: it was lost between vLLM's question and its allocation", (_S.SPENT,)),
            _I.NOT_ALLOCATED: Cell("nothing", (_S.SPENT,)),
            _I.ENDED: Cell("nothing", (_S.UNKNOWN,)),
        },
    }
)
"""Law of a fetch at the consumer."""

UNALLOCATED = frozenset({_S.ASKING, _S.PENDING, _S.READY})
"""States in which vLLM has no blocks for the request yet."""
LISTENING = UNALLOCATED | {_S.READING, _S.CONFIRMING}
"""States in which messages about a fetch, and the fate of its peer, matter."""
