"""Consumers with one mistake each, for `planted_bugs`. Mistakes that were once real are marked so."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.consumer import Consumer
from vllm_mooncake_ascend.p2p.fetches import Fetch, FetchInput, FetchState
from vllm_mooncake_ascend.p2p.peer import Peer
from vllm_mooncake_ascend.p2p.peers import Peers
from vllm_mooncake_ascend.p2p.reads import Reads
from vllm_mooncake_ascend.testing.planted_law import NoLaw
from vllm_mooncake_ascend.types import Outcome, PeerAddress
from vllm_mooncake_ascend.wire import messages
from vllm_mooncake_ascend.wire.steps import ReadEnded


class LawlessConsumer(Consumer):
    """A consumer whose parts may be exchanged."""

    reads_class: type[Reads] = Reads

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, law=NoLaw())
        self._reads = self.reads_class(self._table, self._peers, self._settings, self._ranks[0].groups, self._do)


class FailedReadReceived(Reads):
    def rank_ended(self, ended: ReadEnded, now: float) -> None:
        is_failed = ended.outcome in (Outcome.FAILED, Outcome.REFUSED)
        super().rank_ended(msgspec.structs.replace(ended, outcome=Outcome.DONE) if is_failed else ended, now)


class Unconfirmed(Reads):
    def _all_ended(self, fetch: Fetch, outcome: Outcome, now: float) -> None:
        if fetch.state is FetchState.READING and outcome is Outcome.DONE:
            self.leave(fetch, now, farewell="release")
            self._table.settle(fetch, FetchInput.READ_DONE, ok=True)
        else:
            super()._all_ended(fetch, outcome, now)


class NoQuarantine(Reads):
    def _quarantine(self, fetch: Fetch, _: float) -> None:
        self._table.settle(fetch, FetchInput.READ_UNKNOWN, ok=False)


class UnansweredIsFine(Reads):
    def unjudged(self, fetch: Fetch, what: FetchInput, now: float) -> None:
        self.leave(fetch, now, farewell="")
        self._table.settle(fetch, what, ok=True)


class LeaseAloneIsTrusted(Reads):
    """The time rule without its second half: another engine may have answered in the producer's place."""

    def unjudged(self, fetch: Fetch, what: FetchInput, now: float) -> None:
        assert fetch.offer is not None
        lease_s = fetch.offer.lease_ttl_s - limits.LEASE_MARGIN_S
        ok = fetch.read_ended_at_s <= fetch.acknowledged_s + lease_s
        self.leave(fetch, now, farewell="")
        self._table.settle(fetch, what, ok=ok)


class LostIsHeld(Reads):
    def judged(self, fetch: Fetch, what: FetchInput, now: float, *, held: bool) -> None:
        super().judged(fetch, what, now, held=held or what is FetchInput.LOST)


class AbortForgets(Reads):
    def stop(self, fetch: Fetch, what: FetchInput, now: float, *, farewell: str, reason: str) -> None:
        if what is not FetchInput.ENDED:
            super().stop(fetch, what, now, farewell=farewell, reason=reason)
            return
        self.leave(fetch, now, farewell=farewell)
        self._table.move(fetch, what, FetchState.UNKNOWN)


class AbortDoesNotWait(Reads):
    def stop(self, fetch: Fetch, what: FetchInput, now: float, *, farewell: str, reason: str) -> None:
        if what is not FetchInput.ENDED:
            super().stop(fetch, what, now, farewell=farewell, reason=reason)
            return
        self.leave(fetch, now, farewell=farewell)
        self._do(actions.CancelRead(transfer_id=fetch.transfer.transfer_id, request_id=fetch.request_id))
        self._table.settle(fetch, what, ok=False)


class OverdueIsEnded(Reads):
    def _overdue(self, fetch: Fetch) -> None:
        self._table.settle(fetch, FetchInput.LATE, ok=False)


class GenerationIgnored(Reads):
    """What was read before a preemption is kept."""

    def go_on(self, fetch: Fetch, offer: messages.Offer, now: float) -> None:
        fetch.generation = offer.generation
        super().go_on(fetch, offer, now)


@contextlib.contextmanager
def orders_changed(reads: Reads, **changes: Any) -> Iterator[None]:
    """Orders go out with other values in some fields."""
    do = reads._do

    def do_otherwise(action: actions.ConsumerAction) -> None:
        if isinstance(action, actions.OrderRead):
            action = actions.OrderRead(order=msgspec.structs.replace(action.order, **changes))
        do(action)

    reads._do = do_otherwise
    yield
    reads._do = do


class EveryPartIsTheLast(Reads):
    def _order_part(self, fetch: Fetch, peer: Peer) -> None:
        with orders_changed(self, is_last=True):
            super()._order_part(fetch, peer)


class TablesFromTheStart(Reads):
    """Tables begin where the part begins, and workers are not told."""

    def _order_part(self, fetch: Fetch, peer: Peer) -> None:
        with orders_changed(self, table_token=0):
            super()._order_part(fetch, peer)


def with_reads(bad_reads: type[Reads]) -> Callable[..., Consumer]:
    return type("_Planted", (LawlessConsumer,), {"reads_class": bad_reads})


class DoubleReport(LawlessConsumer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        report = self._table.report

        def report_twice(fetch: Fetch, *, ok: bool) -> None:
            owed = fetch.owes_report
            report(fetch, ok=ok)
            fetch.owes_report = owed and fetch.state is FetchState.STOPPING

        self._table.report = report_twice  # type: ignore[method-assign]


class NoDeadline(LawlessConsumer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._settings = msgspec.structs.replace(self._settings, offer_wait_s=1e9)
        self._peers._is_silent = lambda *_: False  # type: ignore[method-assign]


class OwnSilence(LawlessConsumer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)

        def is_silent(peer: Peer, now: float) -> bool:
            return peer.silent_since_s is not None and now >= peer.silent_since_s + limits.PEER_ANSWER_S

        self._peers._is_silent = is_silent  # type: ignore[method-assign]


class LostRenewalCounts(LawlessConsumer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        renew = self._peers._renew

        def renew_and_believe(peer: Peer, now: float) -> None:
            renew(peer, now)
            for fetch in self._fetches_of(peer):
                fetch.acknowledged_s = now

        self._peers._renew = renew_and_believe  # type: ignore[method-assign]


class AnyDigest(LawlessConsumer):
    def _arrive(self, event: events.RequestArrived, now: float) -> None:
        transfer = msgspec.structs.replace(event.transfer, prompt_digest=b"")
        super()._arrive(msgspec.structs.replace(event, transfer=transfer), now)

    def _offered(self, peer: Peer, fetch: Fetch, offer: messages.Offer, now: float) -> None:
        super()._offered(peer, fetch, msgspec.structs.replace(offer, prompt_digest=fetch.prompt_digest), now)


class AnyIncarnation(LawlessConsumer):
    def _hear(self, address: PeerAddress, message: messages.FromProducer, now: float) -> None:
        known = self._peers.at(address)
        if known:
            message = msgspec.structs.replace(message, incarnation=known[0].key[1])
        super()._hear(address, message, now)


class OldSilence(LawlessConsumer):
    """Was real: silence counted from a message that had long been answered, so one lost renewal lost the peer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        peers = self._peers

        def heard(peer: Peer) -> None:
            has_open = bool(peer.unanswered)
            Peers.heard(peers, peer)
            if has_open:
                peer.silent_since_s = self._now

        self._now = 0.0
        peers.heard = heard  # type: ignore[method-assign]

    def handle(self, event: events.ConsumerEvent, now: float) -> list[actions.ConsumerAction]:
        self._now = now
        return super().handle(event, now)


class AllDueAtOnce(Consumer):
    """Was real: all alarms were taken before the first was acted on, so a lost peer's request expired a second time."""

    def handle(self, event: events.ConsumerEvent, now: float) -> list[actions.ConsumerAction]:
        take_due = self._timers.take_due
        done = []
        due = []
        while (key := take_due(now)) is not None:
            due.append(key)
        for key in due:
            self._lapse(key, now)
        done.extend(super().handle(event, now))
        return done
