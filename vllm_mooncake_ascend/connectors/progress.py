"""Progress: which tokens of a request have their KV written, learnt from what vLLM schedules and what comes back.

What a step computes is written once the workers' output of that step has come back. Each step that computes something of a
prompt gets a number, higher than any before, which the workers send back with their output (`envelopes`); snapshots up to that
number are true then.
Of a request that ends in the very update that brings the output back vLLM tells first: `requests.num_written_tokens` says
what of it is written. Costs nothing for requests that only decode, unless these are followed too.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.types import RequestId

BlockTable = tuple[tuple[int, ...], ...]

_STEP_NUMBERS = itertools.count(1)
"""Of this process: where two sides of a connector follow the same steps, the highest number of a step does for both."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [0, num_tokens) of a request will be, or are, written in these blocks."""

    request_id: RequestId
    chain: int
    """Life of the request that the step was scheduled in."""
    num_tokens: int
    block_ids: BlockTable


@dataclasses.dataclass(frozen=True, slots=True)
class _Snapshot:
    """A chunk of a step under way, true once the step's output is back, unless the request was preempted meanwhile."""

    chunk: Chunk
    request: Any
    num_preemptions: int

    @property
    def is_of_this_life(self) -> bool:
        """vLLM may take a request's blocks between a step and its output (a reset), long before it tells of that."""
        return int(self.request.num_preemptions) == self.num_preemptions


@dataclasses.dataclass(slots=True)
class _Followed:
    request: Any
    tables: list[list[int]]
    """Block ids by group."""
    is_complete: bool
    """The tables are as of the present step: vLLM told them with the admission."""
    num_tokens: int = 0
    """Told of so far."""


class Progress:
    """Of one engine's scheduler thread.

    Args:
        follows_decode: also follow what is computed behind the prompt.
        groups: KV cache groups, for the block sizes.
    """

    def __init__(self, *, groups: tuple[GroupLayout, ...], follows_decode: bool) -> None:
        self._block_tokens = min(group.tokens_per_block for group in groups)
        self._follows_decode = follows_decode
        self._followed: dict[RequestId, _Followed] = {}
        self._snapshots: collections.deque[tuple[int, list[_Snapshot]]] = collections.deque()
        """By number of the step, oldest first."""

    def __len__(self) -> int:
        return len(self._followed)

    def admitted(self, request: Any, block_ids: BlockTable) -> None:
        """vLLM has allocated blocks for a request that is about to run, or to load; these are all it has."""
        tables = [list(table) for table in block_ids]
        self._followed[RequestId(request.request_id)] = _Followed(request=request, tables=tables, is_complete=True)

    def preempted(self, request_id: RequestId) -> None:
        """It lost its blocks, before or in the step that is scheduled now. After a reset it may have got others in that same
        step: these stay."""
        followed = self._followed.get(request_id)
        if followed is not None and not followed.is_complete:
            del self._followed[request_id]

    def ended(self, request_id: RequestId) -> None:
        self._followed.pop(request_id, None)

    def scheduled(self, scheduler_output: Any, chain_of: Callable[[RequestId], int | None]) -> int:
        """vLLM has scheduled a step, and not yet counted its tokens; returns the step's number, 0 where it computes nothing
        that is followed."""
        num_scheduled = scheduler_output.num_scheduled_tokens
        running = [request_id for request_id in self._followed if request_id in num_scheduled]
        if not running:
            return 0
        self._extend(scheduler_output)
        chunks = list(self._chunks(running, num_scheduled, chain_of))
        if not chunks:
            return 0
        number = next(_STEP_NUMBERS)
        self._snapshots.append((number, chunks))
        return number

    def written(self, step: int) -> Iterator[Chunk]:
        """The output of this step has come back (0: of one without a number)."""
        while self._snapshots and self._snapshots[0][0] <= step:
            yield from (one.chunk for one in self._snapshots.popleft()[1] if one.is_of_this_life)

    def _extend(self, scheduler_output: Any) -> None:
        """Add the blocks that vLLM gave to requests that go on."""
        cached = scheduler_output.scheduled_cached_reqs
        if any(not followed.is_complete for followed in self._followed.values()):
            for request_id, new_block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
                followed = self._followed.get(request_id)
                if followed is not None and not followed.is_complete and new_block_ids is not None:
                    for table, ids in zip(followed.tables, new_block_ids, strict=True):
                        table.extend(ids)

    def _chunks(
        self, running: list[RequestId], num_scheduled: dict[str, int], chain_of: Callable[[RequestId], int | None]
    ) -> Iterator[_Snapshot]:
        for request_id in running:
            followed = self._followed[request_id]
            followed.is_complete = False
            end = int(followed.request.num_computed_tokens) + num_scheduled[request_id]
            num_prompt_tokens = int(followed.request.num_prompt_tokens)
            if not self._follows_decode:
                end = min(end, num_prompt_tokens)
                if end == num_prompt_tokens:
                    del self._followed[request_id]
            chain = chain_of(request_id)
            if chain is not None and end // self._block_tokens > followed.num_tokens // self._block_tokens:
                followed.num_tokens = end
                tables = tuple(tuple(table) for table in followed.tables)
                chunk = Chunk(request_id=request_id, chain=chain, num_tokens=end, block_ids=tables)
                yield _Snapshot(chunk, followed.request, int(followed.request.num_preemptions))
