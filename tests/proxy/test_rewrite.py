"""Bodies for prefill and decode."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.proxy import rewrite
from vllm_mooncake_ascend.types import TransferId

T1 = TransferId("t1")


def prefill_body(endpoint: Any = "completions", **body: Any) -> dict[str, Any]:
    """What prefill gets for a client's body."""
    return dict(rewrite.for_prefill(rewrite.stripped(body), endpoint, T1))


@pytest.mark.parametrize(
    "option",
    [
        {"min_tokens": 100},
        {"best_of": 4},
        {"stop": ["a"]},
        {"stop_token_ids": [1]},
        {"include_stop_str_in_output": True},
        {"stream_options": {"include_usage": True}},
        {"logprobs": 5},
        {"top_logprobs": 5},
        {"prompt_logprobs": 5},
        {"echo": True},
        {"return_token_ids": True},
        {"structured_outputs": {"regex": "a+"}},
        {"guided_json": {}},
    ],
)
def test_an_option_that_could_break_the_one_token_is_removed(option: dict[str, Any]) -> None:
    """Goal: no client option makes prefill fail or stop. Method: each option alone."""
    assert not option.keys() & prefill_body(prompt="p", **option).keys()


@pytest.mark.parametrize(
    "option",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"response_format": {"type": "json_object"}},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"cache_salt": "s"},
        {"suffix": "x"},
        {"add_special_tokens": False},
        {"truncate_prompt_tokens": 5},
        {"a_field_of_tomorrow": 1},
    ],
)
def test_what_may_change_the_prompt_is_kept(option: dict[str, Any]) -> None:
    """Goal: both legs render the same prompt. Method: each option alone, unchanged."""
    assert option.items() <= prefill_body("chat", messages=[], **option).items()


def test_prefill_generates_one_token_whatever_comes() -> None:
    """Goal: the prefill ends by length. Method: all that says how much to generate, at its largest."""
    body = prefill_body("chat", max_tokens=9, max_completion_tokens=9, n=5, stream=True, ignore_eos=False)

    wanted = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False, "ignore_eos": True}
    assert wanted.items() <= body.items()


def test_completions_get_no_field_they_do_not_know() -> None:
    """Goal: no warning in the engine's log. Method: max_completion_tokens is of chat only."""
    assert "max_completion_tokens" not in prefill_body("completions", prompt="p", max_completion_tokens=3)


def test_prefill_is_told_to_keep_the_kv() -> None:
    """Goal: the contract of `wire.params`. Method: the params of the first leg."""
    assert {"do_remote_decode": True, "transfer_id": "t1"} == prefill_body(prompt="p")["kv_transfer_params"]


def test_a_clients_params_are_stripped_wherever_they_hide() -> None:
    """Goal: only engines name engines. Method: both keys at the top and inside vllm_xargs, which vLLM merges."""
    hostile = {"kv_transfer_params": {}, "ec_transfer_params": {}}

    assert {"prompt": "p", "vllm_xargs": {"a": 1}} == rewrite.stripped(
        {"prompt": "p", **hostile, "vllm_xargs": {"a": 1, **hostile}}
    )


def test_nothing_is_changed_in_place() -> None:
    """Goal: the second leg sees what the client sent. Method: compare the body before and after the first."""
    body = {"prompt": "p", "stop": ["a"], "vllm_xargs": {"kv_transfer_params": "x"}}
    before = json.dumps(body)
    rewrite.for_prefill(rewrite.stripped(body), "completions", T1)

    assert before == json.dumps(body)


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        ("completions", {"prompt": "a"}, None),
        ("completions", {"prompt": [1, 2, 3]}, None),
        ("completions", {"prompt": ["a"]}, None),
        ("completions", {"prompt": [[1, 2]]}, None),
        ("completions", {"prompt": ["a", "b"]}, "prompt_list"),
        ("completions", {"prompt": [[1], [2]]}, "prompt_list"),
        ("completions", {"prompt_embeds": "x"}, "prompt_embeds"),
        ("completions", {"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ("completions", {"prompt": "a", "echo": True}, None),
        ("completions", {"prompt": "a", "echo": True, "logprobs": 0}, "prompt_logprobs"),
        ("completions", {"prompt": "a", "logprobs": 3}, None),
        ("chat", {"messages": [], "echo": True}, "prompt_logprobs"),
        ("chat", {"messages": [], "logprobs": True, "top_logprobs": 3}, None),
        ("chat", {"messages": [], "use_beam_search": True}, "beam_search"),
        ("chat", {"messages": [], "truncate_prompt_tokens": -1}, "truncation"),
        ("chat", {"messages": [], "truncate_prompt_tokens": 5}, None),
        ("chat", {"messages": [], "n": 4}, None),
    ],
)
def test_requests_that_remote_kv_does_not_help_are_known(endpoint: Any, body: dict[str, Any], reason: str | None) -> None:
    """Goal: prefill is not asked for nothing. Method: a table of bodies."""
    assert reason == rewrite.reason_for_local(body, endpoint)


@pytest.mark.parametrize("raw", [b"", b"null", b"[1]", b'"x"', b"{", b"\xff\xfe", b"[" * 200_000])
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    """Goal: an error, never an exception of the parser. Method: several bodies, a deep one among them."""
    with pytest.raises(RemoteProtocolError):
        rewrite.parse_object(raw)


def test_odd_text_survives() -> None:
    """Goal: decode sees the client's characters. Method: a lone surrogate, a NUL and an emoji, there and back."""
    raw = b'{"prompt":"\\ud800 \\u0000 \\ud83d\\ude00"}'

    assert rewrite.parse_object(raw) == rewrite.parse_object(rewrite.as_bytes(rewrite.parse_object(raw)))
