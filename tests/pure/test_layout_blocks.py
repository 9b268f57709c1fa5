"""layout.blocks: tokens, manager blocks and kernel blocks, with prefixes and sliding windows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.layout import blocks
from vllm_mooncake_ascend.layout.plane import GroupLayout


def _group(tokens_per_block: int, *, window_tokens: int = 0, has_recurrent_state: bool = False) -> GroupLayout:
    return GroupLayout(
        tokens_per_block=tokens_per_block,
        kernel_blocks_per_block=1,
        window_tokens=window_tokens,
        has_recurrent_state=has_recurrent_state,
    )


def _touched(tokens: set[int], tokens_per_block: int) -> set[int]:
    return {token // tokens_per_block for token in tokens}


@given(st.integers(0, 40), st.integers(1, 7))
def test_blocks_for_tokens_is_the_number_of_blocks_touched(num_tokens: int, tokens_per_block: int) -> None:
    """Goal: rounding. Method: count the blocks of all tokens one by one."""
    assert len(_touched(set(range(num_tokens)), tokens_per_block)) == blocks.num_blocks_for(num_tokens, tokens_per_block)


@given(st.integers(0, 40), st.integers(1, 7))
def test_whole_block_tokens_stop_at_the_last_full_block(num_tokens: int, tokens_per_block: int) -> None:
    """Goal: only whole blocks are published. Method: the largest multiple by search."""
    expected = max(tokens for tokens in range(num_tokens + 1) if tokens % tokens_per_block == 0)
    assert expected == blocks.whole_block_tokens(num_tokens, tokens_per_block)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 7))
def test_full_attention_loads_every_block_of_the_range(first_token: int, num_tokens: int, tokens_per_block: int) -> None:
    """Goal: what follows a prefix hit, and nothing in front of it. Method: blocks of all tokens one by one."""
    tokens = set(range(first_token, first_token + num_tokens))
    positions = blocks.loaded_positions(_group(tokens_per_block), first_token, first_token + num_tokens)
    assert _touched(tokens, tokens_per_block) == set(positions)


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 7), st.integers(1, 20))
def test_a_window_loads_what_the_next_token_and_the_last_one_again_can_see(
    first_token: int, num_tokens: int, tokens_per_block: int, window_tokens: int
) -> None:
    """Goal: no more than the window needs, and no block filled in part. Method: the tokens seen from the positions `end` and
    `end - 1`, and the blocks they are in."""
    end_token = first_token + num_tokens
    seen = set(range(max(first_token, end_token - window_tokens), end_token))
    positions = blocks.loaded_positions(_group(tokens_per_block, window_tokens=window_tokens), first_token, end_token)
    assert _touched(seen, tokens_per_block) == set(positions)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 20))
def test_vllm_may_drop_exactly_the_blocks_that_the_next_token_cannot_see(
    end_token: int, tokens_per_block: int, window_tokens: int
) -> None:
    """Goal: agree with vLLM on where null blocks are ordinary. Method: tokens seen from position `end`, itself included."""
    group = _group(tokens_per_block, window_tokens=window_tokens)
    seen = _touched(set(range(max(0, end_token - window_tokens + 1), end_token + 1)), tokens_per_block)
    for position in range(end_token // tokens_per_block + 1):
        assert (position < min(seen)) == blocks.may_be_null(group, position, end_token)


def test_a_recurrent_state_loads_its_newest_block_only() -> None:
    """Goal: old states are of no use. Method: 9 tokens in blocks of 4, of which the third is the newest."""
    assert [2] == list(blocks.loaded_positions(_group(4, has_recurrent_state=True), 0, 9))


def test_loaded_block_ids_leave_out_null_blocks() -> None:
    """Goal: the null block is never pinned. Method: a window that has left two of five blocks behind, one not yet nulled."""
    group = _group(2, window_tokens=5)
    assert (3, 4) == blocks.loaded_block_ids(group, 0, 10, (0, 9, 0, 3, 4, 5))


def test_an_empty_range_loads_nothing() -> None:
    """Goal: `n_ext == 0` pins nothing. Method: first token = end token, in the middle of a block."""
    assert () == blocks.loaded_block_ids(_group(4), 6, 6, (1, 2, 3))


def test_a_manager_block_covers_consecutive_kernel_blocks() -> None:
    """Goal: block ids of vLLM reach the kernel's tensor. Method: block 5 of 3 kernel blocks each."""
    group = GroupLayout(tokens_per_block=12, kernel_blocks_per_block=3, window_tokens=0, has_recurrent_state=False)
    assert [15, 16, 17] == list(blocks.kernel_block_ids(group, 5))
    assert 4 == blocks.tokens_per_kernel_block(group)
