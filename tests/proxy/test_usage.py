"""Prompt figures of answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_mooncake_ascend.proxy import usage


def answer(cached: Any) -> bytes:
    return json.dumps(
        {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": cached}}}
    ).encode()


@pytest.mark.parametrize(
    ("prefill_answer", "cached_tokens"),
    [
        ({}, None),
        ({"usage": {"prompt_tokens_details": None}}, None),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": 5}}}, 5),
        ({"kv_transfer_params": {"remote_prefill_cached_tokens": 6}}, 6),
        ({"kv_transfer_params": {"remote_prefill_cached_tokens": True}}, None),
        ({"usage": {"prompt_tokens_details": {"cached_tokens": -1}}}, None),
    ],
)
def test_prefills_figure_is_found_where_vllm_puts_it(prefill_answer: Any, cached_tokens: int | None) -> None:
    """Goal: both places, and no nonsense. Method: a table of answers."""
    assert cached_tokens == usage.cached_tokens_of(prefill_answer)


def test_the_figure_is_put_right_and_nothing_else_changes() -> None:
    """Goal: only cached_tokens. Method: compare the whole answer."""
    assert json.loads(answer(3)) == json.loads(usage.corrected_body(answer(8), 3))


@pytest.mark.parametrize("body", [answer(3), answer(None), b'{"usage":null}', b'not JSON "cached_tokens"', b'"cached_tokens"'])
def test_what_needs_nothing_stays_the_same_bytes(body: bytes) -> None:
    """Goal: no answer is re-written for nothing. Method: right ones, odd ones and broken ones."""
    assert body is usage.corrected_body(body, 3)


def test_an_event_is_put_right_as_a_body_is() -> None:
    """Goal: streams too. Method: the usage event, and an event that only speaks of it."""
    spoken = b'data: {"choices":[{"text":"\\"cached_tokens\\""}]}\n\n'

    assert json.loads(answer(3)) == json.loads(usage.corrected_event(b"data: " + answer(8) + b"\n\n", 3)[6:])
    assert spoken is usage.corrected_event(spoken, 3)
