"""What the demo's second part found out: values, the verdict and the table. No process, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table

from vllm_mooncake_ascend.cli.demo_client import Answer
from vllm_mooncake_ascend.cli.demo_prompts import Scenario
from vllm_mooncake_ascend.metrics.names import POOL_GET_DURATION, PREFIX
from vllm_mooncake_ascend.pool import counters

TOKENS_LOADED = PREFIX + counters.LOADED_TOKENS
BYTES_GOT = PREFIX + counters.GET_BYTES
SECONDS_GETTING = PREFIX + POOL_GET_DURATION + "_sum"


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine loaded from the pool between two looks at its metrics."""

    num_tokens: int
    num_bytes: int
    seconds: float
    """Of the store's get calls."""

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Loaded:
        """The growth of the counters."""

        def growth(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        return cls(num_tokens=round(growth(TOKENS_LOADED)), num_bytes=round(growth(BYTES_GOT)), seconds=growth(SECONDS_GETTING))


class PoolRow(msgspec.Struct, frozen=True, kw_only=True):
    """The last turn of one scenario, three ways."""

    name: str
    prompt_tokens: int
    hit_tokens: int
    """Loaded from the pool."""
    answer: str
    equal: bool
    """All three ways say the same."""
    ttft_cold_seconds: float
    ttft_local_hit_seconds: float
    ttft_pool_hit_seconds: float
    get_seconds: float
    bytes: int
    """Got from the pool."""
    bytes_put: int
    """Put into the pool by the turns before."""

    @property
    def ok(self) -> bool:
        """It shows what it is to show."""
        return self.equal and self.hit_tokens > 0 and self.bytes > 0


def row_of(scenario: Scenario, cold: Answer, local_hit: Answer, pool_hit: Answer, loaded: Loaded, *, bytes_put: int) -> PoolRow:
    """The three answers to one prompt beside each other."""
    return PoolRow(
        name=scenario.name,
        prompt_tokens=pool_hit.prompt_tokens,
        hit_tokens=loaded.num_tokens,
        answer=pool_hit.text,
        equal=pool_hit.same_as(cold) and local_hit.same_as(cold),
        ttft_cold_seconds=cold.ttft_seconds,
        ttft_local_hit_seconds=local_hit.ttft_seconds,
        ttft_pool_hit_seconds=pool_hit.ttft_seconds,
        get_seconds=loaded.seconds,
        bytes=loaded.num_bytes,
        bytes_put=bytes_put,
    )


def table_of(rows: Sequence[PoolRow]) -> Table:
    """The second part for people."""
    table = Table(title="prefixes shared through the pool: the last turn of each chat, three ways", show_lines=False)
    table.add_column("chat", no_wrap=True)
    table.add_column("equal", justify="center")
    for heading in ("tokens", "hit tokens", "MB put", "MB got", "get ms", "TTFT cold s", "local hit s", "pool hit s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            "[green]yes[/green]" if row.equal else "[bold red]NO[/bold red]",
            f"{row.prompt_tokens:,}",
            f"{row.hit_tokens:,}",
            f"{row.bytes_put / 1e6:,.1f}",
            f"{row.bytes / 1e6:,.1f}",
            f"{row.get_seconds * 1e3:,.0f}",
            f"{row.ttft_cold_seconds:.2f}",
            f"{row.ttft_local_hit_seconds:.2f}",
            f"{row.ttft_pool_hit_seconds:.2f}",
        )
    return table


NOTES = (
    "cold: a plain vLLM engine that has none of it; local hit: the engine that had the chat so far; pool hit: another engine,",
    "which has never seen the chat and loads from the pool what the first one saved. MB put: by the turns before the last.",
)
