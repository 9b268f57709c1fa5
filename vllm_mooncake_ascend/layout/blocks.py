"""Tokens <-> blocks: plain integer arithmetic on manager blocks (vLLM's block ids) and kernel blocks.

A block table lists a request's block ids from prompt token 0 on; position p holds tokens [p * n, (p + 1) * n). Block id 0
is vLLM's null block: a place holder for positions that nobody needs, never memory of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane

NULL_BLOCK = 0


def num_blocks_for(num_tokens: int, tokens_per_block: int) -> int:
    """Blocks that hold `num_tokens`, the last one possibly in part."""
    return -(-num_tokens // tokens_per_block)


def whole_block_tokens(num_tokens: int, tokens_per_block: int) -> int:
    """The most tokens not above `num_tokens` that end at a block's end."""
    return num_tokens // tokens_per_block * tokens_per_block


def tokens_of_whole_blocks(num_tokens: int, groups: Sequence[GroupLayout]) -> int:
    """The most tokens not above `num_tokens` that end at a block's end in every group."""
    return whole_block_tokens(num_tokens, lcm(*(group.tokens_per_block for group in groups)))


def tokens_per_kernel_block(group: GroupLayout) -> int:
    """Tokens of one kernel block."""
    return group.tokens_per_block // group.kernel_blocks_per_block


def tokens_per_row(group: GroupLayout, plane: Plane) -> int:
    """Tokens that one row of `plane` covers; 1 where a token's bytes stand alone."""
    return tokens_per_kernel_block(group) // plane.tokens_per_block


def kernel_block_ids(group: GroupLayout, block_id: int) -> range:
    """Kernel blocks that the manager block `block_id` covers."""
    return range(block_id * group.kernel_blocks_per_block, (block_id + 1) * group.kernel_blocks_per_block)


def window_start(group: GroupLayout, first_token: int, end_token: int) -> int:
    """First token that a read of [first_token, end_token) must bring, once the sliding window is taken into account.

    Whole blocks, because vLLM offers a loaded block to later requests as a prefix, and a block filled in part would be
    wrong there. The window reaches back to token `end_token - window_tokens`: that is what the last token sees when vLLM
    computes it again after a complete hit.
    """
    if group.window_tokens == 0:
        return first_token
    seen_token = max(0, end_token - group.window_tokens)
    return max(first_token, whole_block_tokens(seen_token, group.tokens_per_block))


def may_be_null(group: GroupLayout, position: int, end_token: int) -> bool:
    """Whether vLLM may have a null block at `position` when it holds tokens up to `end_token`.

    Source: vLLM 0.32 `SlidingWindowManager.get_num_skipped_tokens`: computed tokens - window + 1.
    """
    return group.window_tokens > 0 and (position + 1) * group.tokens_per_block <= end_token - group.window_tokens + 1


def loaded_positions(group: GroupLayout, first_token: int, end_token: int) -> range:
    """Positions of the block table that a read of tokens [first_token, end_token) writes to, window taken into account."""
    if first_token >= end_token:
        return range(0)
    last_position = num_blocks_for(end_token, group.tokens_per_block) - 1
    if group.has_recurrent_state:
        return range(last_position, last_position + 1)
    return range(window_start(group, first_token, end_token) // group.tokens_per_block, last_position + 1)


def tables_between(
    groups: Sequence[GroupLayout], first_token: int, end_token: int, tables: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Of one block table a group, the blocks that hold tokens [first_token, end_token); no tables of no tokens."""
    if first_token == end_token:
        return ()
    return tuple(
        tuple(table[first_token // group.tokens_per_block : num_blocks_for(end_token, group.tokens_per_block)])
        for group, table in zip(groups, tables, strict=True)
    )


def loaded_block_ids(group: GroupLayout, first_token: int, end_token: int, block_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids of the blocks that a read of tokens [first_token, end_token) may write to: what must be pinned meanwhile."""
    positions = loaded_positions(group, first_token, end_token)
    return tuple(block_id for block_id in block_ids[positions.start : positions.stop] if block_id != NULL_BLOCK)
