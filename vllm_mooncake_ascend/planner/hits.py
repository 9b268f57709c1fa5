"""From what is in the pool to the longest prefix that can be loaded, never one block more.

A prefix of n tokens is usable when every object that its load would read is there: in a group with full attention all blocks
from the local hit on, with a sliding window those in the window, with a recurrent state the newest one; and of each of them
every shard. n ends at a block's end in every group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_mooncake_ascend.layout.plane import GroupLayout

Present = npt.NDArray[np.bool_]
"""`[num_blocks] bool`: whether every shard of a block is in the pool."""


def alignment_tokens(groups: Sequence[GroupLayout]) -> int:
    """A usable prefix is a multiple of this many tokens."""
    return math.lcm(*(group.tokens_per_block for group in groups))


def longest_possible(groups: Sequence[GroupLayout], num_prompt_tokens: int) -> int:
    """The most tokens that may ever be loaded. After a complete hit vLLM computes the last token again, which a recurrent
    state does not allow: it cannot go back by one."""
    most = num_prompt_tokens - 1 if any(group.has_recurrent_state for group in groups) else num_prompt_tokens
    step = alignment_tokens(groups)
    return max(0, most) // step * step


def asked_positions(group: GroupLayout, first_token: int, end_token: int) -> range:
    """Blocks of a group that some prefix longer than `first_token` and not above `end_token` may need."""
    return range(first_token // group.tokens_per_block, max(first_token, end_token) // group.tokens_per_block)


def present_in_all(answers: Sequence[Sequence[bool]]) -> Present:
    """Blocks that are there in each shard; `answers`: one row a shard, one column a block."""
    present: Present = np.logical_and.reduce(np.array(answers, dtype=np.bool_).reshape(len(answers), -1), axis=0)
    return present


def longest_hit(groups: Sequence[GroupLayout], present: Mapping[int, Present], first_token: int, end_token: int) -> int:
    """End of the longest usable prefix, at most `end_token`; `first_token` when there is none.

    Args:
        groups: of the engine.
        present: by index of the group, for its `asked_positions(group, first_token, end_token)`.
        first_token: what is here already, a block's end in each group.
        end_token: `longest_possible` or less.
    """
    step = alignment_tokens(groups)
    ends = np.arange(first_token // step * step + step, end_token + 1, step, dtype=np.int64)
    usable = np.ones(len(ends), dtype=np.bool_)
    for index, group in enumerate(groups):
        usable &= _usable(group, present[index], first_token, ends)
    longest = np.flatnonzero(usable)
    return int(ends[longest[-1]]) if len(longest) else first_token


def _usable(group: GroupLayout, present: Present, first_token: int, ends: npt.NDArray[np.int64]) -> Present:
    """For each end whether the group has all that a load up to there reads."""
    first_position = first_token // group.tokens_per_block
    end_positions = ends // group.tokens_per_block - first_position
    if group.has_recurrent_state:
        start_positions = end_positions - 1
    elif group.window_tokens:
        seen = np.maximum(ends - group.window_tokens, first_token)
        start_positions = seen // group.tokens_per_block - first_position
    else:
        start_positions = np.zeros_like(end_positions)
    missing_before = np.concatenate(([0], np.cumsum(~present)))
    usable: Present = missing_before[end_positions] == missing_before[start_positions]
    return usable
