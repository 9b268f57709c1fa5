"""The block pool of a simulated engine: references, the free list, and the prefix cache."""

from __future__ import annotations


class Blocks:
    """Ids from 1 on; 0 is the null block. `uses` counts how often each was handed out anew."""

    def __init__(self, num_blocks: int) -> None:
        self.owners = dict.fromkeys(range(1, num_blocks), 0)
        self.uses = dict.fromkeys(range(1, num_blocks), 0)
        self._free = list(range(1, num_blocks))
        self._cached: dict[bytes, int] = {}

    def num_local(self, hashes: list[bytes]) -> int:
        """Blocks of the prompt that the prefix cache has."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._cached:
                return count
        return len(hashes)

    def allocate(self, hashes: list[bytes], num_local: int) -> list[int] | None:
        """Blocks for a prompt, the first of them from the cache; None when there are too few."""
        local = [self._cached[block_hash] for block_hash in hashes[:num_local]]
        for block_id in local:
            self.take(block_id)
        num_new = len(hashes) - num_local
        if num_new > len(self._free):
            self.release(local)
            return None
        new, self._free = self._free[:num_new], self._free[num_new:]
        for block_id in new:
            self.owners[block_id] = 1
            self.uses[block_id] += 1
        self._cached = {name: block_id for name, block_id in self._cached.items() if block_id not in new}
        return local + new

    def take(self, block_id: int) -> None:
        """One more reference."""
        if self.owners[block_id] == 0:
            self._free.remove(block_id)
        self.owners[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """One reference less; the last ones of a prompt are reused first."""
        for block_id in reversed(block_ids):
            self.owners[block_id] -= 1
            if self.owners[block_id] == 0:
                self._free.append(block_id)

    def cache(self, block_hash: bytes, block_id: int) -> None:
        self._cached.setdefault(block_hash, block_id)

    def clear_cache(self) -> None:
        self._cached = {}
