"""Known: what this engine believes to be in the pool, or on its way there, so that it is saved once. Decides nothing.

Belief is cheap to lose (a block is then put again, which the store takes for done) and harmful to keep for too long (an
evicted prefix would not be put again). So it has two ages: what was learnt in the last KNOWN_STORED_S, and before that;
when they are over, or full, the older one is forgotten. A save under way is known until it ends, whatever its age.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_mooncake_ascend import limits

BlockName = tuple[int, bytes]
"""KV cache group and hash."""


class Known:
    """Names of blocks; all methods cost constant time a name."""

    def __init__(self, max_names: int = limits.MAX_KNOWN_STORED) -> None:
        self._max_names = max_names
        self._young: set[BlockName] = set()
        self._old: set[BlockName] = set()
        self._young_until_s = 0.0
        self._under_way: set[BlockName] = set()

    def has(self, name: BlockName) -> bool:
        return name in self._under_way or name in self._young or name in self._old

    def start(self, names: Iterable[BlockName]) -> None:
        """A save of these begins."""
        self._under_way.update(names)

    def end(self, names: Iterable[BlockName]) -> None:
        """That save has ended; `learn` what came of it."""
        self._under_way.difference_update(names)

    def learn(self, names: Iterable[BlockName], now: float) -> None:
        """These are in the pool."""
        if len(self._young) >= self._max_names:
            self._turn(now)
        self._young.update(names)

    def unlearn(self, names: Iterable[BlockName]) -> None:
        """These are not in the pool."""
        gone = set(names)
        self._young -= gone
        self._old -= gone

    def age(self, now: float) -> None:
        """Forget what is too old."""
        if now >= self._young_until_s:
            if now >= self._young_until_s + limits.KNOWN_STORED_S:
                self._young = set()
            self._turn(now)

    def forget(self) -> None:
        """The store may have lost everything."""
        self._young, self._old = set(), set()

    def _turn(self, now: float) -> None:
        self._old, self._young = self._young, set()
        self._young_until_s = now + limits.KNOWN_STORED_S
