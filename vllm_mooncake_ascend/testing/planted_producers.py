"""Producers and readers with one mistake each, for `planted_bugs`. Mistakes that were once real are marked so."""

from __future__ import annotations

from typing import Any

import msgspec

from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.p2p import events
from vllm_mooncake_ascend.p2p.leases import GONE_TEXTS, Transfer, TransferInput, TransferState, blocks_of
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.reader import Reader
from vllm_mooncake_ascend.p2p.settings import ProducerSettings, ReaderSettings
from vllm_mooncake_ascend.testing.planted_law import NoLaw
from vllm_mooncake_ascend.types import Incarnation
from vllm_mooncake_ascend.wire import messages


class LawlessProducer(Producer):
    def __init__(
        self,
        incarnation: Incarnation,
        fingerprint: dict[str, str],
        ranks: tuple[RankLayout, ...],
        settings: ProducerSettings,
    ) -> None:
        super().__init__(incarnation, fingerprint, ranks, settings, NoLaw())


class ForgottenVerdict(LawlessProducer):
    def _end(self, transfer: Transfer, what: TransferInput, reason: str, now: float, text: str = "") -> None:
        super()._end(transfer, what, reason, now, text)
        transfer.readers.clear()


class PinLeakedOnPreemption(LawlessProducer):
    def _withdraw(self, transfer: Transfer) -> None:
        transfer.pins = []
        super()._withdraw(transfer)


class FirstReaderFrees(LawlessProducer):
    def _finish(self, *args: Any, **options: Any) -> bool:
        transfer: Transfer = args[0]
        held = super()._finish(*args, **options)
        if transfer.state is TransferState.LEASED:
            self._end(transfer, TransferInput.READ, "released", options["now"])
        return held


class AnyExpected(LawlessProducer):
    def _hear(self, peer: bytes, message: messages.FromReader, now: float) -> None:
        if not isinstance(message, messages.Hello):
            message = msgspec.structs.replace(message, expected=self._incarnation)
        super()._hear(peer, message, now)


class RevokesPromises(LawlessProducer):
    def _revoke_all(self, now: float) -> None:
        for transfer in self._table.leased:
            self._end(transfer, TransferInput.REVOKED, "revoked", now)


class PressureBreaksPromises(LawlessProducer):
    def _make_room(self, block_ids: events.BlockTable, now: float) -> bool:
        wanted = len(blocks_of(block_ids))
        for oldest in self._table.leased:
            if self.num_kept_blocks + wanted <= self._settings.max_pinned_blocks:
                break
            self._end(oldest, TransferInput.LAPSED, "capacity", now)
        return super()._make_room(block_ids, now)


class ProgressNotPinned(LawlessProducer):
    def _publish(self, transfer: Transfer, event: events.PrefillProgressed) -> None:
        transfer.num_tokens, transfer.block_ids = event.num_tokens, event.block_ids
        for key, reader in transfer.unfinished():
            self._offer(transfer, key, reader)


class PreemptionNotTold(LawlessProducer):
    """The blocks are unpinned, and what was read of them counts as right."""

    def _withdraw(self, transfer: Transfer) -> None:
        transfer.generation -= 1
        super()._withdraw(transfer)


class ToldBeforeThePreemption(LawlessProducer):
    """News after a preemption leave out what was told before it."""

    def _withdraw(self, transfer: Transfer) -> None:
        told = {key: reader.num_told_blocks for key, reader in transfer.readers.items()}
        super()._withdraw(transfer)
        for key, reader in transfer.readers.items():
            reader.num_told_blocks = told[key]


class ExpiresWhileRunning(LawlessProducer):
    def _end_prefill(self, transfer: Transfer, event: events.PrefillEnded, now: float) -> None:
        super()._end_prefill(transfer, event, now)
        if transfer.state is TransferState.LEASED and now > transfer.made_at_s + self._settings.lease_ttl_s:
            self._end(transfer, TransferInput.LAPSED, "expired", now)


class GoneWithoutReason(Producer):
    """Was real: a Subscribe to a revoked transfer that still drained raised KeyError."""

    def _why_not(self, transfer: Transfer, key: tuple[Incarnation, Any], now: float) -> str:
        reason = super()._why_not(transfer, key, now)
        return GONE_TEXTS["gone"] if transfer.state is TransferState.DRAINING else reason


# --- reader ----------------------------------------------------------------------------------------------------------------


class LawlessReader(Reader):
    def __init__(self, rank: int, settings: ReaderSettings) -> None:
        super().__init__(rank, settings, NoLaw())


class FirstPartIsAll(LawlessReader):
    def _planned(self, event: events.ReadPlanned, now: float) -> None:
        super()._planned(msgspec.structs.replace(event, is_last=event.part == 0 or event.is_last), now)
