"""Names of what the pool's machines count, and the bounded reasons they count by. `metrics` gives them their help texts.

A reason is a label: it comes from the constants here, never from a message or a client.
"""

from __future__ import annotations

# --- lookups -------------------------------------------------------------------------------------------------------------
LOOKUPS_ENDED = "pool_lookups_total"
"""Wishes for a look into the pool, by reason: `hit`, `miss`, or why there was none."""
LOOKUPS_TOO_LATE = "pool_lookup_answers_too_late_total"
"""Answers that came when nobody waited for them any more."""
HIT_TOKENS = "pool_hit_tokens_total"
"""Tokens whose load from the pool was ordered."""

# --- loads ---------------------------------------------------------------------------------------------------------------
LOADS_ENDED = "pool_loads_total"
"""Loads of requests, by reason: `done`, or why they failed."""
LOADS_ABORTED = "pool_loads_aborted_total"
LOADS_OVERDUE = "pool_loads_overdue_total"
"""Loads that a worker did not end within every bound it has."""
LOADED_TOKENS = "pool_loaded_tokens_total"
QUARANTINES = "pool_quarantines_total"
"""Gets and saves of unknown outcome, by reason: `get` or `put`. The blocks of a get stay out of circulation until its worker
has fenced the store, those of a save for a while."""

# --- saves ---------------------------------------------------------------------------------------------------------------
SAVES_ORDERED = "pool_saves_ordered_total"
SAVES_ENDED = "pool_saves_total"
"""Saves of chunks, by reason: `done`, or why they are not in the pool."""
BLOCKS_SHARED = "pool_save_blocks_skipped_total"
"""Blocks not saved because another save of this engine has them."""
STALE_PROGRESS = "pool_stale_progress_total"
"""Progress of a step that a preemption or a reset has made void."""

# --- store calls -----------------------------------------------------------------------------------------------------------
GETS_ENDED = "pool_gets_total"
"""Keys got, by outcome."""
PUTS_ENDED = "pool_puts_total"
"""Keys put, by outcome."""
GETS_MISSING = "pool_get_keys_missing_total"
"""Keys that were gone when they were got: evicted after the lookup, or lost with their owner."""
GET_BYTES = "pool_get_bytes_total"
PUT_BYTES = "pool_put_bytes_total"
FENCES = "pool_fences_total"
"""Fences of the store after gets of unknown outcome, by reason: `fenced` or `not_fenced`."""
PUTS_REPEATED = "pool_puts_repeated_total"
"""Puts tried once more because the store was full for a moment."""

# --- all -------------------------------------------------------------------------------------------------------------------
BREAKER_OPENED = "pool_breaker_opened_total"
BREAKER_CLOSED = "pool_breaker_closed_total"
EVENTS_IGNORED = "pool_events_ignored_total"
"""Events that say nothing (any more)."""

# --- reasons ---------------------------------------------------------------------------------------------------------------
NO_REASON = ""
HIT = "hit"
MISS = "miss"
DONE = "done"
NOTHING_TO_ASK = "nothing_to_ask"
"""The local cache has it all, or the prompt is too short."""
STORE_LOST = "store_lost"
"""The breaker is open, or a call found the store dead."""
TOO_LATE = "too_late"
TOO_MANY = "too_many"
FAILED = "failed"
MISSING = "missing"
"""All that did not come was not in the pool any more."""
CHANGED_MEANWHILE = "changed_meanwhile"
"""vLLM allocated what was not offered, or no longer."""
UNKNOWN = "unknown"
REFUSED = "refused"
STOPPED = "stopped"
"""Cancelled by the scheduler: aborted, reset, or too slow for it."""
FULL = "full"
DROPPED = "dropped"
"""The oldest of a full queue."""
GAP = "gap"
"""A save before it in the same prompt failed."""
CAPACITY = "capacity"
"""Saves hold as many blocks as they may."""
FENCED = "fenced"
NOT_FENCED = "not_fenced"
GET = "get"
PUT = "put"
