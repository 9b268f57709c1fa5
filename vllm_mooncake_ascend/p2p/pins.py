"""Pins: which blocks the leases of one engine hold, and how many they are. Decides nothing.

Prompts that begin alike share blocks, by prefix caching. A block that several transfers hold is taken from the engine's
pool once, so it counts once here, too, until the last of them lets it go.
"""

from __future__ import annotations

from collections.abc import Sequence


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
