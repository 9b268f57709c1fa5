"""Whether decode really read the KV of the prompts it was asked for, from its own metrics. Decides; reads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from vllm_mooncake_ascend.metrics.names import PREFIX
from vllm_mooncake_ascend.p2p import counters

TOKENS = "vllm:external_prefix_cache_hits_total"
"""vLLM's own count, for whatever connector."""
LOADS_DONE = PREFIX + counters.LOADS_DONE
BYTES_READ = PREFIX + counters.READ_BYTES


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """What was to come, and what came."""

    expected_tokens: int
    """In whole blocks; the last token of a prompt is decode's to compute."""
    tokens: float
    missing: str
    """What shows that something did not come; empty: all came."""


def moved_of(remote_tokens: Sequence[int], metrics: Mapping[str, float], *, block_size: int, block_bytes: int | None) -> Moved:
    """For prompts of these many tokens.

    Args:
        metrics: of decode, which has read nothing before these.
        block_bytes: of one block over all layers, for a connector with our counters; None for others.
    """
    num_blocks = sum((tokens - 1) // block_size for tokens in remote_tokens)
    wanted = {TOKENS: num_blocks * block_size}
    if block_bytes is not None:
        wanted |= {LOADS_DONE: len(remote_tokens), BYTES_READ: num_blocks * block_bytes}
    missing = [
        f"{name} is {metrics.get(name, 0):,.0f} of {count:,}" for name, count in wanted.items() if metrics.get(name, 0) < count
    ]
    return Moved(expected_tokens=num_blocks * block_size, tokens=metrics.get(TOKENS, 0.0), missing="; ".join(missing))
