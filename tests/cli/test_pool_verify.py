"""`pool verify` asks another process and shows what it found. The real thing, with an engine, is in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from rich.console import Console

from vllm_mooncake_ascend.cli import pool_verify
from vllm_mooncake_ascend.cli.pool_verify import PromptVerdict
from vllm_mooncake_ascend.config import parse_pool


def test_prompts_come_from_options_and_from_a_file(tmp_path: Path) -> None:
    """A text, then from the file a text, messages and token ids; an empty line is none."""
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "Hello?"}]
    file.write_text(f'"Once"\n\n{json.dumps(chat)}\n[1, 2, 3]\n')
    assert ["first", "Once", chat, [1, 2, 3]] == [json.loads(line) for line in pool_verify.prompts_of(["first"], file)]


@pytest.mark.parametrize(("content", "complaint"), [("", "no prompt"), ('"one"\nnot JSON\n', "line 2")])
def test_prompts_that_are_none_are_refused(tmp_path: Path, content: str, complaint: str) -> None:
    """An empty file, and a line that is a bare text."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(typer.BadParameter, match=complaint):
        pool_verify.prompts_of([], file)


def test_the_verifying_engine_neither_loads_nor_saves_nor_lends() -> None:
    """Whatever the settings of the engines say; what decides the namespace is as they have it."""
    extra = {"prefix_pooling": True, "saves": True, "save_decode": True, "segment_bytes": "1GB", "tenant": "mine"}
    config = json.loads(pool_verify.transfer_config("127.0.0.1:7", extra))["kv_connector_extra_config"]
    settings, _ = parse_pool(config, {}, device_type="cpu", default_host="127.0.0.1")
    assert (False, False, 0, "mine", "127.0.0.1:7") == (
        settings.loads,
        settings.saves,
        settings.segment_bytes,
        settings.tenant,
        settings.master_address,
    )


def test_the_table_says_what_differs() -> None:
    """Two prompts, one with a block that is wrong and of a type whose differences mean nothing."""
    right = PromptVerdict(
        namespace="0f" * 16,
        num_tokens=300,
        num_objects=2,
        in_pool=2,
        equal=2,
        close=0,
        different=0,
        unread=0,
        max_difference=0.0,
        reasons=(),
    )
    wrong = PromptVerdict(**{**{name: getattr(right, name) for name in right.__struct_fields__}, "equal": 1, "different": 1})
    console = Console(width=pool_verify.TABLE_WIDTH)
    with console.capture() as capture:
        console.print(pool_verify.table_of([right, wrong]))
    shown = capture.get()
    assert ["0f" * 16 in shown, "largest difference" in shown, shown.count("│")] == [True, True, 2 * 10]
