"""The producer's table of transfers: what is in it, in which order things end, and which alarms are set.

It keeps the bounds and the law; what an event means is `producer`'s business. A record in state UNKNOWN is not in the
table: it stands for any transfer nobody spoke of.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Law
from vllm_mooncake_ascend.p2p.leases import Transfer, TransferInput, TransferState
from vllm_mooncake_ascend.p2p.settings import ProducerSettings
from vllm_mooncake_ascend.timers import Timers
from vllm_mooncake_ascend.types import Incarnation, TransferId


class TransferTable:
    """Transfers by id. `move` is the one way to change a state."""

    def __init__(self, settings: ProducerSettings, law: Law[TransferState, TransferInput]) -> None:
        self._settings = settings
        self._law = law
        self._transfers: dict[TransferId, Transfer] = {}
        self._leased: dict[TransferId, Transfer] = {}
        """LEASED and DRAINING, oldest first."""
        self._ended: dict[TransferId, float] = {}
        """When ENDED transfers are forgotten, oldest first."""
        self._num_awaited: dict[Incarnation, int] = {}
        """AWAITED transfers by the reader engine that asked first."""
        self._num_all_awaited = 0
        self._timers: Timers[TransferId] = Timers()

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def leased(self) -> list[Transfer]:
        """Transfers whose blocks are kept for readers, oldest first."""
        return list(self._leased.values())

    @property
    def num_leased(self) -> int:
        return len(self._leased)

    def all(self) -> Iterable[Transfer]:
        """Every transfer in the table."""
        return self._transfers.values()

    def known(self, transfer_id: TransferId) -> Transfer:
        """The transfer, or a fresh record in state UNKNOWN."""
        return self._transfers.get(transfer_id) or Transfer(transfer_id=transfer_id)

    def has_room(self) -> bool:
        """One more transfer fits in, at the price of the oldest ended one where need be."""
        return len(self._transfers) < limits.MAX_TRANSFERS or bool(self._ended)

    def can_await(self, reader: Incarnation) -> bool:
        """One more transfer may wait for its announcement on behalf of this reader engine."""
        return (
            self.has_room()
            and self._num_awaited.get(reader, 0) < limits.MAX_AWAITED_PER_READER
            and self._num_all_awaited < limits.MAX_AWAITED_TRANSFERS
        )

    def move(self, transfer: Transfer, what: TransferInput, after: TransferState, now: float) -> None:
        """Change or keep the state of a transfer for the reason `what`; its alarm is set anew."""
        before, transfer.state = transfer.state, after
        self._law.check(before, what, after)
        if before is not after:
            self._leave(transfer, before)
            self._enter(transfer, before, now)
        deadline_s = self._deadline_s(transfer)
        if deadline_s is None:
            self._timers.drop(transfer.transfer_id)
        else:
            self._timers.set(transfer.transfer_id, deadline_s)

    def take_due(self, now: float) -> Transfer | None:
        """A transfer whose time is over, None when there is none; those ended long ago are forgotten by the way."""
        while self._ended and next(iter(self._ended.values())) <= now:
            self._forget_oldest(now)
        transfer_id = self._timers.take_due(now)
        return None if transfer_id is None else self._transfers[transfer_id]

    def next_timer(self) -> float | None:
        """When `take_due` has something to do, None: never."""
        times_s = (self._timers.next_s(), next(iter(self._ended.values()), None))
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def _deadline_s(self, transfer: Transfer) -> float | None:
        """When the time of a transfer is over, None: never (its prefill runs), or by age alone (it ended)."""
        match transfer.state:
            case TransferState.AWAITED if transfer.all_readers_done():
                return transfer.made_at_s + limits.VERDICT_MEMORY_S
            case TransferState.AWAITED:
                return transfer.asked_at_s + self._settings.unknown_wait_s
            case TransferState.LEASED if not transfer.readers:
                return transfer.ended_at_s + self._settings.lease_ttl_s
            case TransferState.LEASED | TransferState.DRAINING:
                return transfer.promised_until_s()
            case _:
                return None

    def _leave(self, transfer: Transfer, before: TransferState) -> None:
        if before is TransferState.AWAITED and transfer.awaited_by is not None:
            self._num_all_awaited -= 1
            self._num_awaited[transfer.awaited_by] -= 1
            if self._num_awaited[transfer.awaited_by] == 0:
                del self._num_awaited[transfer.awaited_by]
        elif transfer.state is TransferState.ENDED:
            self._leased.pop(transfer.transfer_id, None)

    def _enter(self, transfer: Transfer, before: TransferState, now: float) -> None:
        if transfer.state is TransferState.UNKNOWN:
            del self._transfers[transfer.transfer_id]
            return
        if before is TransferState.UNKNOWN:
            if len(self._transfers) >= limits.MAX_TRANSFERS:
                self._forget_oldest(now)
            transfer.made_at_s = now
            self._transfers[transfer.transfer_id] = transfer
            assert len(self._transfers) <= limits.MAX_TRANSFERS
        match transfer.state:
            case TransferState.AWAITED if transfer.awaited_by is not None:
                self._num_all_awaited += 1
                self._num_awaited[transfer.awaited_by] = self._num_awaited.get(transfer.awaited_by, 0) + 1
            case TransferState.LEASED:
                self._leased[transfer.transfer_id] = transfer
            case TransferState.ENDED:
                self._ended[transfer.transfer_id] = now + limits.VERDICT_MEMORY_S

    def _forget_oldest(self, now: float) -> None:
        transfer_id = next(iter(self._ended))
        del self._ended[transfer_id]
        self.move(self._transfers[transfer_id], TransferInput.LAPSED, TransferState.UNKNOWN, now)
