"""Hits: the longest usable prefix, never one block more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.layout.blocks import loaded_positions
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.planner import hits


def group(tokens_per_block: int = 4, window_tokens: int = 0, *, is_state: bool = False) -> GroupLayout:
    return GroupLayout(
        tokens_per_block=tokens_per_block, kernel_blocks_per_block=1, window_tokens=window_tokens, has_recurrent_state=is_state
    )


GROUPS = st.lists(
    st.builds(group, st.sampled_from((1, 2, 3, 4, 6)), st.sampled_from((0, 0, 1, 5, 8)))
    | st.builds(group, st.sampled_from((2, 4, 6)), st.just(0), is_state=st.just(True)),
    min_size=1,
    max_size=3,
)


def usable(groups: list[GroupLayout], present: dict[int, list[bool]], first_token: int, end_token: int) -> bool:
    """The oracle: every block that a load reads, looked up one by one."""
    for index, one in enumerate(groups):
        offset = first_token // one.tokens_per_block
        if end_token % one.tokens_per_block:
            return False
        if not all(present[index][position - offset] for position in loaded_positions(one, first_token, end_token)):
            return False
    return True


@given(GROUPS, st.integers(0, 5), st.integers(0, 60), st.data())
def test_the_hit_is_the_longest_usable_prefix(
    groups: list[GroupLayout], num_local: int, num_tokens: int, data: st.DataObject
) -> None:
    """Goal: no block is wasted, none is read that is not there. Method: random gaps against trying every length."""
    first_token = num_local * hits.alignment_tokens(groups)
    end_token = hits.longest_possible(groups, num_tokens)
    present = {}
    for index, one in enumerate(groups):
        size = len(hits.asked_positions(one, first_token, end_token))
        present[index] = data.draw(st.lists(st.sampled_from((True, True, True, True, False)), min_size=size, max_size=size))
    lengths = [end for end in range(first_token + 1, end_token + 1) if usable(groups, present, first_token, end)]
    found = {index: hits.present_in_all([row]) for index, row in present.items()}

    assert max(lengths, default=first_token) == hits.longest_hit(groups, found, first_token, end_token)


def test_a_block_counts_when_every_shard_has_it() -> None:
    """Goal: half a block is no block. Method: two shards, each lacking another block."""
    present = hits.present_in_all([[True, False, True], [True, True, False]])
    assert [True, False, False] == present.tolist()


def test_a_state_leaves_the_last_token_to_compute() -> None:
    """Goal: a state is never loaded from behind the last token. Method: prompts that end at a block's end and one behind."""
    groups = [group(4), group(8, is_state=True)]
    assert [8, 16] == [hits.longest_possible(groups, num_tokens) for num_tokens in (16, 17)]
    assert [16, 16] == [hits.longest_possible(groups[:1], num_tokens) for num_tokens in (16, 17)]


def test_a_gap_outside_the_window_does_not_matter() -> None:
    """Goal: sliding windows need only what the window sees. Method: the first of four blocks is missing."""
    groups = [group(4, window_tokens=4)]
    present = {0: hits.present_in_all([[False, True, True, True]])}
    assert 16 == hits.longest_hit(groups, present, 0, 16)
