"""Producer: the send leases of one prefill engine. Sans-I/O: events in, actions out, `now` is handed in.

It owns which transfers exist, who reads them, and which blocks stay pinned for them. It must not know sockets, vLLM,
threads or clocks. `leases` has the states and the law; the rules behind them:

- A transfer is pinned at most once per block and unpinned exactly once, by `_end` or `_withdraw` and nobody else.
- Blocks are kept until every reader has read or left. A lease runs from the end of the prefill, and each acknowledged
  Subscribe or Renew of a reader is a promise of one more ttl; promises end `lease_max_s` after the prefill did.
- A promise is kept whatever happens, because a reader that hears nothing more may trust it (the time rule of
  `consumer`): pressure ends only leases that nobody was promised, and a revocation waits until promises are over.
- The first ReadDone(ok) of a reader while the blocks are pinned is `held`; any repetition gets the same answer.
- What a reader said last wins for ever: once it has read or left, no late or repeated message makes it a reader again.
- A message for another incarnation is answered with Welcome and changes nothing.
"""

from __future__ import annotations

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Law
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.p2p import actions, counters, events
from vllm_mooncake_ascend.p2p.leases import (
    GONE_TEXTS,
    TRANSFER_LAW,
    Reader,
    ReaderKey,
    Transfer,
    TransferInput,
    TransferState,
)
from vllm_mooncake_ascend.p2p.pins import TransferPins
from vllm_mooncake_ascend.p2p.settings import ProducerSettings
from vllm_mooncake_ascend.p2p.transfer_table import TransferTable
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages


class Producer:
    """Machine of one prefill engine; all calls from one thread at a time.

    Args:
        incarnation: of this start of this engine.
        fingerprint: what a peer must agree on, for Welcome.
        ranks: layouts of all workers, for Welcome.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        fingerprint: dict[str, str],
        ranks: tuple[RankLayout, ...],
        settings: ProducerSettings,
        law: Law[TransferState, TransferInput] = TRANSFER_LAW,
    ) -> None:
        self._incarnation = incarnation
        self._welcome = messages.Welcome(
            incarnation=incarnation, version=messages.PROTOCOL_VERSION, fingerprint=fingerprint, ranks=ranks
        )
        self._settings = settings
        self._table = TransferTable(settings, law)
        self._prefills: dict[RequestId, Transfer] = {}
        """RUNNING transfers by the request whose prefill runs."""
        self._pins = TransferPins(settings.max_pinned_blocks, self._do)
        self._actions: list[actions.ProducerAction] = []

    # --- what the shell calls -----------------------------------------------------------------------------------------

    def handle(self, event: events.ProducerEvent, now: float) -> list[actions.ProducerAction]:
        """Take one event and say what is to be done, in this order. Events that came late or twice do no harm."""
        match event:
            case events.ReaderSpoke():
                self._hear(event.peer, event.message, now)
            case events.PrefillArrived():
                self._announce(event, now)
            case events.PrefillProgressed() | events.PrefillPreempted() | events.PrefillEnded():
                self._follow_prefill(event, now)
            case events.LeasesRevoked():
                self._revoke_all(now)
            case events.TimerFired():
                pass
        self._lapse(now)
        done, self._actions = self._actions, []
        return done

    def next_timer(self) -> float | None:
        """When TimerFired is due, None: never."""
        return self._table.next_timer()

    @property
    def num_leases(self) -> int:
        """Transfers whose blocks are kept for readers."""
        return self._table.num_leased

    @property
    def num_pinned_blocks(self) -> int:
        return self._pins.num_pinned

    @property
    def num_kept_blocks(self) -> int:
        """Pinned for leases: no running request needs them."""
        return self._pins.num_kept

    @property
    def num_waiting_readers(self) -> int:
        """Readers that have neither read nor left; counted at each call, for gauges."""
        return sum(len(transfer.unfinished()) for transfer in self._table.all())

    # --- the prefill --------------------------------------------------------------------------------------------------

    def _announce(self, event: events.PrefillArrived, now: float) -> None:
        if event.request_id in self._prefills:
            self._count(counters.MESSAGES_IGNORED, counters.REPEATED)
            return
        transfer = self._table.known(event.fresh_id if event.wanted_id is None else event.wanted_id)
        if transfer.state not in (TransferState.UNKNOWN, TransferState.AWAITED):
            self._count(counters.TRANSFERS_RENAMED)
            transfer = self._table.known(event.fresh_id)
        if transfer.state is TransferState.UNKNOWN and not self._table.has_room():
            self._count(counters.TRANSFERS_REFUSED)
            return
        transfer.prompt_digest = event.prompt_digest
        self._prefills[event.request_id] = transfer
        self._table.move(transfer, TransferInput.ANNOUNCED, TransferState.RUNNING, now)
        self._count(counters.TRANSFERS_ANNOUNCED)
        self._do(actions.NameTransfer(request_id=event.request_id, transfer_id=transfer.transfer_id))
        for key, reader in transfer.unfinished():
            self._offer(transfer, key, reader)

    def _follow_prefill(
        self, event: events.PrefillProgressed | events.PrefillPreempted | events.PrefillEnded, now: float
    ) -> None:
        transfer = self._prefills.get(event.request_id)
        if transfer is None:
            self._count(counters.MESSAGES_IGNORED, counters.UNKNOWN_TRANSFER)
            return
        match event:
            case events.PrefillProgressed():
                self._table.move(transfer, TransferInput.PROGRESSED, TransferState.RUNNING, now)
                self._publish(transfer, event)
            case events.PrefillPreempted():
                self._count(counters.PREFILLS_PREEMPTED)
                self._withdraw(transfer)
                self._table.move(transfer, TransferInput.PREEMPTED, TransferState.RUNNING, now)
            case events.PrefillEnded():
                del self._prefills[event.request_id]
                self._end_prefill(transfer, event, now)

    def _end_prefill(self, transfer: Transfer, event: events.PrefillEnded, now: float) -> None:
        """KV that somebody may still read becomes a lease; all else ends here."""
        transfer.ended_at_s = now
        if not event.has_kv:
            self._count(counters.PREFILLS_WITHOUT_KV)
            text = f"its prefill ended without KV: {event.reason}"
            self._end(transfer, TransferInput.ENDED_WITHOUT_KV, counters.NO_KV, now, text)
        elif transfer.all_readers_done():
            self._end(transfer, TransferInput.ENDED_WITH_KV, counters.RELEASED, now)
        elif not self._make_room(event.block_ids, now):
            self._end(transfer, TransferInput.ENDED_WITH_KV, counters.CAPACITY, now)
        else:
            self._pins.pin(transfer, event.block_ids)
            transfer.num_tokens, transfer.block_ids = event.num_tokens, event.block_ids
            self._pins.keep(transfer, event.block_ids)
            for _, reader in transfer.unfinished():
                reader.promised_until_s = max(reader.promised_until_s, now + self._settings.lease_ttl_s)
            self._table.move(transfer, TransferInput.ENDED_WITH_KV, TransferState.LEASED, now)
            self._count(counters.LEASES_OPENED)
            for key, reader in transfer.unfinished():
                self._offer(transfer, key, reader)

    def _publish(self, transfer: Transfer, event: events.PrefillProgressed) -> None:
        """Offer what is written to those who read while the prefill runs. A table of another beginning is of other blocks,
        whether or not a preemption was told."""
        if not (self._settings.streams and transfer.has_streaming_reader()) or event.num_tokens <= transfer.num_tokens:
            return
        if transfer.block_ids and not transfer.goes_on(event.block_ids):
            self._withdraw(transfer)
        self._pins.pin(transfer, event.block_ids)
        transfer.num_tokens, transfer.block_ids = event.num_tokens, event.block_ids
        for key, reader in transfer.unfinished():
            if reader.streams:
                self._offer(transfer, key, reader, is_whole=False)

    def _withdraw(self, transfer: Transfer) -> None:
        """Blocks of this generation are no longer offered. Who reads them reads all again, of the next."""
        transfer.generation += 1
        transfer.num_tokens, transfer.block_ids = 0, ()
        self._pins.let_go(transfer)
        for key, reader in transfer.unfinished():
            self._offer(transfer, key, reader)

    def _revoke_all(self, now: float) -> None:
        for transfer in list(self._prefills.values()):
            self._withdraw(transfer)
            self._table.move(transfer, TransferInput.REVOKED, TransferState.RUNNING, now)
        for transfer in self._table.leased:
            if transfer.state is TransferState.DRAINING:
                self._table.move(transfer, TransferInput.REVOKED, TransferState.DRAINING, now)
            elif transfer.promised_until_s() > now:
                for key, reader in transfer.unfinished():
                    self._say_gone(transfer.transfer_id, key, reader.peer, GONE_TEXTS[counters.REVOKED])
                self._table.move(transfer, TransferInput.REVOKED, TransferState.DRAINING, now)
            else:
                self._end(transfer, TransferInput.REVOKED, counters.REVOKED, now)

    # --- readers ------------------------------------------------------------------------------------------------------

    def _hear(self, peer: bytes, message: messages.FromReader, now: float) -> None:
        if isinstance(message, messages.Hello):
            self._greet(peer, message)
        elif message.expected != self._incarnation:
            self._count(counters.MESSAGES_IGNORED, counters.STALE_INCARNATION)
            self._send(peer, self._welcome)
        elif isinstance(message, messages.Renew):
            self._renew(peer, message, now)
        elif isinstance(message, messages.Subscribe):
            self._subscribe(peer, message, now)
        else:
            is_read = isinstance(message, messages.ReadDone) and message.ok
            key = (message.incarnation, message.request_id)
            transfer = self._table.known(message.transfer_id)
            held = self._finish(transfer, key, peer, is_read=is_read, now=now)
            if is_read:
                self._count(counters.READS_CONFIRMED, counters.HELD if held else counters.LOST)
            self._send(
                peer,
                messages.Verdict(
                    incarnation=self._incarnation, transfer_id=message.transfer_id, request_id=message.request_id, held=held
                ),
            )

    def _greet(self, peer: bytes, message: messages.Hello) -> None:
        if message.version == messages.PROTOCOL_VERSION:
            self._send(peer, self._welcome)
        else:
            reason = f"protocol version {messages.PROTOCOL_VERSION} here, {message.version} there; install one version on both"
            self._send(peer, messages.Goodbye(incarnation=self._incarnation, reason=reason))

    def _subscribe(self, peer: bytes, message: messages.Subscribe, now: float) -> None:
        transfer = self._table.known(message.transfer_id)
        key = (message.incarnation, message.request_id)
        reason = self._why_not(transfer, key, now)
        if reason:
            self._count(counters.READERS_REFUSED, reason)
            self._say_gone(message.transfer_id, key, peer, transfer.end_reason or GONE_TEXTS[reason])
            self._table.move(transfer, TransferInput.SUBSCRIBED, transfer.state, now)
            return
        if transfer.state in (TransferState.UNKNOWN, TransferState.AWAITED) and not transfer.unfinished():
            transfer.asked_at_s = now
        after = self._join(transfer, key, peer)
        reader = transfer.readers[key]
        reader.peer, reader.streams = peer, message.streams
        self._promise(transfer, reader, now)
        self._table.move(transfer, TransferInput.SUBSCRIBED, after, now)
        self._offer(transfer, key, reader)

    def _why_not(self, transfer: Transfer, key: ReaderKey, now: float) -> str:
        """Why this reader cannot subscribe, "" when it can."""
        reader = transfer.readers.get(key)
        if transfer.state is TransferState.ENDED:
            return counters.GONE
        if transfer.state is TransferState.DRAINING:
            return counters.REVOKED
        if reader is not None:
            return counters.READER_DONE if reader.is_done else ""
        if transfer.state is TransferState.LEASED and not self._can_promise(transfer, now):
            return counters.TOO_LATE
        has_room = len(transfer.readers) < limits.MAX_READERS_PER_TRANSFER
        if transfer.state is TransferState.UNKNOWN:
            has_room = self._table.can_await(key[0])
        return "" if has_room else counters.TOO_MANY

    def _renew(self, peer: bytes, message: messages.Renew, now: float) -> None:
        gone = []
        for transfer_id, request_id in message.transfers:
            transfer = self._table.known(transfer_id)
            reader = transfer.readers.get((message.incarnation, request_id))
            is_kept = reader is not None and not reader.is_done and transfer.state is not TransferState.DRAINING
            if reader is not None and is_kept:
                reader.peer = peer
                is_kept = self._promise(transfer, reader, now)
            if not is_kept:
                gone.append((transfer_id, request_id))
            self._table.move(transfer, TransferInput.RENEWED, transfer.state, now)
        self._send(peer, messages.Renewed(incarnation=self._incarnation, sequence=message.sequence, gone=tuple(gone)))

    def _finish(self, transfer: Transfer, key: ReaderKey, peer: bytes, *, is_read: bool, now: float) -> bool:
        """One reader has read or left, once; returns its verdict, the same at each repetition."""
        what = TransferInput.READ if is_read else TransferInput.RELEASED
        reader = transfer.readers.get(key)
        is_unknown = transfer.state is TransferState.UNKNOWN
        if (reader is not None and reader.is_done) or transfer.state is TransferState.ENDED or (is_unknown and is_read):
            self._table.move(transfer, what, transfer.state, now)
            return reader is not None and reader.held
        after: TransferState = transfer.state
        if reader is None:
            has_room = self._table.can_await(key[0]) if is_unknown else len(transfer.readers) < limits.MAX_READERS_PER_TRANSFER
            if not has_room:
                self._table.move(transfer, what, transfer.state, now)
                return False
            after = self._join(transfer, key, peer)
            reader = transfer.readers[key]
        reader.is_done = True
        reader.held = is_read and transfer.state is TransferState.LEASED
        if transfer.state is TransferState.LEASED and transfer.all_readers_done():
            self._end(transfer, what, counters.RELEASED, now)
        elif transfer.state is TransferState.DRAINING and transfer.promised_until_s() <= now:
            self._end(transfer, what, counters.REVOKED, now)
        else:
            self._table.move(transfer, what, after, now)
        return reader.held

    def _join(self, transfer: Transfer, key: ReaderKey, peer: bytes) -> TransferState:
        """Make this reader known; returns the state after it: an UNKNOWN transfer becomes AWAITED."""
        transfer.readers.setdefault(key, Reader(peer=peer, promised_until_s=0.0))
        if transfer.state is not TransferState.UNKNOWN:
            return transfer.state
        transfer.awaited_by = key[0]
        return TransferState.AWAITED

    # --- leases -------------------------------------------------------------------------------------------------------

    def _can_promise(self, transfer: Transfer, now: float) -> bool:
        return now + self._settings.lease_ttl_s <= transfer.ended_at_s + self._settings.lease_max_s

    def _promise(self, transfer: Transfer, reader: Reader, now: float) -> bool:
        """One more ttl for this reader; False when the lease may not last that long."""
        if transfer.state is TransferState.LEASED and not self._can_promise(transfer, now):
            return False
        reader.promised_until_s = now + self._settings.lease_ttl_s
        return True

    def _lapse(self, now: float) -> None:
        """End everything whose time is over."""
        while (transfer := self._table.take_due(now)) is not None:
            if transfer.state is TransferState.AWAITED:
                self._lapse_awaited(transfer, now)
            elif transfer.state is TransferState.LEASED:
                self._end(transfer, TransferInput.LAPSED, counters.EXPIRED, now)
            else:
                self._end(transfer, TransferInput.LAPSED, counters.REVOKED, now)

    def _lapse_awaited(self, transfer: Transfer, now: float) -> None:
        waiting = transfer.unfinished()
        for key, reader in waiting:
            reader.is_done = True
            self._say_gone(transfer.transfer_id, key, reader.peer, GONE_TEXTS[counters.UNKNOWN_TRANSFER])
        if waiting:
            self._count(counters.READERS_REFUSED, counters.UNKNOWN_TRANSFER, len(waiting))
            self._table.move(transfer, TransferInput.LAPSED, TransferState.AWAITED, now)
        else:
            self._table.move(transfer, TransferInput.LAPSED, TransferState.UNKNOWN, now)

    # --- pins ---------------------------------------------------------------------------------------------------------

    def _make_room(self, block_ids: events.BlockTable, now: float) -> bool:
        """Whether one more lease may keep a table; where need be at the price of leases that nobody was promised."""
        for oldest in self._table.leased if self._pins.could_fit(block_ids) and not self._pins.fits(block_ids) else ():
            if oldest.state is TransferState.LEASED and oldest.promised_until_s() <= now:
                self._end(oldest, TransferInput.LAPSED, counters.CAPACITY, now)
                if self._pins.fits(block_ids):
                    break
        return self._pins.fits(block_ids)

    def _end(self, transfer: Transfer, what: TransferInput, reason: str, now: float, text: str = "") -> None:
        """The one end of a transfer whose prefill has ended: unpin, tell who still waits, remember the verdicts."""
        self._pins.let_go(transfer)
        transfer.end_reason = text or GONE_TEXTS[reason]
        if transfer.state in (TransferState.LEASED, TransferState.DRAINING):
            self._count(counters.LEASES_ENDED, reason)
        for key, reader in transfer.unfinished():
            reader.is_done = True
            self._say_gone(transfer.transfer_id, key, reader.peer, transfer.end_reason)
        transfer.block_ids = ()
        self._table.move(transfer, what, TransferState.ENDED, now)

    # --- actions ------------------------------------------------------------------------------------------------------

    def _offer(self, transfer: Transfer, key: ReaderKey, reader: Reader, *, is_whole: bool = True) -> None:
        ttl_s = self._settings.lease_ttl_s
        self._send(reader.peer, transfer.offer_to(key[1], reader, self._incarnation, ttl_s, is_whole=is_whole))

    def _say_gone(self, transfer_id: TransferId, key: ReaderKey, peer: bytes, reason: str) -> None:
        self._send(
            peer, messages.Gone(incarnation=self._incarnation, transfer_id=transfer_id, request_id=key[1], reason=reason)
        )

    def _send(self, peer: bytes, message: messages.FromProducer) -> None:
        self._do(actions.SendToReader(peer=peer, message=message))

    def _count(self, name: str, reason: str = counters.NO_REASON, amount: int = 1) -> None:
        self._do(actions.Count(name=name, reason=reason, amount=amount))

    def _do(self, action: actions.ProducerAction) -> None:
        self._actions.append(action)
