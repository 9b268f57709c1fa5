"""What the demo found out: values, the verdict, the JSON report and the table. No process, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from vllm_mooncake_ascend.cli.demo_client import Answer
from vllm_mooncake_ascend.cli.demo_pool_report import PoolRow
from vllm_mooncake_ascend.cli.demo_prompts import DemoPrompt
from vllm_mooncake_ascend.metrics.names import PREFIX
from vllm_mooncake_ascend.p2p import counters

BYTES_READ = PREFIX + counters.READ_BYTES
SECONDS_READING = PREFIX + counters.READ_SECONDS
READS = PREFIX + counters.READS_ENDED
LOADS_FAILED = PREFIX + counters.LOADS_FAILED
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """KV cache that a decode engine read between two looks at its metrics."""

    num_bytes: float
    seconds: float
    num_reads: float
    num_failed: float
    """Requests whose KV did not come (they were computed anew)."""

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float]) -> Moved:
        """The growth of the counters."""

        def growth(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        return cls(
            num_bytes=growth(BYTES_READ),
            seconds=growth(SECONDS_READING),
            num_reads=growth(READS),
            num_failed=growth(LOADS_FAILED),
        )


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request of the demo, both ways."""

    name: str
    chat: bool
    stream: bool
    at_once: int
    """Requests that were sent at the same time, this one included. Above 1, what was moved is this request's share of
    what the batch moved, by prompt tokens."""
    prompt_tokens: int
    completion_tokens: int
    answer: str
    reference_answer: str
    equal: bool
    kv_bytes_moved: int
    kv_blocks_moved: int
    kv_moved: bool
    """False when nothing moved, or when the KV of any request of the batch did not come."""
    transfer_seconds: float
    gigabytes_per_second: float
    ttft_seconds: float
    ttft_colocated_seconds: float
    seconds: float
    colocated_seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    vllm: str
    mooncake: str
    connector: str
    model: str
    dtype: str
    machine: str
    all_equal: bool
    all_moved: bool
    seconds: float
    requests: tuple[Row, ...]
    pool: tuple[PoolRow, ...]

    @property
    def ok(self) -> bool:
        """True when the demo showed what it is to show."""
        return self.all_equal and self.all_moved and self.all_hit and bool(self.requests)

    @property
    def all_hit(self) -> bool:
        """Each prefix of the second part came from the pool."""
        return bool(self.pool) and all(row.ok for row in self.pool)


def block_bytes(model_config: Mapping[str, object], *, dtype: str, block_size: int) -> int:
    """KV bytes of one block over all layers, from a model's config.json (full attention)."""

    def number(key: str) -> int:
        value = model_config[key]
        assert isinstance(value, int), f"config.json: {key} is {value!r}"
        return value

    num_heads = number("num_key_value_heads" if "num_key_value_heads" in model_config else "num_attention_heads")
    head_size = number("head_dim") if "head_dim" in model_config else number("hidden_size") // number("num_attention_heads")
    return 2 * number("num_hidden_layers") * num_heads * head_size * DTYPE_BYTES[dtype] * block_size


def rows_of(
    batch: Sequence[DemoPrompt],
    answers: Sequence[Answer],
    references: Sequence[Answer],
    moved: Moved,
    bytes_per_block: int,
) -> list[Row]:
    """The rows of one batch; `moved` is what the whole batch moved."""
    total_tokens = sum(answer.prompt_tokens for answer in answers)
    rows = []
    for prompt, answer, reference in zip(batch, answers, references, strict=True):
        share = answer.prompt_tokens / total_tokens
        num_bytes = round(moved.num_bytes * share)
        rows.append(
            Row(
                name=prompt.name,
                chat=prompt.chat,
                stream=prompt.stream,
                at_once=len(batch),
                prompt_tokens=answer.prompt_tokens,
                completion_tokens=answer.completion_tokens,
                answer=answer.text,
                reference_answer=reference.text,
                equal=answer.same_as(reference),
                kv_bytes_moved=num_bytes,
                kv_blocks_moved=-(-num_bytes // bytes_per_block),
                kv_moved=num_bytes > 0 and moved.num_failed == 0,
                transfer_seconds=moved.seconds * share,
                gigabytes_per_second=moved.num_bytes / moved.seconds / 1e9 if moved.seconds else 0.0,
                ttft_seconds=answer.ttft_seconds,
                ttft_colocated_seconds=reference.ttft_seconds,
                seconds=answer.seconds,
                colocated_seconds=reference.seconds,
            )
        )
    return rows


def write_json(report: Report, path: Path) -> None:
    """Write the report where scripts find it; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    scratch.write_text(json.dumps(msgspec.to_builtins(report), indent=1) + "\n")
    scratch.replace(path)


def table_of(report: Report) -> Table:
    """The report for people."""
    table = Table(title=f"{report.model}, vLLM {report.vllm}, Mooncake {report.mooncake}, {report.dtype}", show_lines=False)
    for heading in ("request", "kind", "answer"):
        table.add_column(heading, no_wrap=True)
    table.add_column("equal", justify="center")
    for heading in ("tokens", "blocks", "MB moved", "transfer ms", "GB/s", "TTFT s", "colocated s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.requests:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    shared = "~" if row.at_once > 1 else ""
    whole = "" if row.stream else " *"
    return (
        row.name,
        ("chat" if row.chat else "completion") + (", stream" if row.stream else ""),
        _shortened(row.answer),
        "[green]yes[/green]" if row.equal else "[bold red]NO[/bold red]",
        f"{row.prompt_tokens:,}",
        f"{shared}{row.kv_blocks_moved}",
        f"{shared}{row.kv_bytes_moved / 1e6:,.1f}",
        f"{shared}{row.transfer_seconds * 1e3:,.0f}",
        f"{row.gigabytes_per_second:.2f}",
        f"{row.ttft_seconds:.2f}{whole}",
        f"{row.ttft_colocated_seconds:.2f}{whole}",
    )


def _shortened(text: str, length: int = 34) -> str:
    flat = " ".join(text.split()).replace("[", "(")
    return flat if len(flat) <= length else flat[: length - 3] + "..."


NOTES = (
    "TTFT: time to first token through proxy, prefill and decode; colocated: the same prompt on one plain vLLM engine.",
    "*  not streamed, so the first token arrives with the whole answer.",
    "~  sent at the same time as others: this request's share of what they moved together, by prompt tokens. Seconds of reads",
    "   that ran beside each other add up, so GB/s is what one of them saw, not what the wire carried.",
)
