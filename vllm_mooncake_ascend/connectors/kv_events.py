"""vLLM's KV events about the prefix pool: what this engine has put there, and what it cannot get from there any more.

The machine says which saves are in the pool (`pool.told`); this module adds what only vLLM's request knows (tokens, adapter,
salt), in the form that vLLM's own block pool gives it (`vllm/v1/core/block_pool.py`, `_build_block_stored_event`). The
tokens are taken when a save is ordered, because its request may have ended when the save has.

Events about the pool carry the medium of CPU memory, and where vLLM has the field (0.32+) our ownership, so that they are not
taken for those of another tier. They say nothing of where in the cluster the memory is. There is no event for a reset: vLLM's
`AllBlocksCleared` would also clear what its own cache has, so everything that was told is removed block by block.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.distributed import kv_events
from vllm.v1.core import kv_cache_utils

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.planner.pool_keys import group_hashes
from vllm_mooncake_ascend.pool import actions
from vllm_mooncake_ascend.pool.known import BlockName
from vllm_mooncake_ascend.wire.pool_steps import GroupBlocks

OWNERSHIP = "mooncake_ascend_pool"
_untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)
"""0.31+ tags the keys that go into a hash, but not those in an event."""


def are_wanted(vllm_config: Any) -> bool:
    """Whether vLLM publishes KV events: `PoolSettings.tells_events`."""
    config = vllm_config.kv_events_config
    return config is not None and bool(config.enable_kv_cache_events)


class KvEvents:
    """Of one engine's scheduler thread.

    Args:
        hash_tokens: tokens of one of vLLM's block hashes.
    """

    def __init__(self, groups: tuple[GroupLayout, ...], hash_tokens: int) -> None:
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._waiting: dict[int, list[Any]] = {}
        """What is to be told of each save under way, should it succeed."""
        self._due: deque[Any] = deque(maxlen=limits.MAX_KV_EVENTS)

    def note(self, action: actions.SchedulerAction, request: Any = None) -> None:
        """Take one action of the machine; those that are not about saves mean nothing here.

        Args:
            request: vLLM's request that `OrderSave` is about, needed for that action only. None: it is not known any more, and
                its save is not told.
        """
        match action:
            case actions.OrderSave():
                if request is not None:
                    groups = action.order.groups
                    self._waiting[action.order.save_id] = [event for group in groups for event in self._stored(group, request)]
            case actions.Stored():
                self._due.extend(self._waiting.pop(action.save_id, ()))
            case actions.NotStored():
                self._waiting.pop(action.save_id, None)
            case actions.Gone():
                self._due.extend(_removed(action.blocks))
            case _:
                pass

    def take(self) -> list[Any]:
        """vLLM's event objects since the last call, oldest first."""
        taken = list(self._due)
        self._due.clear()
        return taken

    def _stored(self, group: GroupBlocks, request: Any) -> Iterator[Any]:
        """One event for each run of neighbours among the blocks of a group."""
        block_tokens = self._groups[group.group_index].tokens_per_block
        names = group_hashes(request.block_hashes, block_tokens // self._hash_tokens)
        for first, end in _runs(names, group.hashes):
            starts = range(first * block_tokens, end * block_tokens, block_tokens)
            keys = [
                kv_cache_utils.generate_block_hash_extra_keys(request, start, start + block_tokens, 0)[0] for start in starts
            ]
            adapter = request.lora_request
            yield kv_events.BlockStored(
                block_hashes=[kv_cache_utils.maybe_convert_block_hash(one) for one in names[first:end]],
                parent_block_hash=kv_cache_utils.maybe_convert_block_hash(names[first - 1]) if first else None,
                token_ids=list(request.all_token_ids[first * block_tokens : end * block_tokens]),
                block_size=block_tokens,
                lora_id=adapter.adapter_id if adapter else None,
                medium=kv_events.MEDIUM_CPU,
                lora_name=adapter.name if adapter else None,
                extra_keys=_untagged(keys),
                group_idx=group.group_index,
                **_newer(kv_events.BlockStored, ownership=OWNERSHIP, session_id=getattr(request, "session_id", None)),
            )


def _runs(names: Sequence[bytes], wanted: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Spans of positions in `names` that hold `wanted`, which is in the same order and may leave some out. What is not there
    (the request has been given other tokens) ends it."""
    position = 0
    runs: list[list[int]] = []
    for name in wanted:
        try:
            position = names.index(name, position)
        except ValueError:
            break
        if runs and runs[-1][1] == position:
            runs[-1][1] = position + 1
        else:
            runs.append([position, position + 1])
    return ((first, end) for first, end in runs)


def _removed(blocks: Sequence[BlockName]) -> Iterator[Any]:
    for group_index, of_group in itertools.groupby(sorted(blocks, key=lambda block: block[0]), key=lambda block: block[0]):
        hashes = [kv_cache_utils.maybe_convert_block_hash(name) for _, name in of_group]
        for first in range(0, len(hashes), limits.MAX_HASHES_PER_EVENT):
            yield kv_events.BlockRemoved(
                block_hashes=hashes[first : first + limits.MAX_HASHES_PER_EVENT],
                medium=kv_events.MEDIUM_CPU,
                group_idx=group_index,
                **_newer(kv_events.BlockRemoved, ownership=OWNERSHIP),
            )


def _newer(event_class: Any, **fields: Any) -> dict[str, Any]:
    """Those of the fields that this vLLM's events have."""
    return {name: value for name, value in fields.items() if name in event_class.__struct_fields__}
