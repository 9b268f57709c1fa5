"""What one engine has computed another one loads from the pool, and answers as if it had it from its own cache.

User case R10, and pain rows H6, W10, W18.
"""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pool import LOADS_DONE, PUT_BYTES, PoolEngines, results
from vllm_mooncake_ascend.testing.engine_prompts import random_prompt

pytestmark = pytest.mark.engine

BLOCK = 32
EDGES = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 8 * BLOCK, 8 * BLOCK + 1)
CHUNK_EDGES = (511, 512, 513, 1023, 1024, 1025, 2900)
LENGTHS = EDGES + CHUNK_EDGES
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 64 * 4
"""tiny-gqa: layers x KV heads x tokens x (K and V) x head size x float32."""


def whole_blocks(num_tokens: int) -> int:
    """Tokens of whole blocks: what can be in the pool of a prompt. vLLM counts all of them as cached, though it computes a
    prompt's last token itself to have something to sample from."""
    return num_tokens // BLOCK * BLOCK


def test_a_pool_hit_equals_a_local_hit(pool: PoolEngines) -> None:
    """Goal: no block or chunk edge is off by one, and no rounding comes of the way through the pool. Method: one engine
    computes; the other loads, and is asked again when it has the prompt in its own cache: the same tokens, the same log
    probabilities."""
    prompts = [random_prompt("pool hit", length) for length in LENGTHS]
    for prompt in prompts:
        pool.compute(pool.first, prompt)

    by_pool, by_local = [], []
    for prompt in prompts:
        by_pool.append(pool.second.submit(prompt).result())
        by_local.append(pool.second.submit(prompt).result())

    assert [answer.text for answer in by_local] == [answer.text for answer in by_pool]
    assert {} == pool.wrong({prompt: answer.text for prompt, answer in zip(prompts, by_pool, strict=True)})
    assert [whole_blocks(length) for length in LENGTHS] == [answer.num_cached_tokens for answer in by_pool]
    assert [whole_blocks(length - 1) for length in LENGTHS] == [answer.num_cached_tokens for answer in by_local]


def test_the_answer_comes_from_the_bytes_in_the_pool(pool: PoolEngines) -> None:
    """Goal: a hit is what the pool holds, not what the engine computed after all. Method: spoil the blocks of the one engine
    after they were computed and before they are saved, which its next step does; the other engine's answer must be wrong."""
    prompt = random_prompt("spoiled", 500)
    pool.first.hold()
    running = pool.first.submit(prompt)
    while not (computed := pool.first.state().held_block_ids):
        pool.first.step()  # The first ones may only wait for the lookup.
    pool.first.poison(computed)
    pool.first.release()
    running.result()
    pool.drain(pool.first)

    spoiled = pool.second.submit(prompt).result()

    assert 480 == spoiled.num_cached_tokens
    assert pool.expected(prompt) != spoiled.text


def test_many_hits_at_once_are_answered_right(pool: PoolEngines) -> None:
    """Goal: loads that run at the same time, some of the same blocks, do not mix up. Method: 16 prompts of up to five chunks,
    half with a common prefix, all at once; more KV than the engine has blocks for."""
    common = random_prompt("common prefix", 1024)
    lengths = [300 + 127 * index for index in range(16)]
    prompts = [
        common + random_prompt("many", length)[1024:] if index % 2 and length > 1100 else random_prompt("many", length)
        for index, length in enumerate(lengths)
    ]
    for prompt in prompts:
        pool.compute(pool.first, prompt)
    pool.take_count(pool.second, LOADS_DONE)

    texts = results({prompt: pool.second.submit(prompt) for prompt in prompts})

    assert {} == pool.wrong(texts)
    assert len(prompts) <= pool.take_count(pool.second, LOADS_DONE)


def test_a_prompt_that_leaves_a_saved_one_is_loaded_as_far_as_it_goes(pool: PoolEngines) -> None:
    """Goal: a hit is the longest prefix, also behind what the engine has itself. Method: the other engine saved ten blocks;
    this one has three of them in its cache, and a prompt that leaves the saved one in its ninth block."""
    saved = random_prompt("leaving", 10 * BLOCK + 5)
    prompt = saved[: 8 * BLOCK + 7] + random_prompt("left", 100)
    pool.compute(pool.first, saved)
    pool.compute(pool.second, prompt[: 3 * BLOCK + 1])

    answer = pool.second.submit(prompt).result()

    assert pool.expected(prompt) == answer.text
    assert 8 * BLOCK == answer.num_cached_tokens


def test_the_turns_of_a_chat_go_from_engine_to_engine(pool: PoolEngines) -> None:
    """Goal: a conversation has its past wherever its next turn is served. Method: six turns, each on the other engine, each
    the one before, its answer and something new. The second engine saves what it generates, the first one does not."""
    sampling = Sampling(max_tokens=70)
    prompt = random_prompt("chat", 150)
    expected_hit, right, hits = [0], [], []
    for turn in range(6):
        engine = pool.engines[(turn + 1) % 2]
        answer = pool.compute(engine, prompt, sampling)
        right.append(pool.expected(prompt, sampling) == answer.text)
        hits.append(answer.num_cached_tokens)
        num_saved = len(prompt) + (len(answer.text.token_ids) - 1 if engine is pool.second else 0)
        expected_hit.append(whole_blocks(num_saved))
        prompt = (*prompt, *answer.text.token_ids, *random_prompt(f"turn {turn}", 45))

    assert [True] * 6 == right
    assert expected_hit[:-1] == hits


def test_what_is_stored_already_is_not_put_again_and_holds_nothing(pool: PoolEngines) -> None:
    """Goal: of prompts that are in the pool no block stays pinned and no byte moves to it. Method: one engine computes eight
    prompts, loads them after it has lost its own cache, and so does the other one, all at once; then all are local hits."""
    prompts = [random_prompt(f"stored {index}", 769) for index in range(8)]
    for prompt in prompts:
        pool.compute(pool.first, prompt)
    free = [engine.state().num_free_blocks for engine in pool.engines]
    pool.forget(pool.first)
    for engine in pool.engines:
        pool.take_count(engine, PUT_BYTES)
        pool.take_count(engine, LOADS_DONE)

    for engine in pool.engines:
        for _ in range(2):
            requests = [engine.submit(prompt) for prompt in prompts]
            answers = [running.result() for running in requests]
            assert {} == pool.wrong({prompt: answer.text for prompt, answer in zip(prompts, answers, strict=True)})
            assert [768] * 8 == [answer.num_cached_tokens for answer in answers]
            pool.drain(engine)

    assert [8, 8] == [pool.take_count(engine, LOADS_DONE) for engine in pool.engines]
    assert [0, 0] == [pool.take_count(engine, PUT_BYTES) for engine in pool.engines]
    assert free == [engine.state().num_free_blocks for engine in pool.engines]


def test_two_engines_that_save_the_same_at_once_hold_nothing(pool: PoolEngines) -> None:
    """Goal: puts of keys that another engine has put, or is putting, end like all others (H6). Method: both engines are
    given the same prompts while they are held, so that both find nothing and both save; then one loads what came of it."""
    prompts = [random_prompt(f"twice {index}", 410) for index in range(4)]
    for engine in pool.engines:
        pool.take_count(engine, PUT_BYTES)
        engine.hold()
    requests = [{prompt: engine.submit(prompt) for prompt in prompts} for engine in pool.engines]
    for engine in pool.engines:
        engine.release()
    assert [{}, {}] == [pool.wrong(results(found)) for found in requests]
    for engine in pool.engines:
        pool.drain(engine)
    num_blocks = [len(prompts) * (num_tokens // BLOCK) for num_tokens in (410, 410 + 7)]
    assert num_blocks == [pool.take_count(engine, PUT_BYTES) / BLOCK_BYTES for engine in pool.engines]

    pool.forget(pool.second)
    answers = {prompt: pool.second.submit(prompt).result() for prompt in prompts}

    assert {} == pool.wrong({prompt: answer.text for prompt, answer in answers.items()})
    assert [whole_blocks(410)] * 4 == [answer.num_cached_tokens for answer in answers.values()]


def test_requests_of_different_salts_share_nothing(pool: PoolEngines) -> None:
    """Goal: a salt keeps a tenant's prompts to itself in the pool as in the local cache. Method: one engine computes with a
    salt; the other is asked without one, with another one, and with the same."""
    prompt = random_prompt("salted", 500)
    pool.compute(pool.first, prompt, cache_salt="ours")

    hits = {salt: pool.compute(pool.second, prompt, cache_salt=salt).num_cached_tokens for salt in ("", "theirs", "ours")}

    assert {"": 0, "theirs": 0, "ours": whole_blocks(500)} == hits


def test_what_an_engine_saved_into_memory_of_another_outlives_it(pool: PoolEngines) -> None:
    """Goal: a restarted engine finds what it had computed. Method: kill the engine that lends no memory; after its restart it
    loads, and answers the same."""
    prompts = [random_prompt("outlives", length) for length in (65, 512, 1500)]
    before = [pool.compute(pool.second, prompt).text for prompt in prompts]
    pool.second.kill()
    pool.revive()

    answers = [pool.second.submit(prompt).result() for prompt in prompts]

    assert before == [answer.text for answer in answers]
    assert [whole_blocks(len(prompt)) for prompt in prompts] == [answer.num_cached_tokens for answer in answers]
