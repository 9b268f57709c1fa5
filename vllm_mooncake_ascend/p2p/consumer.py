"""Consumer: what one decode engine's scheduler does to get remote KV. Sans-I/O: events in, actions out.

It owns each request's wish for remote KV, from its arrival until vLLM has ended it and nothing can land in its blocks any
more. It must not know sockets, vLLM, threads or clocks. `fetches` has the states and the law, `peers` the conversation
with producers, `reads` what follows an allocation; the rules behind them:

- vLLM gets exactly one report for each allocation with remote tokens, through `FetchTable.report` and nothing else.
- A read is reported received only after the producer's `held`, or by the time rule where the producer does not answer.
- The time rule (`offers`): the read ended while the lease was sure, and before another engine could have taken the
  producer's ports, counted from the sending of the latest acknowledged Subscribe or Renew.
- Nothing is unpinned while a rank may still write. A read of UNKNOWN outcome keeps its pins for QUARANTINE_S; the report
  waits with it where vLLM would give the request the same blocks again.
- A transfer that failed is not asked for again by the same request: it answers 0 tokens from then on.
- The digest of the prompt decides whose KV it is; an id alone never does.
"""

from __future__ import annotations

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Law
from vllm_mooncake_ascend.layout import compatibility
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.p2p import actions, counters, events, offers
from vllm_mooncake_ascend.p2p.fetch_table import FetchTable
from vllm_mooncake_ascend.p2p.fetches import FETCH_LAW, LISTENING, UNALLOCATED, Fetch, FetchInput, FetchState, PeerKey
from vllm_mooncake_ascend.p2p.peer import Peer, PeerState
from vllm_mooncake_ascend.p2p.peers import Differences, Peers
from vllm_mooncake_ascend.p2p.reads import Reads
from vllm_mooncake_ascend.p2p.settings import ConsumerSettings
from vllm_mooncake_ascend.timers import Timers
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages


class Consumer:
    """Machine of one decode engine; all calls from one thread at a time.

    Args:
        incarnation: of this start of this engine.
        fingerprint: what a peer must agree on.
        ranks: layouts of all workers.
        differences: `layout.compatibility.differences`, or a stand-in for it.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        fingerprint: dict[str, str],
        ranks: tuple[RankLayout, ...],
        settings: ConsumerSettings,
        *,
        differences: Differences = compatibility.differences,
        law: Law[FetchState, FetchInput] = FETCH_LAW,
    ) -> None:
        self._incarnation = incarnation
        self._fingerprint = fingerprint
        self._ranks = ranks
        self._settings = settings
        self._differences = differences
        self._actions: list[actions.ConsumerAction] = []
        self._timers: Timers[RequestId | PeerKey] = Timers()
        self._table = FetchTable(law, self._do, self._timers)
        self._peers = Peers(incarnation, settings, self._do, self._timers)
        self._reads = Reads(self._table, self._peers, settings, ranks[0].groups, self._do)

    # --- what the shell calls -----------------------------------------------------------------------------------------

    def handle(self, event: events.ConsumerEvent, now: float) -> list[actions.ConsumerAction]:
        """Take one event and say what is to be done, in this order. Events that came late or twice do no harm."""
        match event:
            case events.ProducerSpoke():
                self._hear(event.peer, event.message, now)
            case events.RankReadEnded():
                self._reads.rank_ended(event.ended, now)
            case events.RequestArrived():
                self._arrive(event, now)
            case events.BlocksAllocated():
                self._allocated(event, now)
            case events.RequestEnded():
                self._ended(event.request_id, now)
            case events.PeerDisconnected():
                for peer in self._peers.at(event.peer):
                    self._lose(peer, counters.PEER_DISCONNECTED, now)
            case events.TimerFired():
                pass
        while (key := self._timers.take_due(now)) is not None:
            self._lapse(key, now)
        done = self._actions.copy()
        self._actions.clear()
        return done

    def next_timer(self) -> float | None:
        """When TimerFired is due, None: never."""
        return self._timers.next_s()

    def remote_tokens(self, request_id: RequestId, num_local_tokens: int) -> int | None:
        """Tokens to be loaded beyond `num_local_tokens`; None: not known yet, ask again. Changes nothing."""
        fetch = self._table.get(request_id)
        return 0 if fetch is None else offers.remote_tokens(fetch, num_local_tokens, self._settings.min_remote_tokens)

    @property
    def num_loads(self) -> int:
        """Requests that vLLM holds back until their remote KV has come, or has not."""
        return self._table.num_waiting

    @property
    def awaits_ranks(self) -> bool:
        """Some read has been ordered whole, and not all ranks have ended it; looked up at each call."""
        return self._table.awaits_ranks()

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that are being written to, or in which bytes may still land."""
        return self._table.num_pinned_blocks

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks in which bytes may still land after a read of unknown outcome; counted at each call, for gauges."""
        return self._table.num_quarantined_blocks()

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _arrive(self, event: events.RequestArrived, now: float) -> None:
        if self._table.get(event.request_id) is not None:
            self._count(counters.MESSAGES_IGNORED, counters.REPEATED)
            return
        self._count(counters.REQUESTS_ARRIVED)
        if event.transfer.incarnation == self._incarnation:
            self._count(counters.REQUESTS_REFUSED, counters.OWN_TRANSFER)
            own = self._peers.meet((event.transfer.address, self._incarnation), now)
            if own is not None:
                self._peers.decline(own, (event.transfer.transfer_id, event.request_id), now)
            return
        if self._table.num_waiting >= limits.MAX_WAITING_REQUESTS:
            self._count(counters.REQUESTS_REFUSED, counters.TOO_MANY)
            return
        fetch = Fetch(
            request_id=event.request_id,
            transfer=event.transfer,
            prompt_digest=event.prompt_digest,
            num_prompt_tokens=event.num_prompt_tokens,
            give_up_at_s=now + self._settings.offer_wait_s,
        )
        if event.transfer.prompt_digest not in (b"", event.prompt_digest):
            # Not released either: one dict may have been copied to several prompts, and one of them reads it.
            self._fail(fetch, FetchInput.ARRIVED, counters.OTHER_PROMPT)
            return
        peer = self._peers.meet(fetch.peer_key, now)
        if peer is None or peer.state is PeerState.REFUSED:
            reason = counters.NO_ROOM_FOR_PEER if peer is None else counters.PEER_INCOMPATIBLE
            self._count(counters.REQUESTS_REFUSED, reason)
            self._fail(fetch, FetchInput.ARRIVED, reason)
            if peer is not None:
                self._peers.decline(peer, fetch.ids, now)
            return
        self._peers.subscribe(peer, fetch.ids, now)
        self._table.move(fetch, FetchInput.ARRIVED, FetchState.ASKING, fetch.give_up_at_s)

    def _allocated(self, event: events.BlocksAllocated, now: float) -> None:
        fetch = self._table.get(event.request_id)
        if fetch is None:
            self._table.report_stranger(event.request_id, event.num_remote_tokens, event.loaded_block_ids)
            return
        if event.num_remote_tokens > 0:
            if fetch.state is FetchState.READY:
                self._reads.start(fetch, event, now)
            else:
                self._reads.refuse(fetch, event, now)
            return
        if fetch.state in LISTENING:
            self._count(counters.LOADS_LEFT)
            self._reads.leave(fetch, now, farewell="release")
        is_kept = fetch.state in (FetchState.STOPPING, FetchState.QUARANTINED)
        self._table.move(fetch, FetchInput.NOT_ALLOCATED, fetch.state if is_kept else FetchState.SPENT)

    def _ended(self, request_id: RequestId, now: float) -> None:
        fetch = self._table.get(request_id)
        if fetch is None:
            return
        fetch.is_over = True
        if fetch.state in LISTENING:
            self._count(counters.LOADS_ABORTED)
        match fetch.state:
            case FetchState.READING:
                self._reads.stop(fetch, FetchInput.ENDED, now, farewell="release", reason="")
            case FetchState.STOPPING | FetchState.QUARANTINED:
                self._table.move(fetch, FetchInput.ENDED, fetch.state)
            case FetchState.CONFIRMING:
                self._reads.abandoned(fetch, now)
            case _:
                self._reads.leave(fetch, now, farewell="release")
                self._table.move(fetch, FetchInput.ENDED, FetchState.UNKNOWN)

    def _fail(self, fetch: Fetch, what: FetchInput, reason: str) -> None:
        """No remote KV will come, and no blocks are allocated for it yet."""
        self._count(counters.LOADS_FAILED, reason)
        text = f"no remote KV: request_id={fetch.request_id} reason={reason}"
        self._do(actions.Note(level="warning", transfer_id=fetch.transfer.transfer_id, text=text))
        fetch.offer = None
        self._table.move(fetch, what, FetchState.DOOMED if self._settings.fail_on_load_error else FetchState.SPENT)

    def _leave_and_fail(self, fetch: Fetch, what: FetchInput, reason: str, now: float) -> None:
        self._reads.leave(fetch, now, farewell="release")
        self._fail(fetch, what, reason)

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _hear(self, address: PeerAddress, message: messages.FromProducer, now: float) -> None:
        if isinstance(message, messages.Welcome):
            self._welcomed(address, message, now)
            return
        peer = self._peers.get((address, message.incarnation))
        if peer is None:
            self._count(counters.MESSAGES_IGNORED, counters.STALE_INCARNATION)
            return
        self._peers.heard(peer)
        match message:
            case messages.Goodbye():
                text = f"prefill engine left: address={address} reason={message.reason!r}"
                self._do(actions.Note(level="warning", transfer_id=TransferId(""), text=text))
                self._lose(peer, counters.PEER_GOODBYE, now)
            case messages.Renewed():
                self._renewed(peer, message, now)
            case messages.Verdict():
                self._judged(peer, message, now)
            case _:
                self._hear_of_transfer(peer, message, now)

    def _hear_of_transfer(self, peer: Peer, message: messages.Offer | messages.Gone, now: float) -> None:
        fetch = self._listening(peer, message.transfer_id, message.request_id)
        if fetch is None:
            self._count(counters.MESSAGES_IGNORED, counters.NOBODY_ASKED)
        elif isinstance(message, messages.Offer):
            self._offered(peer, fetch, message, now)
        else:
            text = f"the prefill engine does not have it: request_id={fetch.request_id} reason={message.reason!r}"
            self._do(actions.Note(level="info", transfer_id=message.transfer_id, text=text))
            self._gone(fetch, now)

    def _offered(self, peer: Peer, fetch: Fetch, offer: messages.Offer, now: float) -> None:
        is_newer = offers.is_newer(offer, fetch.offer)
        whole = offers.joined(offer, fetch) if is_newer else offer
        if whole is None:
            self._count(counters.MESSAGES_IGNORED, counters.OFFER_GAP)
            self._peers.ask_again(peer, fetch.ids, now)
            self._table.move(fetch, FetchInput.OFFERED_GAP, fetch.state)
            return
        is_ready = offer.state == "ready"
        sent_s = self._peers.acknowledged(peer, fetch.ids, offer, now)
        offer = whole
        fetch.acknowledged_s = max(fetch.acknowledged_s, sent_s or 0.0)
        what = FetchInput.OFFERED_READY if is_ready else FetchInput.OFFERED_PENDING
        if fetch.state is FetchState.CONFIRMING or (fetch.state in (FetchState.READY, FetchState.READING) and not is_newer):
            self._table.move(fetch, what, fetch.state)
        elif fetch.state is FetchState.READING:
            self._reads.go_on(fetch, offer, now)
        elif refused := offers.why_refused(offer, fetch):
            self._leave_and_fail(fetch, what, refused, now)
        else:
            if is_newer:
                fetch.offer = offer
            self._take_offer(fetch, what, peer, now)

    def _take_offer(self, fetch: Fetch, what: FetchInput, peer: Peer, now: float) -> None:
        """READY as soon as there is something to read and the layout known; a preemption does not change that any more."""
        if fetch.offer is None:
            self._table.move(fetch, what, fetch.state)
            return
        is_begun = offers.may_be_read(fetch.offer) or fetch.state is FetchState.READY
        if peer.state is not PeerState.KNOWN or not is_begun:
            self._table.move(fetch, what, FetchState.PENDING, fetch.give_up_at_s)
        elif unusable := offers.why_unusable(fetch.offer, peer.ranks[0].groups):
            self._leave_and_fail(fetch, what, unusable, now)
        else:
            self._table.move(fetch, what, FetchState.READY, fetch.give_up_at_s)

    def _gone(self, fetch: Fetch, now: float) -> None:
        """The producer does not have it (any more). Released all the same: it may be announced later, for nobody."""
        if fetch.state is FetchState.READING:
            self._reads.stop(fetch, FetchInput.GONE, now, farewell="release", reason=counters.GONE)
        elif fetch.state is FetchState.CONFIRMING:
            self._table.move(fetch, FetchInput.GONE, fetch.state)
        else:
            self._leave_and_fail(fetch, FetchInput.GONE, counters.GONE, now)

    def _renewed(self, peer: Peer, message: messages.Renewed, now: float) -> None:
        renewal = self._peers.renewed(peer, message.sequence, now)
        if renewal is None:
            self._count(counters.MESSAGES_IGNORED, counters.NOBODY_ASKED)
            return
        sent_s, renewed = renewal
        gone = set(message.gone)
        for transfer_id, request_id in renewed:
            fetch = self._listening(peer, transfer_id, request_id)
            if fetch is None:
                continue
            if fetch.ids not in gone:
                fetch.acknowledged_s = max(fetch.acknowledged_s, sent_s)
            elif fetch.state in (FetchState.PENDING, FetchState.READY):
                self._gone(fetch, now)

    def _judged(self, peer: Peer, message: messages.Verdict, now: float) -> None:
        ids = (message.transfer_id, message.request_id)
        is_news = self._peers.answered(peer, "done", ids)
        fetch = self._listening(peer, *ids)
        if not is_news or fetch is None or fetch.state is not FetchState.CONFIRMING:
            self._count(counters.MESSAGES_IGNORED, counters.NOBODY_ASKED)
            return
        self._reads.judged(fetch, FetchInput.HELD if message.held else FetchInput.LOST, now, held=message.held)

    # --- peers --------------------------------------------------------------------------------------------------------

    def _welcomed(self, address: PeerAddress, message: messages.Welcome, now: float) -> None:
        """An engine has told who it is: whoever we knew at its address under another name is no more."""
        if self._peers.is_replaced((address, message.incarnation)):
            self._count(counters.MESSAGES_IGNORED, counters.STALE_INCARNATION)
            return
        for peer in self._peers.at(address):
            if peer.key[1] != message.incarnation:
                fetches = self._fetches_of(peer)
                self._peers.replace(peer)
                self._end_all(fetches, FetchInput.PEER_REPLACED, counters.PEER_RESTARTED, now)
        found = self._peers.get((address, message.incarnation))
        if found is None:
            return
        self._peers.heard(found)
        differences = self._why_incompatible(message) if found.state is PeerState.ASKED else ()
        if not self._peers.learn(found, message.ranks, differences):
            return
        if found.state is PeerState.REFUSED:
            self._end_all(self._fetches_of(found), FetchInput.PEER_REPLACED, counters.PEER_INCOMPATIBLE, now)
        else:
            for fetch in self._fetches_of(found):
                self._take_offer(fetch, FetchInput.WELCOMED, found, now)

    def _why_incompatible(self, welcome: messages.Welcome) -> tuple[str, ...]:
        ours = (self._fingerprint, self._ranks)
        return offers.why_no_peer(welcome) or self._differences(*ours, welcome.fingerprint, welcome.ranks)

    def _lose(self, peer: Peer, reason: str, now: float) -> None:
        fetches = self._fetches_of(peer)
        self._peers.lose(peer, reason, now)
        self._end_all(fetches, FetchInput.PEER_LOST, reason, now)

    def _end_all(self, fetches: list[Fetch], what: FetchInput, reason: str, now: float) -> None:
        """Their peer is gone, or of no use. Who has read all may still be right."""
        for fetch in fetches:
            match fetch.state:
                case FetchState.READING:
                    self._reads.stop(fetch, what, now, farewell="release", reason=reason)
                case FetchState.CONFIRMING if what is FetchInput.PEER_LOST:
                    self._reads.unjudged(fetch, what, now)
                case FetchState.CONFIRMING:
                    self._reads.judged(fetch, what, now, held=False)
                case _:
                    self._leave_and_fail(fetch, what, reason, now)

    def _lapse(self, key: RequestId | PeerKey, now: float) -> None:
        if isinstance(key, tuple):
            peer = self._peers.get(key)
            if peer is not None and not self._peers.tick(peer, now):
                self._lose(peer, counters.PEER_SILENT, now)
            return
        fetch = self._table.get(key)
        assert fetch is not None, "a fetch that is not in the table has no alarm"
        if fetch.state is FetchState.READY and fetch.offer is not None and fetch.offer.state == "ready":
            self._table.move(fetch, FetchInput.LATE, FetchState.READY)  # only vLLM's blocks are missing
        elif fetch.state in UNALLOCATED:
            self._leave_and_fail(fetch, FetchInput.LATE, counters.NO_OFFER, now)
        else:
            self._reads.lapse(fetch, now)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _listening(self, peer: Peer, transfer_id: TransferId, request_id: RequestId) -> Fetch | None:
        """The fetch that a message of this peer is about, if the message can still mean anything to it."""
        fetch = self._table.get(request_id)
        if fetch is None or fetch.state not in LISTENING:
            return None
        return fetch if fetch.peer_key == peer.key and fetch.transfer.transfer_id == transfer_id else None

    def _fetches_of(self, peer: Peer) -> list[Fetch]:
        """The listening fetches of a peer: its readers are exactly those."""
        fetches = [self._table.get(request_id) for _, request_id in peer.readers]
        return [fetch for fetch in fetches if fetch is not None]

    def _count(self, name: str, reason: str = counters.NO_REASON) -> None:
        self._do(actions.Count(name=name, reason=reason))

    def _do(self, action: actions.ConsumerAction) -> None:
        self._actions.append(action)
