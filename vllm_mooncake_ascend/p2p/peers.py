"""Peers: the producers a decode engine speaks with. Handshakes, repetition, silence, renewals; nothing about requests.

A peer is one incarnation at one address: a restarted engine, or another one on its port, is another peer. Rules:

- Every message to a peer is repeated until it is answered; a Renew is repeated as a new one, so that each
  acknowledgement names the moment from which it counts.
- A peer is lost when nothing at all was heard from it for `PEER_ANSWER_S` while something was unanswered, and enough
  messages went out in that time: whoever was stopped himself must not take his own silence for the peer's.
- A Welcome of another incarnation from the same address replaces the peer. A late Welcome of one that was replaced says
  nothing: the replaced are remembered for a while.
- A lost peer keeps its layout, should it come back; a replaced one keeps nothing.
- A peer nobody reads from for `PEER_IDLE_S` is forgotten, and so is the longest unused one when there is no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.p2p import actions, counters
from vllm_mooncake_ascend.p2p.fetches import PeerKey, ReaderIds
from vllm_mooncake_ascend.p2p.peer import MessageKey, Peer, PeerState, Standing, Unanswered
from vllm_mooncake_ascend.p2p.settings import ConsumerSettings
from vllm_mooncake_ascend.timers import Timers
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages
from vllm_mooncake_ascend.wire.steps import PeerRanks

Differences = Callable[[Mapping[str, str], Sequence[RankLayout], Mapping[str, str], Sequence[RankLayout]], tuple[str, ...]]
"""`layout.compatibility.differences`: why the second cannot serve the first; empty when it can."""

_HELLO: MessageKey = ("hello", TransferId(""), RequestId(""))
_MAX_RENEWALS_KEPT = 16
"""Renewals to one peer whose acknowledgement still counts; a later one makes an older one superfluous."""


class Peers:
    """Table of peers. Actions go to `do`; the alarm of a peer asks for a call of `tick`."""

    def __init__(
        self,
        incarnation: Incarnation,
        settings: ConsumerSettings,
        do: Callable[[actions.ConsumerAction], None],
        timers: Timers[RequestId | PeerKey],
    ) -> None:
        self._incarnation = incarnation
        self._settings = settings
        self._do = do
        self._timers = timers
        self._peers: dict[PeerKey, Peer] = {}
        """The longest unused first."""
        self._replaced: dict[PeerKey, None] = {}
        """Peers whose successor we met, oldest first."""
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._peers)

    # --- meeting and parting ------------------------------------------------------------------------------------------

    def get(self, key: PeerKey) -> Peer | None:
        return self._peers.get(key)

    def at(self, address: PeerAddress) -> list[Peer]:
        """Every peer we know at an address."""
        return [peer for peer in self._peers.values() if peer.key[0] == address]

    def meet(self, key: PeerKey, now: float) -> Peer | None:
        """The peer, greeted if it is new; None when there is no room for it."""
        peer = self._peers.pop(key, None)
        if peer is None:
            if len(self._peers) >= limits.MAX_PEERS and not self._make_room():
                return None
            peer = Peer(key=key, lease_ttl_s=self._settings.lease_ttl_s)
            self._replaced.pop(key, None)
            self._ask(peer, _HELLO, messages.Hello(incarnation=self._incarnation, version=messages.PROTOCOL_VERSION), now)
        self._peers[key] = peer
        return peer

    def replace(self, peer: Peer) -> None:
        """Another incarnation answered from its address: nothing of this peer is true any more."""
        if peer.state is not PeerState.ASKED:
            self._replaced[peer.key] = None
            if len(self._replaced) > limits.MAX_PEERS:
                del self._replaced[next(iter(self._replaced))]
        self._count(counters.PEERS_LOST, counters.PEER_RESTARTED)
        self._forget(peer)

    def is_replaced(self, key: PeerKey) -> bool:
        """We have met its successor: what it says is old."""
        return key in self._replaced

    def lose(self, peer: Peer, reason: str, now: float) -> None:
        """It does not answer, or has left: expect nothing of it; a later request may try again."""
        self._count(counters.PEERS_LOST, reason)
        peer.readers.clear()
        peer.unanswered.clear()
        peer.renewals.clear()
        peer.renew_at_s = None
        self._hush(peer)
        if peer.state is PeerState.ASKED:
            self._forget(peer)
            return
        peer.used_at_s = now
        self._close(peer)
        self._arm(peer)

    def _make_room(self) -> bool:
        idle = next((peer for peer in self._peers.values() if peer.is_idle), None)
        if idle is None:
            return False
        self._count(counters.PEERS_FORGOTTEN)
        self._forget(idle)
        return True

    def _forget(self, peer: Peer) -> None:
        del self._peers[peer.key]
        self._timers.drop(peer.key)
        if peer.is_shared:
            self._do(actions.ForgetLayout(incarnation=peer.key[1]))
        self._close(peer)

    def _close(self, peer: Peer) -> None:
        """The socket belongs to the address, which another incarnation may be using."""
        if all(other is peer or other.is_idle for other in self.at(peer.key[0])):
            self._do(actions.ClosePeer(peer=peer.key[0]))

    # --- what we hear -------------------------------------------------------------------------------------------------

    def heard(self, peer: Peer) -> None:
        """It lives. What is still unanswered is sent again soon, and silence counts from then."""
        self._hush(peer)

    def learn(self, peer: Peer, ranks: tuple[RankLayout, ...], differences: tuple[str, ...]) -> bool:
        """Its layout has come; True when that is news."""
        peer.unanswered.pop(_HELLO, None)
        is_news = peer.state is PeerState.ASKED
        if is_news:
            peer.ranks = ranks
            peer.state = PeerState.REFUSED if differences else PeerState.KNOWN
            if differences:
                self._count(counters.PEERS_REFUSED)
                text = f"KV of {peer.key[0]} cannot be used here: {'; '.join(differences)}"
                self._do(actions.Note(level="error", transfer_id=TransferId(""), text=text))
        self._arm(peer)
        return is_news

    def acknowledged(self, peer: Peer, ids: ReaderIds, offer: messages.Offer, now: float) -> float | None:
        """An Offer came: the subscription counts from its first sending, which is returned if this is the first Offer.

        A question is open until all is told: news that leave out what is known answer none.
        """
        asked = peer.unanswered.pop(("subscribe", *ids), None) if not offer.num_known_blocks else None
        before = peer.readers.get(ids)
        if before is None:
            return None
        peer.readers[ids] = Standing.READY if offer.state == "ready" or before is Standing.READY else Standing.PENDING
        peer.lease_ttl_s = min(peer.lease_ttl_s, offer.lease_ttl_s)
        if peer.renew_at_s is None:
            peer.renew_at_s = now + self._renew_interval_s(peer)
        self._arm(peer)
        if before is not Standing.ASKED:
            return None
        assert asked is not None, "a subscription is repeated until its first Offer"
        return asked.first_sent_s

    def answered(self, peer: Peer, kind: str, ids: ReaderIds) -> bool:
        """What we said about this reader was answered; True if it was open."""
        is_news = peer.unanswered.pop((kind, *ids), None) is not None
        self._settle(peer)
        return is_news

    def renewed(self, peer: Peer, sequence: int, now: float) -> tuple[float, tuple[ReaderIds, ...]] | None:
        """A renewal was acknowledged: when it had been sent and for whom; None if we do not remember it."""
        renewal = peer.renewals.pop(sequence, None)
        if renewal is not None:
            peer.renew_at_s = now + self._renew_interval_s(peer)
            for older in [number for number in peer.renewals if number < sequence]:
                del peer.renewals[older]
        self._settle(peer)
        return renewal

    # --- what we say --------------------------------------------------------------------------------------------------

    def subscribe(self, peer: Peer, ids: ReaderIds, now: float) -> None:
        """Become a reader."""
        peer.readers.setdefault(ids, Standing.ASKED)
        message = messages.Subscribe(
            incarnation=self._incarnation,
            expected=peer.key[1],
            transfer_id=ids[0],
            request_id=ids[1],
            streams=self._settings.streams,
        )
        self._ask(peer, ("subscribe", *ids), message, now)

    def ask_again(self, peer: Peer, ids: ReaderIds, now: float) -> None:
        """A message about a transfer was lost: ask for all of it, unless that is under way."""
        if ("subscribe", *ids) not in peer.unanswered:
            self.subscribe(peer, ids, now)

    def confirm(self, peer: Peer, ids: ReaderIds, now: float) -> None:
        """All is read: ask whether it was the right bytes; the lease is renewed until the answer."""
        self._say_done(peer, ids, now, ok=True)

    def leave(self, peer: Peer, ids: ReaderIds, now: float, *, farewell: str) -> None:
        """Be a reader no more; nothing if we are none. `farewell`: `release`, `read_failed`, or "" when none is due."""
        if peer.readers.pop(ids, None) is None:
            return
        peer.unanswered.pop(("subscribe", *ids), None)
        if farewell == "release":
            self._say_released(peer, ids, now)
        elif farewell == "read_failed":
            self._say_done(peer, ids, now, ok=False)
        peer.used_at_s = now
        self._settle(peer)

    def decline(self, peer: Peer, ids: ReaderIds, now: float) -> None:
        """Never become a reader: say at once that nothing of the transfer is needed."""
        self._say_released(peer, ids, now)
        self._settle(peer)

    def share(self, peer: Peer) -> None:
        """Give the workers its layout, once."""
        if not peer.is_shared:
            peer.is_shared = True
            self._do(actions.ShareLayout(peer=PeerRanks(incarnation=peer.key[1], ranks=peer.ranks)))

    def _say_released(self, peer: Peer, ids: ReaderIds, now: float) -> None:
        message = messages.Release(incarnation=self._incarnation, expected=peer.key[1], transfer_id=ids[0], request_id=ids[1])
        self._ask(peer, ("done", *ids), message, now)

    def _say_done(self, peer: Peer, ids: ReaderIds, now: float, *, ok: bool) -> None:
        message = messages.ReadDone(
            incarnation=self._incarnation, expected=peer.key[1], transfer_id=ids[0], request_id=ids[1], ok=ok
        )
        self._ask(peer, ("done", *ids), message, now)

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, peer: Peer, now: float) -> bool:
        """Repeat, renew, forget; False when the peer is lost (then `lose` it)."""
        if self._is_silent(peer, now):
            return False
        for key in _due(peer.unanswered.items(), now):
            asked = peer.unanswered.pop(key)
            if _is_worth_repeating(peer, key, now - asked.first_sent_s):
                self._ask(peer, key, asked.message, now, first_sent_s=asked.first_sent_s)
        if peer.is_idle:
            self._hush(peer)
        if peer.renew_at_s is not None and peer.renew_at_s <= now:
            self._renew(peer, now)
        if peer.is_idle and now >= peer.used_at_s + limits.PEER_IDLE_S:
            self._count(counters.PEERS_FORGOTTEN)
            self._forget(peer)
        else:
            self._arm(peer)
        return True

    def _renew(self, peer: Peer, now: float) -> None:
        held = tuple(ids for ids, standing in peer.readers.items() if standing is not Standing.ASKED)
        if not held:
            peer.renew_at_s = None
            return
        self._sequence += 1
        peer.renewals[self._sequence] = (now, held)
        if len(peer.renewals) > _MAX_RENEWALS_KEPT:
            del peer.renewals[next(iter(peer.renewals))]
        peer.renew_at_s = now + limits.RESEND_S
        self._send(
            peer,
            messages.Renew(incarnation=self._incarnation, expected=peer.key[1], sequence=self._sequence, transfers=held),
            now,
        )
        for ids in held:
            if peer.readers[ids] is Standing.PENDING:
                self.ask_again(peer, ids, now)

    def _is_silent(self, peer: Peer, now: float) -> bool:
        """Asked before each repetition, so that the last message had a moment to be answered, too."""
        return (
            peer.silent_since_s is not None
            and now >= peer.silent_since_s + limits.PEER_ANSWER_S
            and peer.num_unheard >= limits.SENDS_BEFORE_LOST
        )

    def _renew_interval_s(self, peer: Peer) -> float:
        return peer.lease_ttl_s / limits.RENEWALS_PER_TTL

    def _settle(self, peer: Peer) -> None:
        """After an answer or a farewell: stop what has nothing left to do."""
        if all(standing is Standing.ASKED for standing in peer.readers.values()):
            peer.renew_at_s = None
            peer.renewals.clear()
        if peer.is_idle:
            self._hush(peer)
        self._arm(peer)

    def _hush(self, peer: Peer) -> None:
        peer.silent_since_s = None
        peer.num_unheard = 0

    def _arm(self, peer: Peer) -> None:
        if peer.key not in self._peers:
            return
        times_s = [peer.used_at_s + limits.PEER_IDLE_S] if peer.is_idle else []
        if peer.renew_at_s is not None:
            times_s.append(peer.renew_at_s)
        first = next(iter(peer.unanswered.values()), None)
        if first is not None:
            times_s.append(first.next_send_s)
        if times_s:
            self._timers.set(peer.key, min(times_s))
        else:
            self._timers.drop(peer.key)

    # --- sending ------------------------------------------------------------------------------------------------------

    def _ask(
        self, peer: Peer, key: MessageKey, message: messages.FromReader, now: float, *, first_sent_s: float | None = None
    ) -> None:
        """Send what is to be answered, and again until it is."""
        peer.unanswered.pop(key, None)
        if len(peer.unanswered) < limits.MAX_UNANSWERED or key[0] == "subscribe":
            peer.unanswered[key] = Unanswered(
                message=message,
                first_sent_s=now if first_sent_s is None else first_sent_s,
                next_send_s=now + limits.RESEND_S,
            )
        self._send(peer, message, now)
        self._arm(peer)

    def _send(self, peer: Peer, message: messages.FromReader, now: float) -> None:
        if peer.silent_since_s is None:
            peer.silent_since_s = now
        if peer.num_unheard == 0 or now > peer.sent_at_s + limits.RESEND_S / 2:
            peer.num_unheard += 1
            peer.sent_at_s = now
        self._do(actions.SendToProducer(peer=peer.key[0], message=message))

    def _count(self, name: str, reason: str = counters.NO_REASON) -> None:
        self._do(actions.Count(name=name, reason=reason))


def _is_worth_repeating(peer: Peer, key: MessageKey, age_s: float) -> bool:
    """A question is, while somebody waits for the answer; a farewell is until the lease is over by itself."""
    kind, *ids = key
    if kind == "hello":
        return bool(peer.readers)
    return tuple(ids) in peer.readers or age_s < peer.lease_ttl_s


def _due(unanswered: Iterable[tuple[MessageKey, Unanswered]], now: float) -> list[MessageKey]:
    """Keys of the messages to be sent again; `unanswered` is in order of time."""
    due = []
    for key, asked in unanswered:
        if asked.next_send_s > now:
            break
        due.append(key)
    return due
