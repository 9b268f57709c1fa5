"""Drops one namespace from a pool: its keys as the master lists them, one by one, never by force and never others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the keys."""

    removed: int = 0
    gone: int = 0
    """Evicted, or removed by somebody else, after they were listed."""
    in_use: int = 0
    """Still there: under an object lease, or being written."""
    unknown: int = 0
    """The master gave no answer, or another one than it should."""
    reasons: tuple[str, ...] = ()
    """Why keys are not known to be gone, each reason once."""

    @property
    def is_complete(self) -> bool:
        """Nothing of what was listed is left."""
        return self.in_use == 0 and self.unknown == 0


def keys_of_namespace(keys: Sequence[str], namespace: str) -> list[str]:
    """Those of `keys` that belong to the namespace."""
    return [key for key in keys if key.startswith(namespace + "/")]


def clear(
    store: KVStore, keys: Sequence[str], *, namespace: str, on_progress: Callable[[int], None] = lambda _: None
) -> Cleared:
    """Remove `keys`, all of the namespace. Stops when the master falls silent: each call more would cost seconds.

    Args:
        on_progress: told how many keys are done after each call.
    """
    counts: Counter[KeyOutcome] = Counter()
    reasons: dict[str, None] = {}
    for first in range(0, len(keys), limits.MAX_LOOKUP_KEYS):
        batch = keys[first : first + limits.MAX_LOOKUP_KEYS]
        answer = store.remove(batch, prefix=namespace + "/")
        counts.update(answer.outcomes)
        reasons.update(dict.fromkeys(result.reason for result in answer.results if result.reason))
        on_progress(first + len(batch))
        if answer.is_lost:
            break
    num_told = counts[KeyOutcome.DONE] + counts[KeyOutcome.MISSING] + counts[KeyOutcome.IN_USE]
    return Cleared(
        removed=counts[KeyOutcome.DONE],
        gone=counts[KeyOutcome.MISSING],
        in_use=counts[KeyOutcome.IN_USE],
        unknown=len(keys) - num_told,
        reasons=tuple(reasons),
    )
