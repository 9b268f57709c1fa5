"""Planted bugs: the real machines with one mistake each. The simulator must find every one, or it has lost its power.

Each entry says what the mistake is, in which themes it shows, and within how many seeds it must be found. The laws are off
here: it is the world that has to notice. Mistakes that were once real are marked so.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Law, State, What
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.consumer import Consumer
from vllm_mooncake_ascend.p2p.fetches import Fetch, FetchInput, FetchState
from vllm_mooncake_ascend.p2p.leases import GONE_TEXTS, Transfer, TransferInput, TransferState
from vllm_mooncake_ascend.p2p.peer import Peer
from vllm_mooncake_ascend.p2p.peers import Peers
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.reads import Reads
from vllm_mooncake_ascend.p2p.settings import ProducerSettings
from vllm_mooncake_ascend.testing.simulator.world import Machines
from vllm_mooncake_ascend.types import Incarnation, Outcome, PeerAddress
from vllm_mooncake_ascend.wire import messages
from vllm_mooncake_ascend.wire.steps import ReadEnded


class NoLaw(Law[State, What]):
    """Allows every move."""

    def __init__(self) -> None:
        super().__init__({})

    def check(self, before: State, what: What, after: State) -> None:
        """Nothing is checked."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlantedBug:
    """One mistake."""

    name: str
    machines: Machines
    theme: str
    """The theme whose seeds show it best."""
    max_seeds: int
    """It must be found within so many of them."""


# --- consumer --------------------------------------------------------------------------------------------------------------


class _LawlessConsumer(Consumer):
    """A consumer whose parts may be exchanged."""

    reads_class: type[Reads] = Reads

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, law=NoLaw())
        self._reads = self.reads_class(self._table, self._peers, self._settings, self._do)


class _FailedReadReceived(Reads):
    def rank_ended(self, ended: ReadEnded, now: float) -> None:
        is_failed = ended.outcome in (Outcome.FAILED, Outcome.REFUSED)
        super().rank_ended(msgspec.structs.replace(ended, outcome=Outcome.DONE) if is_failed else ended, now)


class _Unconfirmed(Reads):
    def _all_ended(self, fetch: Fetch, outcome: Outcome, now: float) -> None:
        if fetch.state is FetchState.READING and outcome is Outcome.DONE:
            self.leave(fetch, now, farewell="release")
            self._table.settle(fetch, FetchInput.READ_DONE, ok=True)
        else:
            super()._all_ended(fetch, outcome, now)


class _NoQuarantine(Reads):
    def _quarantine(self, fetch: Fetch, _: float) -> None:
        self._table.settle(fetch, FetchInput.READ_UNKNOWN, ok=False)


class _UnansweredIsFine(Reads):
    def unjudged(self, fetch: Fetch, what: FetchInput, now: float) -> None:
        self.leave(fetch, now, farewell="")
        self._table.settle(fetch, what, ok=True)


class _LeaseAloneIsTrusted(Reads):
    """The time rule without its second half: another engine may have answered in the producer's place."""

    def unjudged(self, fetch: Fetch, what: FetchInput, now: float) -> None:
        assert fetch.offer is not None
        lease_s = fetch.offer.lease_ttl_s - limits.LEASE_MARGIN_S
        ok = fetch.read_ended_at_s <= fetch.acknowledged_s + lease_s
        self.leave(fetch, now, farewell="")
        self._table.settle(fetch, what, ok=ok)


class _LostIsHeld(Reads):
    def judged(self, fetch: Fetch, what: FetchInput, now: float, *, held: bool) -> None:
        super().judged(fetch, what, now, held=held or what is FetchInput.LOST)


class _AbortForgets(Reads):
    def stop(self, fetch: Fetch, what: FetchInput, now: float, *, farewell: str, reason: str) -> None:
        if what is not FetchInput.ENDED:
            super().stop(fetch, what, now, farewell=farewell, reason=reason)
            return
        self.leave(fetch, now, farewell=farewell)
        self._table.move(fetch, what, FetchState.UNKNOWN)


class _AbortDoesNotWait(Reads):
    def stop(self, fetch: Fetch, what: FetchInput, now: float, *, farewell: str, reason: str) -> None:
        if what is not FetchInput.ENDED:
            super().stop(fetch, what, now, farewell=farewell, reason=reason)
            return
        self.leave(fetch, now, farewell=farewell)
        self._do(actions.CancelRead(transfer_id=fetch.transfer.transfer_id, request_id=fetch.request_id))
        self._table.settle(fetch, what, ok=False)


class _OverdueIsEnded(Reads):
    def _overdue(self, fetch: Fetch) -> None:
        self._table.settle(fetch, FetchInput.LATE, ok=False)


def _with_reads(bad_reads: type[Reads]) -> Callable[..., Consumer]:
    return type("_Planted", (_LawlessConsumer,), {"reads_class": bad_reads})


class _DoubleReport(_LawlessConsumer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        report = self._table.report

        def report_twice(fetch: Fetch, *, ok: bool) -> None:
            owed = fetch.owes_report
            report(fetch, ok=ok)
            fetch.owes_report = owed and fetch.state is FetchState.STOPPING

        self._table.report = report_twice  # type: ignore[method-assign]


class _NoDeadline(_LawlessConsumer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._settings = msgspec.structs.replace(self._settings, offer_wait_s=1e9)
        self._peers._is_silent = lambda *_: False  # type: ignore[method-assign]


class _OwnSilence(_LawlessConsumer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)

        def is_silent(peer: Peer, now: float) -> bool:
            return peer.silent_since_s is not None and now >= peer.silent_since_s + limits.PEER_ANSWER_S

        self._peers._is_silent = is_silent  # type: ignore[method-assign]


class _LostRenewalCounts(_LawlessConsumer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        renew = self._peers._renew

        def renew_and_believe(peer: Peer, now: float) -> None:
            renew(peer, now)
            for fetch in self._fetches_of(peer):
                fetch.acknowledged_s = now

        self._peers._renew = renew_and_believe  # type: ignore[method-assign]


class _AnyDigest(_LawlessConsumer):
    def _arrive(self, event: events.RequestArrived, now: float) -> None:
        transfer = msgspec.structs.replace(event.transfer, prompt_digest=b"")
        super()._arrive(msgspec.structs.replace(event, transfer=transfer), now)

    def _offered(self, peer: Peer, fetch: Fetch, offer: messages.Offer, now: float) -> None:
        super()._offered(peer, fetch, msgspec.structs.replace(offer, prompt_digest=fetch.prompt_digest), now)


class _AnyIncarnation(_LawlessConsumer):
    def _hear(self, address: PeerAddress, message: messages.FromProducer, now: float) -> None:
        known = self._peers.at(address)
        if known:
            message = msgspec.structs.replace(message, incarnation=known[0].key[1])
        super()._hear(address, message, now)


class _OldSilence(_LawlessConsumer):
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


class _AllDueAtOnce(Consumer):
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


# --- producer --------------------------------------------------------------------------------------------------------------


class _LawlessProducer(Producer):
    def __init__(
        self,
        incarnation: Incarnation,
        fingerprint: dict[str, str],
        ranks: tuple[RankLayout, ...],
        settings: ProducerSettings,
    ) -> None:
        super().__init__(incarnation, fingerprint, ranks, settings, NoLaw())


class _ForgottenVerdict(_LawlessProducer):
    def _end(self, transfer: Transfer, what: TransferInput, reason: str, now: float, text: str = "") -> None:
        super()._end(transfer, what, reason, now, text)
        transfer.readers.clear()


class _PinLeakedOnPreemption(_LawlessProducer):
    def _withdraw(self, transfer: Transfer) -> None:
        transfer.pins = []
        super()._withdraw(transfer)


class _FirstReaderFrees(_LawlessProducer):
    def _finish(self, *args: Any, **options: Any) -> bool:
        transfer: Transfer = args[0]
        held = super()._finish(*args, **options)
        if transfer.state is TransferState.LEASED:
            self._end(transfer, TransferInput.READ, "released", options["now"])
        return held


class _AnyExpected(_LawlessProducer):
    def _hear(self, peer: bytes, message: messages.FromReader, now: float) -> None:
        if not isinstance(message, messages.Hello):
            message = msgspec.structs.replace(message, expected=self._incarnation)
        super()._hear(peer, message, now)


class _RevokesPromises(_LawlessProducer):
    def _revoke_all(self, now: float) -> None:
        for transfer in self._table.leased:
            self._end(transfer, TransferInput.REVOKED, "revoked", now)


class _PressureBreaksPromises(_LawlessProducer):
    def _pin(self, transfer: Transfer, block_ids: events.BlockTable, now: float) -> bool:
        wanted = len(transfer.unpinned_blocks(block_ids))
        for oldest in self._table.leased:
            if self.num_pinned_blocks + wanted <= self._settings.max_pinned_blocks:
                break
            self._end(oldest, TransferInput.LAPSED, "capacity", now)
        return super()._pin(transfer, block_ids, now)


class _ExpiresWhileRunning(_LawlessProducer):
    def _end_prefill(self, transfer: Transfer, event: events.PrefillEnded, now: float) -> None:
        super()._end_prefill(transfer, event, now)
        if transfer.state is TransferState.LEASED and now > transfer.made_at_s + self._settings.lease_ttl_s:
            self._end(transfer, TransferInput.LAPSED, "expired", now)


class _GoneWithoutReason(Producer):
    """Was real: a Subscribe to a revoked transfer that still drained raised KeyError."""

    def _why_not(self, transfer: Transfer, key: tuple[Incarnation, Any], now: float) -> str:
        reason = super()._why_not(transfer, key, now)
        return GONE_TEXTS["gone"] if transfer.state is TransferState.DRAINING else reason


_machines = functools.partial(Machines, producer=_LawlessProducer, consumer=_LawlessConsumer)

PLANTED_BUGS = (
    PlantedBug("failed read reported as received", _machines(consumer=_with_reads(_FailedReadReceived)), "wild", 500),
    PlantedBug("expired lease read", _machines(consumer=_with_reads(_Unconfirmed)), "deaf", 1_000),
    PlantedBug("silence taken for held", _machines(consumer=_with_reads(_UnansweredIsFine)), "deaf", 2_000),
    PlantedBug("time rule trusts the lease alone", _machines(consumer=_with_reads(_LeaseAloneIsTrusted)), "successor", 1_000),
    PlantedBug("verdict not looked at", _machines(consumer=_with_reads(_LostIsHeld)), "deaf", 1_000),
    PlantedBug("blocks reused after unknown", _machines(consumer=_with_reads(_NoQuarantine)), "wild", 500),
    PlantedBug("no deadline on decode", _machines(consumer=_NoDeadline), "wild", 1_500),
    PlantedBug("forgotten verdict", _machines(producer=_ForgottenVerdict), "gentle", 500),
    PlantedBug("double report", _machines(consumer=_DoubleReport), "wild", 500),
    PlantedBug("pin leaked on preemption", _machines(producer=_PinLeakedOnPreemption), "wild", 500),
    PlantedBug("lost renewal counted", _machines(consumer=_LostRenewalCounts), "deaf", 2_000),
    PlantedBug("first of two readers frees", _machines(producer=_FirstReaderFrees), "shared", 500),
    PlantedBug("port reused by another engine", _machines(producer=_AnyExpected, consumer=_AnyIncarnation), "successor", 2_000),
    PlantedBug("stop treated as failure", _machines(treats_stop_as_failure=True), "gentle", 500),
    PlantedBug("layout forgotten after it was shared again", Machines(forgets_what_is_shared_again=True), "revisit", 500),
    PlantedBug("progress of a scheduled step published", _machines(publishes_scheduled_steps=True), "wild", 500),
    PlantedBug("digest not compared", _machines(consumer=_AnyDigest), "wild", 500),
    PlantedBug("abort forgets the read", _machines(consumer=_with_reads(_AbortForgets)), "wild", 1_000),
    PlantedBug("abort does not wait for the ranks", _machines(consumer=_with_reads(_AbortDoesNotWait)), "wild", 1_000),
    PlantedBug("overdue rank taken for ended", _machines(consumer=_with_reads(_OverdueIsEnded)), "wild", 2_500),
    PlantedBug("revocation breaks a promise", _machines(producer=_RevokesPromises), "deaf", 500),
    PlantedBug("pressure breaks a promise", _machines(producer=_PressureBreaksPromises), "deaf", 500),
    PlantedBug("lease expires with the prefill", _machines(producer=_ExpiresWhileRunning), "gentle", 500),
    PlantedBug("silence counted from an answered message", _machines(consumer=_OldSilence), "gentle", 1_000),
    PlantedBug("own silence taken for the peer's", _machines(consumer=_OwnSilence), "gentle", 1_000),
    PlantedBug("alarms taken all at once", Machines(consumer=_AllDueAtOnce), "deaf", 3_000),
    PlantedBug("revoked transfer without a reason", Machines(producer=_GoneWithoutReason), "wild", 2_000),
)
