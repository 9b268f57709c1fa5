"""The part of docs/protocol.md about the prefix pool: prose, what crosses processes, and the laws of the pool's machines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_mooncake_ascend.law import Law
from vllm_mooncake_ascend.pool.breaker import BREAKER_LAW
from vllm_mooncake_ascend.pool.fence import FENCE_LAW
from vllm_mooncake_ascend.pool.gets import GET_LAW
from vllm_mooncake_ascend.pool.loads import LOAD_LAW
from vllm_mooncake_ascend.pool.lookups import LOOKUP_LAW
from vllm_mooncake_ascend.pool.puts import PUT_LAW
from vllm_mooncake_ascend.pool.saves import SAVE_LAW
from vllm_mooncake_ascend.wire import pool_steps

BOUNDS = (
    "OBJECT_LEASE_S",
    "LOOKUP_WAIT_S",
    "LOOKUP_OVERDUE_S",
    "MAX_LOOKUPS_AT_ONCE",
    "MAX_QUEUED_LOOKUPS",
    "MAX_LOOKUPS_PER_REQUEST",
    "MIN_HIT_TOKENS",
    "LOAD_WAIT_S",
    "MAX_LOADS",
    "MAX_GETS_AT_ONCE",
    "STORE_CALL_S",
    "FENCE_RETRY_MIN_S",
    "FENCE_RETRY_MAX_S",
    "LOAD_END_S",
    "SAVE_WAIT_S",
    "MAX_QUEUED_SAVE_BLOCKS",
    "MAX_SAVED_RATIO",
    "FULL_RETRY_S",
    "FULL_PAUSE_MIN_S",
    "FULL_PAUSE_MAX_S",
    "KNOWN_STORED_S",
    "MAX_KNOWN_STORED",
    "STORE_PROBE_S",
    "PROBES_TO_CLOSE",
    "MAX_LOOKUP_KEYS",
)

LAWS: tuple[tuple[str, Law[Any, Any]], ...] = (
    ("A lookup at the scheduler", LOOKUP_LAW),
    ("A load at the scheduler", LOAD_LAW),
    ("A save at the scheduler", SAVE_LAW),
    ("A load at a worker", GET_LAW),
    ("A save at a worker", PUT_LAW),
    ("The fence of a worker", FENCE_LAW),
    ("A breaker, of the scheduler and of each worker", BREAKER_LAW),
)

_PASSED = (
    (pool_steps.PoolStep, "scheduler to workers, with a step's metadata"),
    (pool_steps.LoadOrder, "in a step"),
    (pool_steps.SaveOrder, "in a step"),
    (pool_steps.GroupBlocks, "in an order"),
    (pool_steps.PoolResults, "workers to scheduler, with a step's output"),
    (pool_steps.LoadEnded, "in results"),
    (pool_steps.SaveEnded, "in results"),
)

_PROSE = """
# Protocol of the prefix pool

How an engine finds, loads and saves blocks of prompts in Mooncake Store. No engine speaks with another: whatever two of them
share is the store's objects, one a block, KV cache group and shard, under keys `namespace/group/shard/block hash`.

## Who does what

Two machines, without I/O, in `vllm_mooncake_ascend/pool`, of parts with a table each (below):

* **PoolScheduler**, one in the scheduler of each engine (data-parallel rank). It asks what is in the pool, orders loads and
  saves from all workers, pins their blocks, and tells vLLM the result of each load once.
* **PoolWorker**, one in each worker. It gets and puts its own shards through the store, call by call, and never lets an
  order go without its end.

They share nothing but what vLLM carries between scheduler and workers with each step:

| what | goes | says |
|---|---|---|
"""

_COURSE = """
Loads and saves have numbers of their own, because request ids come again. Every rank ends every order exactly once.

## The course of a load

1. A request arrives: one batch lookup starts at once, on a thread of its own, for what lies beyond the local cache.
2. vLLM asks. It is held back for at most LOOKUP_WAIT_S, counted from its first question; then, and whenever the store does not
   answer, the request counts as a miss. The answer is kept until the request is admitted, but not longer than the master's
   object lease makes it true; then it is asked for anew.
3. vLLM allocates. The blocks that will be written to are pinned, and every rank is told to get its shards. Loads take turns
   call by call, so that none waits behind the whole of another.
4. Every rank has every byte of every key: vLLM hears that the receive is done. Anything less: the request computes, and is not
   sent to the pool again.

## The course of a save

1. A step's output has come back: the whole blocks that it completed are pinned and every rank is told to put its shards,
   unless this engine believes them to be in the pool, or another save of it has them.
2. Saves are put one after the other in the order they came. The first key that was not taken ends its save and what follows it
   in the same prompt, which no prefix would reach.
3. Every rank has ended it: unpinned. If all took every key, the engine believes for KNOWN_STORED_S that the blocks are in the
   pool, and KV events say so, until a get misses one, the store is lost, or the cache is reset.

## What makes bytes right

* **The namespace** is a digest of everything that changes bytes or hashes. A hash seed that others cannot know is refused at
  start. `reset_cache` moves the engine to a namespace of its own.
* **The block hash** covers the whole prefix, adapter, salt and images included.
* **The byte count**: a key whose value has another length than this engine's objects never counts as come.
* **The seal**: where KV memory is the host's, a sum of an object's bytes and its key stands behind it, and a get whose bytes
  do not fit it fails (-801); the object is taken out of the pool. For a put that has failed may go on writing, into memory that
  the master has given to others.
* **Generations**: progress of a life that is over (preemption, reset, another request of the same id) is not saved.

## What makes blocks safe

* A get whose outcome is unknown may write at any later time, so no waiting ends it. The worker starts no get and no save until
  a *fence* has closed the client behind which it hangs; only then the load ends, and its blocks are unpinned.
* Where vLLM gives a failed request other blocks (0.30 and later) the failure is reported at once; before, the report waits for
  the ranks.
* A put whose outcome is unknown may still read: its blocks stay pinned for QUARANTINE_S. Where objects have seals,
  what it reads and sends later than that harms nobody.
* A rank that never ends its order keeps its blocks.

## When it fails

| what | the engine does |
|---|---|
| the master does not answer | one sign opens the breaker: no call is made until the client has been healthy several times |
| a lookup is late | computes; the answer is dropped when it comes |
| a key is gone, or its get failed | computes; what was gone is saved again |
| a load takes longer than LOAD_WAIT_S | starts no further call of it, and computes |
| the store is full | tries once more a moment later, then drops saves for a while, longer each time |
| the queue of saves is full | drops the oldest |
| saves hold MAX_SAVED_RATIO of the blocks | leaves the rest of that prompt out |
| the request is aborted or preempted | cancels its load, which still ends everywhere; its saves go on from their pins |

`tests/pure` says for each machine: given these events, exactly these actions. `make sim` runs both in simulated worlds with a
store that is slow, full, dead, loses keys and lets bytes land late; `testing/pool_simulator/bugs.py` lists the mistakes that
those worlds must find.
"""


def prose() -> str:
    """All but the tables of bounds and states."""
    return _PROSE + "\n".join(_passed()) + "\n" + _COURSE


def _passed() -> Iterator[str]:
    for struct, way in _PASSED:
        yield f"| `{struct.__name__}` | {way} | {(struct.__doc__ or '').partition('. ')[0].splitlines()[0].rstrip('.')} |"
