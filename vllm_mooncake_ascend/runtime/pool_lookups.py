"""PoolLookups: from a wish to know to what is in the pool. Runs on the lookup threads, which may block.

A lookup asks for every shard of every block that some prefix may need, in as few calls as the store takes. What is not
certainly there is not there.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import KeyOutcome, StoreAnswer, StoreKey
from vllm_mooncake_ascend.planner import hits
from vllm_mooncake_ascend.planner.pool_keys import Shard, group_hashes, key_prefix, keys_of
from vllm_mooncake_ascend.pool import actions, events
from vllm_mooncake_ascend.pool.settings import PoolSettings

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Question:
    """All keys of a lookup, and how many of them are of each shard, in this order."""

    keys: list[str]
    end_token: int
    """Of what has hashes."""
    num_keys: dict[Shard, int]


class Lookup(Protocol):
    """What is needed of `engines.base.KVStore`."""

    def exists(self, keys: Sequence[StoreKey]) -> StoreAnswer: ...


class PoolLookups:
    """Of one engine. `answered` is told of each answer of the store, and how many seconds it took to come."""

    def __init__(
        self,
        store: Lookup,
        settings: PoolSettings,
        shards: Sequence[Shard],
        *,
        answered: Callable[[StoreAnswer, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._settings = settings
        self._shards = tuple(shards)
        self._answered = answered
        self._clock = clock
        self._has_raised = False

    def run(self, wanted: actions.StartLookup) -> events.LookupEnded:
        """Ask the store. Whatever goes wrong is a miss, and the first time a line in the log."""
        try:
            end_token, is_lost = self._end_token(wanted)
        except Exception:
            if not self._has_raised:
                logger.exception("a lookup in the pool raised, and so may others; please report this: %s", wanted.request_id)
            self._has_raised = True
            end_token, is_lost = wanted.first_token, False
        return events.LookupEnded(lookup_id=wanted.lookup_id, end_token=end_token, is_lost=is_lost)

    def _end_token(self, wanted: actions.StartLookup) -> tuple[int, bool]:
        question = self._question(wanted)
        found, is_lost = self._ask(question.keys)
        if is_lost:
            return wanted.first_token, True
        rows: dict[int, list[list[bool]]] = {}
        for shard, num_keys in question.num_keys.items():
            rows.setdefault(shard.group_index, []).append(list(itertools.islice(found, num_keys)))
        groups = self._settings.groups
        present = {
            index: hits.present_in_all(rows[index])
            if index in rows  # else no rank holds anything of it
            else np.ones(len(hits.asked_positions(group, wanted.first_token, question.end_token)), dtype=np.bool_)
            for index, group in enumerate(groups)
        }
        return hits.longest_hit(groups, present, wanted.first_token, question.end_token), False

    def _question(self, wanted: actions.StartLookup) -> _Question:
        hash_tokens = self._settings.hash_tokens
        end_token = max(wanted.first_token, min(wanted.end_token, len(wanted.hashes) * hash_tokens))
        keys: list[str] = []
        num_keys: dict[Shard, int] = {}
        for shard in self._shards:
            group = self._settings.groups[shard.group_index]
            ratio = group.tokens_per_block // hash_tokens
            span = hits.asked_positions(group, wanted.first_token, end_token)
            hashes = group_hashes(wanted.hashes[span.start * ratio : span.stop * ratio], ratio)
            keys += keys_of(key_prefix(wanted.namespace, shard.group_index, shard.name), hashes)
            num_keys[shard] = len(hashes)
        return _Question(keys=keys, end_token=end_token, num_keys=num_keys)

    def _ask(self, keys: list[str]) -> tuple[Iterator[bool], bool]:
        """For each key whether it is there; and whether the store is lost, in which case the rest is not asked for."""
        found: list[bool] = []
        there = KeyOutcome.DONE  # looked up once: it costs more than the rest of the loop
        for first in range(0, len(keys), limits.MAX_LOOKUP_KEYS):
            asked = keys[first : first + limits.MAX_LOOKUP_KEYS]
            started_s = self._clock()
            answer = self._store.exists(asked)
            self._answered(answer, self._clock() - started_s)
            if answer.is_lost:
                return iter(()), True
            found += [result.outcome is there for result in answer.results]
        return iter(found), False
