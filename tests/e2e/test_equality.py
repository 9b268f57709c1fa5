"""Answers of prefill and decode equal those of one plain engine, around every block edge and over many chunks.

User cases R06 and R07. A length that goes wrong shows with its tokens.
"""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, random_prompt

pytestmark = pytest.mark.engine

BLOCK = 32
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 64 * 4
"""tiny-gqa: layers x KV heads x tokens x (K and V) x head size x float32."""
EDGES = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 8 * BLOCK, 8 * BLOCK + 1)
CHUNK_EDGES = (511, 512, 513, 1023, 1024, 1025, 1537, 2900)
LENGTHS = EDGES + CHUNK_EDGES


def test_new_prompts_of_all_lengths_are_answered_right(pair: EnginePair) -> None:
    """Goal: no block or chunk edge is off by one. Method: prompts neither engine has seen."""
    assert {} == pair.wrong_answers(random_prompt("cold", length) for length in LENGTHS)


def test_repeated_prompts_are_answered_right(pair: EnginePair) -> None:
    """Goal: a prompt that both engines have cached, in whole blocks, still gets its tail. Method: each prompt twice."""
    prompts = [random_prompt("again", length) for length in LENGTHS]
    assert {} == pair.wrong_answers(prompts)
    assert {} == pair.wrong_answers(prompts)


@pytest.mark.parametrize("num_primed_blocks", [1, 2, 7])
def test_prompts_with_a_prefix_on_decode_are_answered_right(pair: EnginePair, num_primed_blocks: int) -> None:
    """Goal: only what decode lacks is loaded, and beside its own blocks. Method: decode computes the first blocks itself."""
    prompts = [random_prompt(f"primed {num_primed_blocks}", length) for length in LENGTHS]
    for prompt in prompts:
        pair.decode.submit(prompt[: num_primed_blocks * BLOCK + 1], Sampling(max_tokens=1)).result()
    assert {} == pair.wrong_answers(prompts)


def test_prompts_grown_by_one_token_are_answered_right(pair: EnginePair) -> None:
    """Goal: the tail block of a shorter prompt is never taken for the longer one's. Method: each prompt,
    then it and one more token."""
    prompts = [random_prompt("grown", length) for length in LENGTHS]
    assert {} == pair.wrong_answers(prompts)
    assert {} == pair.wrong_answers((*prompt, 77) for prompt in prompts)


def test_answers_of_one_token_are_right(pair: EnginePair) -> None:
    """Goal: a request that ends with the first token decode samples is served and freed. Method: max_tokens 1."""
    assert {} == pair.wrong_answers((random_prompt("one", length) for length in LENGTHS), Sampling(max_tokens=1))


def test_a_transfer_moves_the_missing_blocks_and_no_more(pair: EnginePair) -> None:
    """Goal: bytes on the wire are those of the blocks decode lacks. Method: count them, new prompts then repeated ones."""
    moved, expected = {}, {}
    for length in LENGTHS:
        prompt = random_prompt("bytes", length)
        moved[length] = [_moved_blocks(pair, prompt), _moved_blocks(pair, prompt)]
        num_cached_blocks = (length - 1) // BLOCK
        expected[length] = [-(-length // BLOCK), -(-length // BLOCK) - num_cached_blocks]
    assert expected == moved


def test_many_prompts_of_many_chunks_at_once_are_answered_right(pair: EnginePair) -> None:
    """Goal: chunked prefills of a mixed load neither mix up blocks nor stand in each other's way.

    Method: 24 prompts of up to seven chunks, half with a common prefix, eight at once, more KV than either engine has.
    """
    common = random_prompt("common prefix", 1024)
    lengths = [513 + 127 * index for index in range(24)]
    prompts = [
        common + random_prompt("many", length)[1024:] if index % 2 and length > 1100 else random_prompt("many", length)
        for index, length in enumerate(lengths)
    ]
    assert {} == pair.wrong_concurrent_answers(prompts, concurrency=8)


def _moved_blocks(pair: EnginePair, prompt: tuple[int, ...]) -> float:
    before = pair.decode.metric("kv_read_bytes_total")
    pair.answer(prompt)
    return (pair.decode.metric("kv_read_bytes_total") - before) / BLOCK_BYTES
