"""SealedStore: a store whose gets are DONE only with the bytes that were put under their key.

A put that fails may go on writing: over TCP what it had queued lands whenever the owner of the memory goes on, and the master
gives that memory to other objects as soon as the put has failed. A master that was started anew does the same to puts under
way. Mooncake (0.3.13) has no way to take a write back, so bytes are looked at when they come: behind each object stands a seal,
the sum of its bytes as 64-bit words, plus a digest of its key, so that a whole object that was written over another does not
pass for it. (59 to 100 of 256 objects had wrong bytes after such a put; with the putting client closed first 1 of 768 still.)

A seal finds what was written over an object by accident, not what somebody forges, nor words of one object that changed places.
It costs about a sixth of a get over TCP; Mooncake's own checksum makes one take four times as long.

Memory is read by this process, so it must be the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines import store_codes
from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore, StoreAnswer, StoreHealth, StoreKey
from vllm_mooncake_ascend.engines.register import MemoryRegister
from vllm_mooncake_ascend.engines.store_refusal import data_refusal
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import Addresses
from vllm_mooncake_ascend.planner.store_batch import SEAL_BYTES, StoreBatch

_MAX_KEYS = limits.MAX_CALL_DESCRIPTORS // 2
"""A key of a call with several has a buffer and a seal at least."""
_WORD = np.dtype("<u8")
_WORD_BYTES = _WORD.itemsize
_WORDS = 1 << 64

Words = npt.NDArray[np.uint64]


class SealedStore:
    """The store behind it, for which the same rules hold. Objects of stores without seals have other lengths."""

    def __init__(self, store: KVStore) -> None:
        """Registers memory of its own for the seals of `limits.MAX_SEALED_CALLS` calls at once; more wait for one to end."""
        self._store = store
        self._lock = threading.Lock()
        self._register = MemoryRegister(alignment_bytes=1)
        self._seals: Words = np.zeros((limits.MAX_SEALED_CALLS, _MAX_KEYS), dtype=np.uint64)
        self._free_rows: queue.SimpleQueue[int] = queue.SimpleQueue()
        for row in range(limits.MAX_SEALED_CALLS):
            self._free_rows.put(row)
        store.register([Region(base_address=self._seals.ctypes.data, length_bytes=self._seals.nbytes)])

    def connect(self) -> None:
        self._store.connect()

    def register(self, regions: Sequence[Region]) -> None:
        self._store.register(regions)
        with self._lock:
            self._register.add(self._register.missing(regions))

    def put(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        refusal = self._refusal(keys, batch)
        if refusal is not None:
            return refusal
        with self._row() as (seals, addresses):
            seals[: len(keys)] = [seal_of(key, batch, index) for index, key in enumerate(keys)]
            return self._store.put(keys, batch.with_seals(addresses[: len(keys)]))

    def get(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        refusal = self._refusal(keys, batch)
        if refusal is not None:
            return refusal
        with self._row() as (seals, addresses):
            answer = self._store.get(keys, batch.with_seals(addresses[: len(keys)]))
            found = seals[: len(keys)].tolist()
        results = list(answer.results)
        for index, key in enumerate(keys):
            if results[index].outcome is KeyOutcome.DONE and seal_of(key, batch, index) != found[index]:
                results[index] = store_codes.broken_result()
        return StoreAnswer(results=tuple(results), is_lost=answer.is_lost)

    def exists(self, keys: Sequence[StoreKey]) -> StoreAnswer:
        return self._store.exists(keys)

    def remove(self, keys: Sequence[StoreKey], *, prefix: str, even_in_use: bool = False) -> StoreAnswer:
        return self._store.remove(keys, prefix=prefix, even_in_use=even_in_use)

    def health(self) -> StoreHealth:
        return self._store.health()

    def fence(self) -> bool:
        return self._store.fence()

    def close(self) -> bool:
        return self._store.close()

    def _refusal(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer | None:
        """Before any memory is read: what the store behind would refuse, too."""
        with self._lock:
            reason = data_refusal(keys, batch, self._register)
        if reason is None and len(keys) > _MAX_KEYS:
            reason = f"{len(keys)} keys in one call, the limit is {_MAX_KEYS}"
        if reason is None:
            return None
        return StoreAnswer(results=(store_codes.refused(reason),) * len(keys), is_lost=False)

    @contextlib.contextmanager
    def _row(self) -> Iterator[tuple[Words, Addresses]]:
        """Seals of one call, and where they are. A row that a call of unknown outcome still uses may be had: what comes late
        makes a seal that does not fit."""
        row = self._free_rows.get()
        try:
            seals = self._seals[row]
            yield seals, seals.ctypes.data + np.arange(_MAX_KEYS, dtype=np.int64) * SEAL_BYTES
        finally:
            self._free_rows.put(row)


def seal_of(key: StoreKey, batch: StoreBatch, index: int) -> int:
    """The seal of one key's bytes, which are in the host's memory; the same however they are cut into buffers."""
    digest = hashlib.blake2b(key.encode(), digest_size=SEAL_BYTES).digest()
    return (_sum_of_words(batch, index) + int.from_bytes(digest, "little")) % _WORDS


def _sum_of_words(batch: StoreBatch, index: int) -> int:
    starts, lengths = batch.addresses[index].tolist(), batch.lengths_bytes.tolist()
    if any(length % _WORD_BYTES for length in lengths):
        value = b"".join(ctypes.string_at(start, length) for start, length in zip(starts, lengths, strict=True))
        value += bytes(-len(value) % _WORD_BYTES)
        return int(np.add.reduce(np.frombuffer(value, dtype=_WORD)))
    return sum(int(np.add.reduce(words, axis=None)) for words in _words_of(starts, lengths))


def _words_of(starts: list[int], lengths: list[int]) -> Iterator[Words]:
    """The buffers, those of equal length and distance as the rows of one array, as layers mostly lie. Each sum gives up the
    GIL, and to get it back may take longer than the sum."""
    first = 0
    while first < len(starts):
        length = lengths[first]
        step = starts[first + 1] - starts[first] if first + 1 < len(starts) else length
        end = first + 1
        while end < len(starts) and lengths[end] == length and starts[end] - starts[end - 1] == step:
            end += 1
        lowest, highest = sorted((starts[first], starts[end - 1]))
        memory = memoryview((ctypes.c_char * (highest - lowest + length)).from_address(lowest))
        shape, strides = (end - first, length // _WORD_BYTES), (step, _WORD_BYTES)
        yield np.ndarray(shape, _WORD, memory, starts[first] - lowest, strides)
        first = end
