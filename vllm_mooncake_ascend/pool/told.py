"""Told: which blocks the outside was told to be in the pool, so that it can be told when they are not. Decides nothing else.

A router that follows KV events sends requests to where it believes their prefix to be. What it was told must therefore be
taken back as soon as it is doubtful: a key was missing when it was got, the store was lost, the namespace moved, or so many
blocks were told that the oldest cannot be remembered. Blocks that others evict unnoticed stay told until somebody misses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.pool import actions
from vllm_mooncake_ascend.pool.known import BlockName


class Told:
    """Names of blocks, oldest first. Does nothing where nobody listens."""

    def __init__(
        self, do: Callable[[actions.SchedulerAction], None], *, is_heard: bool, max_names: int = limits.MAX_KNOWN_STORED
    ) -> None:
        self._do = do
        self._is_heard = is_heard
        self._max_names = max_names
        self._names: dict[BlockName, None] = {}

    def stored(self, save_id: int, names: Iterable[BlockName]) -> None:
        """All blocks of a save are in the pool, and so is what they lean on."""
        if not self._is_heard:
            return
        for name in names:
            self._names.pop(name, None)
            self._names[name] = None
        self._do(actions.Stored(save_id=save_id))
        num_too_many = len(self._names) - self._max_names
        if num_too_many > 0:
            self.gone(list(self._names)[:num_too_many])

    def not_stored(self, save_id: int) -> None:
        """Nothing is to be told of this save."""
        if self._is_heard:
            self._do(actions.NotStored(save_id=save_id))

    def gone(self, names: Iterable[BlockName]) -> None:
        """These are not in the pool any more."""
        gone = tuple(name for name in names if name in self._names)
        for name in gone:
            del self._names[name]
        if gone:
            self._do(actions.Gone(blocks=gone))

    def all_gone(self) -> None:
        """Nothing that was told can be relied on."""
        self.gone(list(self._names))
