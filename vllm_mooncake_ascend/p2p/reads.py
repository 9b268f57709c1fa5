"""Reads: the part of the consumer from the allocation of blocks to the one report. No messages, no handshakes.

A read of a prefill that still runs is ordered in parts, as offers come; the last part comes when the prefill has ended.
A read ends when every rank has told so: DONE waits for the producer's verdict, REFUSED and FAILED are reported at once,
UNKNOWN is quarantined. A read that nothing will come of any more is stopped: no further engine call starts, and it ends
when the ranks have ended it. A rank that never does keeps its blocks; no waiting turns its silence into an end.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.blocks import tables_between, tokens_of_whole_blocks
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.p2p import actions, counters, events, offers
from vllm_mooncake_ascend.p2p.fetch_table import FetchTable
from vllm_mooncake_ascend.p2p.fetches import LISTENING, Fetch, FetchInput, FetchState
from vllm_mooncake_ascend.p2p.peer import Peer, PeerState
from vllm_mooncake_ascend.p2p.peers import Peers
from vllm_mooncake_ascend.p2p.settings import ConsumerSettings
from vllm_mooncake_ascend.types import Outcome, worst
from vllm_mooncake_ascend.wire.messages import Offer
from vllm_mooncake_ascend.wire.steps import ReadEnded, ReadOrder

_REASONS = {
    Outcome.REFUSED: counters.READ_REFUSED,
    Outcome.FAILED: counters.READ_FAILED,
    Outcome.UNKNOWN: counters.READ_UNKNOWN,
}


class Reads:
    """Works on the consumer's table and peers."""

    def __init__(
        self,
        table: FetchTable,
        peers: Peers,
        settings: ConsumerSettings,
        groups: tuple[GroupLayout, ...],
        do: Callable[[actions.ConsumerAction], None],
    ) -> None:
        self._table = table
        self._peers = peers
        self._settings = settings
        self._groups = groups
        self._do = do

    # --- starting and stopping ----------------------------------------------------------------------------------------

    def start(self, fetch: Fetch, event: events.BlocksAllocated, now: float) -> None:
        """vLLM gave the blocks and fixed the range: read it."""
        peer = self._peers.get(fetch.peer_key)
        assert peer is not None, "a ready fetch has a peer"
        assert peer.state is PeerState.KNOWN, "a ready fetch has a peer whose layout is known"
        assert fetch.offer is not None, "a ready fetch has an offer"
        end_token = event.num_local_tokens + event.num_remote_tokens
        if not offers.covers(fetch, event.num_local_tokens, end_token):
            self.refuse(fetch, event, now)
            return
        fetch.block_ids, fetch.first_token, fetch.end_token = event.block_ids, event.num_local_tokens, end_token
        fetch.ordered_token, fetch.generation = fetch.first_token, fetch.offer.generation
        self._table.owe(fetch, event.loaded_block_ids)
        self._table.pin(fetch)
        self._peers.share(peer)
        self._order_part(fetch, peer)
        self._count(counters.READS_ORDERED)
        self._table.move(fetch, FetchInput.ALLOCATED, FetchState.READING, self._give_up_at_s(fetch, now))

    def go_on(self, fetch: Fetch, offer: Offer, now: float) -> None:
        """A newer offer came while the fetch is being read: order what it adds.

        After a preemption that is everything: what was read before may have been overwritten while it was read.
        """
        peer = self._peers.get(fetch.peer_key)
        assert peer is not None, "a listening fetch has a peer"
        what = FetchInput.OFFERED_READY if offer.state == "ready" else FetchInput.OFFERED_PENDING
        unfit = (
            offers.why_refused(offer, fetch)
            or offers.why_unusable(offer, peer.ranks[0].groups)
            or offers.why_not_enough(offer, fetch)
        )
        if unfit:
            self.stop(fetch, what, now, farewell="release", reason=unfit)
            return
        fetch.offer = offer
        if offer.generation != fetch.generation:
            self._count(counters.READS_BEGUN_AGAIN)
            fetch.ordered_token, fetch.generation = fetch.first_token, offer.generation
        self._order_part(fetch, peer)
        self._table.move(fetch, what, FetchState.READING, self._give_up_at_s(fetch, now))

    def _order_part(self, fetch: Fetch, peer: Peer) -> None:
        """Order what can be read and was not ordered yet. The first part is ordered even if it is of no tokens: from then on
        every rank owes an end."""
        assert fetch.offer is not None, "only an offered transfer is read"
        there = peer.ranks[0].groups
        end_token = offers.readable_token(fetch, self._groups, there)
        is_last = fetch.offer.state == "ready"
        if end_token <= fetch.ordered_token and not is_last and fetch.num_parts:
            return
        first_token = table_token = fetch.ordered_token
        if first_token < end_token:
            table_token = tokens_of_whole_blocks(first_token, (*self._groups, *there))
        order = ReadOrder(
            transfer_id=fetch.transfer.transfer_id,
            request_id=fetch.request_id,
            incarnation=fetch.transfer.incarnation,
            first_token=first_token,
            end_token=end_token,
            remote_block_ids=tables_between(there, table_token, end_token, fetch.offer.block_ids),
            local_block_ids=tables_between(self._groups, table_token, end_token, fetch.block_ids),
            table_token=table_token,
            part=fetch.num_parts,
            generation=fetch.generation,
            is_last=is_last,
        )
        fetch.ordered_token = end_token
        fetch.num_parts += 1
        self._do(actions.OrderRead(order=order))

    def _give_up_at_s(self, fetch: Fetch, now: float) -> float:
        """When a read is given up: its prefill does not end, or a rank does not."""
        assert fetch.offer is not None, "only an offered transfer is read"
        bound_s = self._settings.read_wait_s + limits.ENGINE_CALL_S + limits.RANK_ANSWER_S
        return now + bound_s if fetch.offer.state == "ready" else max(now, fetch.give_up_at_s)

    def refuse(self, fetch: Fetch, event: events.BlocksAllocated, now: float) -> None:
        """vLLM waits for what will not come: say so."""
        if fetch.state is not FetchState.DOOMED:
            self._count(counters.LOADS_FAILED, counters.CHANGED_MEANWHILE)
        self.leave(fetch, now, farewell="release")
        self._table.owe(fetch, event.loaded_block_ids)
        self._table.settle(fetch, FetchInput.ALLOCATED, ok=False)

    def stop(self, fetch: Fetch, what: FetchInput, now: float, *, farewell: str, reason: str) -> None:
        """Nothing will come of the read: no further call, and wait for the ranks. `reason` empty: vLLM's own wish."""
        if reason:
            self._fail(fetch, reason)
        self.leave(fetch, now, farewell=farewell)
        self._do(actions.CancelRead(transfer_id=fetch.transfer.transfer_id, request_id=fetch.request_id))
        self._table.move(fetch, what, FetchState.STOPPING, now + limits.ENGINE_CALL_S + limits.RANK_ANSWER_S)

    def leave(self, fetch: Fetch, now: float, *, farewell: str) -> None:
        """Be no reader of the transfer any more (see `Peers.leave`); nothing if we are not."""
        peer = self._peers.get(fetch.peer_key) if fetch.state in LISTENING else None
        if peer is not None:
            self._peers.leave(peer, fetch.ids, now, farewell=farewell)

    # --- the workers' ends --------------------------------------------------------------------------------------------

    def rank_ended(self, ended: ReadEnded, now: float) -> None:
        """One rank's read has ended; the last one decides what the read has come to."""
        fetch = self._table.get(ended.request_id)
        if (
            fetch is None
            or fetch.transfer.transfer_id != ended.transfer_id
            or fetch.state not in (FetchState.READING, FetchState.STOPPING)
            or ended.rank in fetch.outcomes
        ):
            self._count(counters.MESSAGES_IGNORED, counters.NOBODY_ASKED)
            return
        self._count(counters.READS_ENDED, ended.outcome.value)
        self._count(counters.READ_BYTES, amount=ended.num_bytes)
        self._count(counters.READ_DESCRIPTORS, amount=ended.num_descriptors)
        self._count(counters.READ_SECONDS, amount=ended.seconds)
        fetch.outcomes[ended.rank] = ended.outcome
        if ended.outcome is not Outcome.DONE:
            text = f"read of rank {ended.rank} {ended.outcome.value}: {ended.reason}"
            self._do(actions.Note(level="warning", transfer_id=fetch.transfer.transfer_id, text=text))
        if len(fetch.outcomes) < self._settings.num_ranks:
            if ended.outcome is not Outcome.DONE and fetch.state is FetchState.READING:
                reason = _REASONS[ended.outcome]
                self.stop(fetch, FetchInput.RANK_FAILED, now, farewell="read_failed", reason=reason)
            return
        self._all_ended(fetch, worst(list(fetch.outcomes.values())), now)

    def _all_ended(self, fetch: Fetch, outcome: Outcome, now: float) -> None:
        fetch.read_ended_at_s = now
        if fetch.state is FetchState.READING and outcome is Outcome.DONE:
            peer = self._peers.get(fetch.peer_key)
            assert peer is not None, "a listening fetch has a peer"
            self._peers.confirm(peer, fetch.ids, now)
            self._table.move(fetch, FetchInput.READ_DONE, FetchState.CONFIRMING, now + limits.PEER_ANSWER_S)
            return
        if fetch.state is FetchState.READING:
            self._fail(fetch, _REASONS[outcome])
            self.leave(fetch, now, farewell="read_failed")
        if outcome is Outcome.UNKNOWN:
            self._quarantine(fetch, now)
        else:
            what = FetchInput.READ_DONE if outcome is Outcome.DONE else FetchInput.READ_FAILED
            self._table.settle(fetch, what, ok=False)

    def _quarantine(self, fetch: Fetch, now: float) -> None:
        self._count(counters.QUARANTINES)
        if self._settings.can_report_unknown_at_once:
            self._table.report(fetch, ok=False)
        self._table.move(fetch, FetchInput.READ_UNKNOWN, FetchState.QUARANTINED, now + limits.QUARANTINE_S)

    # --- the producer's word, or none ---------------------------------------------------------------------------------

    def judged(self, fetch: Fetch, what: FetchInput, now: float, *, held: bool) -> None:
        """The producer has said whether the bytes were the right ones, or is not there to say it (`held` False)."""
        self.leave(fetch, now, farewell="")
        if held:
            self._count(counters.LOADS_DONE, counters.HELD)
        else:
            self._fail(fetch, counters.LOST if what is FetchInput.LOST else counters.UNCONFIRMED)
        self._table.settle(fetch, what, ok=held)

    def unjudged(self, fetch: Fetch, what: FetchInput, now: float) -> None:
        """The producer does not answer: the time rule decides."""
        ok = offers.time_rule_holds(fetch)
        self.leave(fetch, now, farewell="")
        if ok:
            self._count(counters.LOADS_DONE, counters.TIME_RULE)
        else:
            self._fail(fetch, counters.UNCONFIRMED)
        self._table.settle(fetch, what, ok=ok)

    def abandoned(self, fetch: Fetch, now: float) -> None:
        """vLLM ended the request while the producer's word was awaited; that goes on being asked for, for its sake."""
        self.leave(fetch, now, farewell="")
        self._table.settle(fetch, FetchInput.ENDED, ok=False)

    # --- time ---------------------------------------------------------------------------------------------------------

    def lapse(self, fetch: Fetch, now: float) -> None:
        """A bound of this read is over."""
        match fetch.state:
            case FetchState.READING if fetch.offer is not None and fetch.offer.state == "pending":
                self.stop(fetch, FetchInput.LATE, now, farewell="release", reason=counters.NO_OFFER)
            case FetchState.READING:
                self._count(counters.READS_OVERDUE)
                self.stop(fetch, FetchInput.LATE, now, farewell="read_failed", reason=counters.READ_OVERDUE)
            case FetchState.STOPPING:
                self._overdue(fetch)
            case FetchState.CONFIRMING:
                self._verdict_overdue(fetch, now)
            case _:
                self._table.settle(fetch, FetchInput.LATE, ok=False)

    def _verdict_overdue(self, fetch: Fetch, now: float) -> None:
        """Unless this process was stopped, and the verdict lies unread: then it is waited for a moment longer, once."""
        was_late = now > fetch.read_ended_at_s + limits.PEER_ANSWER_S + limits.RESEND_S
        if was_late and not fetch.has_grace:
            fetch.has_grace = True
            self._table.move(fetch, FetchInput.LATE, FetchState.CONFIRMING, now + 2 * limits.RESEND_S)
        else:
            self.unjudged(fetch, FetchInput.LATE, now)

    def _overdue(self, fetch: Fetch) -> None:
        """A rank has not ended within every bound it has. Where a pin is all that is needed, vLLM need not wait with us."""
        self._count(counters.READS_OVERDUE)
        num_missing = self._settings.num_ranks - len(fetch.outcomes)
        text = f"{num_missing} of {self._settings.num_ranks} ranks have not ended their read; its blocks stay reserved"
        self._do(actions.Note(level="error", transfer_id=fetch.transfer.transfer_id, text=text))
        if self._settings.can_report_unknown_at_once:
            self._table.report(fetch, ok=False)
        self._table.move(fetch, FetchInput.LATE, FetchState.STOPPING)

    def _fail(self, fetch: Fetch, reason: str) -> None:
        self._count(counters.LOADS_FAILED, reason)
        text = f"remote KV did not come: request_id={fetch.request_id} reason={reason}"
        self._do(actions.Note(level="warning", transfer_id=fetch.transfer.transfer_id, text=text))

    def _count(self, name: str, reason: str = counters.NO_REASON, *, amount: float = 1.0) -> None:
        self._do(actions.Count(name=name, reason=reason, amount=amount))
