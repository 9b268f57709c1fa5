"""Saves: which blocks go into the pool, and how long they stay pinned for that. A part of the scheduler's machine.

After each finished chunk the new whole blocks of a request are saved: from the chunk's end backwards to the first block that
is known to be in the pool or on its way, or to the save cursor. So a prefix is saved once whoever computes it, and what the
local cache had is saved only where the pool lacks it. What there is no room for is left to the next chunk, or to the request's
end. A save is pinned until every rank has ended it, so it outlives abort and preemption with the right bytes. After a save that
failed the chain saves no more: what follows a gap is of no use, and a save that leans on a block whose own save failed is not
taken for known, so that the next who has the prefix saves all of it. States of a save:

    UNKNOWN      not in the table
    SAVING       the ranks save
    QUARANTINED  some call may still read its blocks: pinned until none can

A rank that never ends a save keeps its blocks; they count against `max_saved_blocks`, which bounds the harm. There is no
alarm for it: an idle engine hears of the ends of its saves only with its next step.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.layout.blocks import NULL_BLOCK
from vllm_mooncake_ascend.planner import hits
from vllm_mooncake_ascend.planner.pool_keys import group_hashes
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.pool.book import Entry
from vllm_mooncake_ascend.pool.known import BlockName, Known
from vllm_mooncake_ascend.pool.settings import PoolSettings
from vllm_mooncake_ascend.pool.told import Told
from vllm_mooncake_ascend.timers import Timers
from vllm_mooncake_ascend.types import Outcome, RequestId, worst
from vllm_mooncake_ascend.wire.pool_steps import GroupBlocks, SaveEnded, SaveOrder


class SaveState(enum.Enum):
    """See the module's table."""

    UNKNOWN = "unknown"
    SAVING = "saving"
    QUARANTINED = "quarantined"


class SaveInput(enum.Enum):
    """What can happen to a save."""

    ORDERED = "chunk computed"
    ALL_ENDED = "all ranks: none unknown"
    ALL_UNKNOWN = "all ranks: worst unknown"
    LATE = "time is over"


_S, _I = SaveState, SaveInput

SAVE_LAW: Law[SaveState, SaveInput] = Law(
    {
        _S.UNKNOWN: {_I.ORDERED: Cell("pin, OrderSave", (_S.SAVING,))},
        _S.SAVING: {
            _I.ALL_ENDED: Cell("unpin; after a failure this chain saves no more", (_S.UNKNOWN,)),
            _I.ALL_UNKNOWN: Cell("keep the pins; this chain saves no more", (_S.QUARANTINED,)),
        },
        _S.QUARANTINED: {_I.LATE: Cell("unpin", (_S.UNKNOWN,))},
    }
)
"""Law of a save."""


@dataclasses.dataclass(slots=True)
class Save:
    """One order to all ranks."""

    save_id: int
    request_id: RequestId
    chain: int
    groups: tuple[GroupBlocks, ...]
    leans_on: tuple[BlockName, ...]
    """The block before its first one in each group of full attention: without that in the pool it is of no use."""
    is_past: bool = False
    """A reset came meanwhile: it says nothing of what the pool has now."""
    state: SaveState = SaveState.UNKNOWN
    outcomes: dict[int, Outcome] = dataclasses.field(default_factory=dict)

    @property
    def block_ids(self) -> tuple[int, ...]:
        return tuple(block_id for group in self.groups for block_id in group.block_ids)


class Saves:
    """`broken(request_id, chain)` is called for each save that failed."""

    def __init__(
        self,
        settings: PoolSettings,
        do: Callable[[actions.SchedulerAction], None],
        broken: Callable[[RequestId, int], None],
        law: Law[SaveState, SaveInput],
    ) -> None:
        self._settings = settings
        self._do = do
        self._broken = broken
        self._law = law
        self._saves: dict[int, Save] = {}
        self._known = Known()
        self._told = Told(do, is_heard=settings.tells_events)
        self._timers: Timers[int] = Timers()
        self._last_id = 0
        self.num_pinned_blocks = 0

    def next_timer(self) -> float | None:
        return self._timers.next_s()

    def __len__(self) -> int:
        return len(self._saves)

    # --- starting -----------------------------------------------------------------------------------------------------

    def chunk(self, entry: Entry, event: events.ChunkComputed, namespace: str, now: float) -> None:
        """Save the new whole blocks of a request as far as there is room, and move its cursor: the rest comes with the next
        chunk, or with the request's end."""
        self._known.age(now)
        num_tokens = min(event.num_tokens, len(entry.hashes) * self._settings.hash_tokens)
        found = list(self._new_blocks(entry, event, self._spans_that_fit(entry, event, num_tokens)))
        groups = tuple(blocks for blocks, _ in found)
        if not groups:
            return
        self._last_id += 1
        leans_on = tuple(before for _, before in found if before is not None)
        save = Save(save_id=self._last_id, request_id=entry.request_id, chain=entry.chain, groups=groups, leans_on=leans_on)
        assert self.num_pinned_blocks + len(save.block_ids) <= self._settings.max_saved_blocks
        self._saves[save.save_id] = save
        self._known.start(_names(groups))
        self.num_pinned_blocks += len(save.block_ids)
        self._do(actions.PinBlocks(request_id=save.request_id, block_ids=save.block_ids))
        order = SaveOrder(
            save_id=save.save_id, chain=save.chain, request_id=save.request_id, namespace=namespace, groups=groups
        )
        self._do(actions.OrderSave(order=order))
        self._count(counters.SAVES_ORDERED)
        self._move(save, SaveInput.ORDERED, SaveState.SAVING)

    def came(self, groups: tuple[GroupBlocks, ...], now: float) -> None:
        """These blocks were loaded from the pool, so they are in it."""
        self._known.age(now)
        self._known.learn(_names(groups), now)

    def missed(self, groups: tuple[GroupBlocks, ...], missing_block_ids: tuple[int, ...]) -> None:
        """Of these blocks some were not in the pool when they were got. They, and what leans on them, are to be saved again by
        the next who has them."""
        missing = set(missing_block_ids)
        for group in groups:
            pairs = list(zip(group.block_ids, group.hashes, strict=True))
            holes = [index for index, (block_id, _) in enumerate(pairs) if block_id in missing]
            if holes:
                names = [(group.group_index, block_hash) for _, block_hash in pairs]
                self._known.unlearn(names[holes[0] :])
                self._told.gone(names[index] for index in holes)

    def _spans_that_fit(self, entry: Entry, event: events.ChunkComputed, num_tokens: int) -> list[range]:
        """Positions of each group that the pool lacks, from the cursor to `num_tokens`, or as far as there is room; moves the
        cursor there."""
        room = self._settings.max_saved_blocks - self.num_pinned_blocks
        firsts = [entry.saved_tokens // group.tokens_per_block for group in self._settings.groups]
        spans = self._spans(entry, event, num_tokens)
        if sum(map(len, spans)) > room:
            self._count(counters.SAVES_ENDED, counters.CAPACITY)
        step = hits.alignment_tokens(self._settings.groups)
        while (num_too_many := sum(map(len, spans)) - room) > 0 and num_tokens > 0:
            num_steps = max(1, num_too_many * self._settings.hash_tokens // (step * len(spans)))
            num_tokens = max(0, (num_tokens - 1) // step + 1 - num_steps) * step
            spans = self._spans(entry, event, num_tokens)
        entry.saved_tokens = max(entry.saved_tokens, num_tokens)
        num_shared = sum(max(0, span.start - first) for first, span in zip(firsts, spans, strict=True))
        if num_shared:
            self._count(counters.BLOCKS_SHARED, amount=num_shared)
        return spans

    def _spans(self, entry: Entry, event: events.ChunkComputed, num_tokens: int) -> list[range]:
        spans = []
        for group_index, group in enumerate(self._settings.groups):
            ratio = group.tokens_per_block // self._settings.hash_tokens
            end = min(num_tokens // group.tokens_per_block, len(event.block_ids[group_index]), len(entry.hashes) // ratio)
            start = end
            first = entry.saved_tokens // group.tokens_per_block
            while start > first and not self._known.has((group_index, entry.hashes[start * ratio - 1])):
                start -= 1
            spans.append(range(start, end))
        return spans

    def _new_blocks(
        self, entry: Entry, event: events.ChunkComputed, spans: list[range]
    ) -> Iterator[tuple[GroupBlocks, BlockName | None]]:
        """Blocks of each group's span, and the block they lean on; positions without a block are left out."""
        for group_index, (group, span) in enumerate(zip(self._settings.groups, spans, strict=True)):
            ratio = group.tokens_per_block // self._settings.hash_tokens
            hashes = group_hashes(entry.hashes[span.start * ratio : span.stop * ratio], ratio)
            pairs = zip(event.block_ids[group_index][span.start : span.stop], hashes, strict=True)
            new = [one for one in pairs if one[0] != NULL_BLOCK]
            if new:
                new_ids, new_hashes = zip(*new, strict=True)
                is_chain = span.start > 0 and group.window_tokens == 0 and not group.has_recurrent_state
                before = (group_index, entry.hashes[span.start * ratio - 1]) if is_chain else None
                yield GroupBlocks(group_index=group_index, block_ids=new_ids, hashes=new_hashes), before

    # --- the workers' ends --------------------------------------------------------------------------------------------

    def rank_ended(self, ended: SaveEnded, now: float) -> None:
        """One rank's save has ended; the last one decides what the save has come to."""
        save = self._saves.get(ended.save_id)
        if save is None or ended.rank in save.outcomes:
            self._count(counters.EVENTS_IGNORED)
            return
        if ended.reason == counters.STORE_LOST:
            self.forget()
        save.outcomes[ended.rank] = ended.outcome
        if ended.outcome is not Outcome.DONE:
            self._broken(save.request_id, save.chain)
        if len(save.outcomes) < self._settings.num_ranks:
            return
        outcome = worst(list(save.outcomes.values()))
        if not save.is_past:
            self._known.end(_names(save.groups))
        self._count(counters.SAVES_ENDED, counters.DONE if outcome is Outcome.DONE else ended.reason or counters.FAILED)
        if outcome is Outcome.UNKNOWN:
            self._count(counters.QUARANTINES, counters.PUT)
            self._told.not_stored(save.save_id)
            self._move(save, SaveInput.ALL_UNKNOWN, SaveState.QUARANTINED, now + limits.QUARANTINE_S)
            return
        if outcome is Outcome.DONE and not save.is_past and all(self._known.has(name) for name in save.leans_on):
            self._known.learn(_names(save.groups), now)
            self._told.stored(save.save_id, _names(save.groups))
        else:
            self._told.not_stored(save.save_id)
        self._settle(save, SaveInput.ALL_ENDED)

    # --- outages, resets, time ----------------------------------------------------------------------------------------

    def forget(self) -> None:
        """The store is lost, and with it perhaps all it held."""
        self._known.forget()
        self._told.all_gone()

    def reset(self) -> None:
        """Blocks to come have other keys, even where their hashes are those of blocks that are saved just now."""
        for save in self._saves.values():
            save.is_past = True
        self._known = Known()
        self._told.all_gone()

    def lapse(self, now: float) -> None:
        """The quarantine of some saves is over."""
        while (save_id := self._timers.take_due(now)) is not None:
            self._settle(self._saves[save_id], SaveInput.LATE)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _settle(self, save: Save, what: SaveInput) -> None:
        """The one end of a save: nothing reads its blocks any more."""
        block_ids = save.block_ids
        self.num_pinned_blocks -= len(block_ids)
        self._do(actions.UnpinBlocks(request_id=save.request_id, block_ids=block_ids))
        del self._saves[save.save_id]
        self._move(save, what, SaveState.UNKNOWN)

    def _move(self, save: Save, what: SaveInput, after: SaveState, deadline_s: float | None = None) -> None:
        before, save.state = save.state, after
        self._law.check(before, what, after)
        if deadline_s is not None:
            self._timers.set(save.save_id, deadline_s)

    def _count(self, name: str, reason: str = counters.NO_REASON, *, amount: float = 1.0) -> None:
        self._do(actions.Count(name=name, reason=reason, amount=amount))


def _names(groups: tuple[GroupBlocks, ...]) -> Iterator[BlockName]:
    return ((group.group_index, block_hash) for group in groups for block_hash in group.hashes)
