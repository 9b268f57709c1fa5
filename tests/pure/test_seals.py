"""Seals of objects: the same for the same bytes under the same key, however they lie in memory; another for anything else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.engines.sealed_store import seal_of
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.testing.memory import Bytes, address_of

VALUES = st.binary(min_size=1, max_size=200)


def seal(key: str, value: Bytes, cuts: list[int]) -> int:
    """Of one object whose bytes lie in so many buffers."""
    edges = sorted({0, len(value), *(cut % len(value) for cut in cuts)})
    addresses = address_of(value) + np.array([edges[:-1]], dtype=np.int64)
    return seal_of(key, StoreBatch(addresses=addresses, lengths_bytes=np.diff(edges)), 0)


@given(VALUES, st.lists(st.integers(0, 200), max_size=4))
def test_a_seal_does_not_depend_on_how_bytes_are_cut(value: bytes, cuts: list[int]) -> None:
    """Goal: who gets into other buffers than it was put from finds the same seal. Method: any value, any cuts."""
    array = np.frombuffer(value, dtype=np.uint8)
    assert seal("k", array, []) == seal("k", array, cuts)


@given(VALUES, st.integers(0, 199), st.binary(min_size=1, max_size=64))
def test_a_seal_tells_bytes_that_were_written_over(value: bytes, start: int, late: bytes) -> None:
    """Goal: no late write goes unseen. Method: any value, and any bytes written over a part of it that differs."""
    start %= len(value)
    torn = (value[:start] + late)[: len(value)] + value[start + len(late) :]
    before, after = (np.frombuffer(one, dtype=np.uint8) for one in (value, torn))
    assert (value == torn) == (seal("k", before, []) == seal("k", after, []))


def test_a_seal_is_of_its_key_and_never_that_of_empty_memory() -> None:
    """Goal: neither another whole object nor memory nobody wrote to passes. Method: zeros under two keys."""
    zeros = np.zeros(64, dtype=np.uint8)
    assert 0 != seal("one", zeros, []) != seal("other", zeros, []) != 0


@given(st.permutations(range(6)), st.integers(1, 5), st.integers(0, 7))
def test_a_seal_is_that_of_the_joined_bytes(order: list[int], num_words: int, shift: int) -> None:
    """Goal: buffers of equal length and distance, up or down, and all others are summed alike. Method: six buffers of a grid,
    in any order and at any alignment, against one copy of their bytes."""
    memory = np.random.default_rng(num_words).integers(0, 256, size=6 * 64 + shift, dtype=np.uint8)
    starts = np.array(order, dtype=np.int64) * 64 + shift
    batch = StoreBatch(addresses=address_of(memory) + starts[None, :], lengths_bytes=np.full(6, 8 * num_words, dtype=np.int64))
    joined = np.concatenate([memory[start : start + 8 * num_words] for start in starts])
    assert seal("k", joined, []) == seal_of("k", batch, 0)
