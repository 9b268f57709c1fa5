"""Pins: which blocks the transfers of one engine hold, and how many they are. Decides nothing.

Prompts that begin alike share blocks, by prefix caching. A block that several transfers hold is taken from the engine's
pool once, so it counts once here, too, until the last of them lets it go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_mooncake_ascend.p2p import actions
from vllm_mooncake_ascend.p2p.events import BlockTable
from vllm_mooncake_ascend.p2p.leases import Transfer, blocks_of


class Pins:
    """Blocks by the number of transfers that hold them. `len` is the number of blocks."""

    def __init__(self) -> None:
        self._num_holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._num_holders)

    def would_be(self, block_ids: Sequence[int]) -> int:
        """How many blocks were held if one more transfer held these, each named once."""
        return len(self) + sum(block_id not in self._num_holders for block_id in block_ids)

    def add(self, block_ids: Sequence[int]) -> None:
        """One transfer holds these now."""
        for block_id in block_ids:
            self._num_holders[block_id] = self._num_holders.get(block_id, 0) + 1

    def remove(self, block_ids: Sequence[int]) -> None:
        """One transfer holds these no more."""
        for block_id in block_ids:
            num_holders = self._num_holders.pop(block_id, 0) - 1
            assert num_holders >= 0, "more blocks were unpinned than pinned"
            if num_holders:
                self._num_holders[block_id] = num_holders


class TransferPins:
    """The pins of all transfers, and those of them that leases keep.

    Leases are bounded; a prefill that runs holds its blocks itself, so that pins on them cost nothing.
    """

    def __init__(self, max_kept: int, do: Callable[[actions.ProducerAction], None]) -> None:
        self._max_kept = max_kept
        self._do = do
        self._pins = Pins()
        self._kept = Pins()

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def could_fit(self, block_ids: BlockTable) -> bool:
        """A lease may keep so many, if no other one kept any."""
        return len(blocks_of(block_ids)) <= self._max_kept

    def fits(self, block_ids: BlockTable) -> bool:
        """One more lease may keep these."""
        return self._kept.would_be(blocks_of(block_ids)) <= self._max_kept

    def pin(self, transfer: Transfer, block_ids: BlockTable) -> None:
        """Pin what a transfer has not pinned yet of a table."""
        wanted = transfer.unpinned_blocks(block_ids)
        if wanted:
            transfer.pins.append(wanted)
            self._pins.add(wanted)
            self._do(actions.PinBlocks(transfer_id=transfer.transfer_id, block_ids=wanted))

    def keep(self, transfer: Transfer, block_ids: BlockTable) -> None:
        """A lease keeps these, which are pinned."""
        transfer.kept = blocks_of(block_ids)
        self._kept.add(transfer.kept)

    def let_go(self, transfer: Transfer) -> None:
        """Give back every pin of a transfer."""
        for block_ids in transfer.pins:
            self._pins.remove(block_ids)
            self._do(actions.UnpinBlocks(transfer_id=transfer.transfer_id, block_ids=block_ids))
        self._kept.remove(transfer.kept)
        transfer.pins, transfer.kept = [], ()
