"""Block pool of one simulated engine, as careless as a real one: what is free is written over at once.

Every block holds one tag per rank: `(prompt, position)` where it has that KV, JUNK where anything else was written. A tag
is right or it is not; half-written blocks are JUNK.
"""

from __future__ import annotations

from collections.abc import Iterable

Tag = tuple[int, int]
JUNK: Tag = (-1, -1)


class Violation(AssertionError):
    """The world is in a state that must never be."""


class BlockPool:
    """Reference-counted blocks 1 .. n-1; block 0 is the null block. The last freed is the first reused."""

    def __init__(self, num_blocks: int, num_ranks: int) -> None:
        self.refs = [0] * num_blocks
        self.epochs = [0] * num_blocks
        """Counts how often each block was freed: a write into another epoch hits somebody else's block."""
        self.tags = [[JUNK] * num_blocks for _ in range(num_ranks)]
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Blocks with one reference each, None when there are not enough."""
        if num_blocks > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block_id in taken:
            self.refs[block_id] = 1
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more reference on each block that somebody still holds."""
        for block_id in block_ids:
            if block_id == 0 or self.refs[block_id] == 0:
                raise Violation(f"block {block_id} was pinned when nobody held it")
            self.refs[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Give back one reference on each; what nobody holds any more is overwritten at once."""
        for block_id in block_ids:
            if self.refs[block_id] <= 0:
                raise Violation(f"block {block_id} was given back more often than taken")
            self.refs[block_id] -= 1
            if self.refs[block_id] == 0:
                self.epochs[block_id] += 1
                for tags in self.tags:
                    tags[block_id] = JUNK
                self._free.append(block_id)

    def write(self, block_ids: list[int], prompt: int, first: int, end: int) -> None:
        """The engine itself computes KV of a prompt into positions [first, end) of a block table."""
        for tags in self.tags:
            for position in range(first, end):
                tags[block_ids[position]] = (prompt, position)

    def still_right(self, block_ids: Iterable[int], prompt: int) -> list[int]:
        """The longest beginning of a block table that somebody still holds and that still has the prompt's KV."""
        kept: list[int] = []
        for position, block_id in enumerate(block_ids):
            if self.refs[block_id] == 0 or self.wrong([block_id], prompt, position):
                break
            kept.append(block_id)
        return kept

    def wrong(self, block_ids: Iterable[int], prompt: int, first: int) -> list[int]:
        """Blocks, from position `first` on, that do not hold the KV of a prompt on every rank."""
        return [
            block_id
            for position, block_id in enumerate(block_ids, first)
            if any(tags[block_id] != (prompt, position) for tags in self.tags)
        ]
