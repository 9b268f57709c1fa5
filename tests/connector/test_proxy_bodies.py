"""The proxy's rewriting against vLLM's own request models: accepted, and rendered alike."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_mooncake_ascend.proxy import rewrite
from vllm_mooncake_ascend.types import TransferId

protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
completion_protocol = pytest.importorskip("vllm.entrypoints.openai.completion.protocol")

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SHAPING: dict[str, Any] = {
    "max_tokens": 100,
    "min_tokens": 50,
    "n": 3,
    "stop": ["a"],
    "stop_token_ids": [5],
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": 1,
    "temperature": 0.5,
    "return_token_ids": True,
}
CHAT_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": True, "top_logprobs": 5},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "a+"}},
    {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
    {"add_generation_prompt": False, "continue_final_message": True},
)


def for_prefill(body: dict[str, Any], endpoint: Any) -> dict[str, Any]:
    """What the proxy sends as first leg."""
    return dict(rewrite.for_prefill(rewrite.stripped(body), endpoint, TransferId("t1")))


@pytest.mark.engine
@pytest.mark.parametrize("options", CHAT_OPTIONS)
def test_a_chat_is_rendered_alike_on_both_legs(options: dict[str, Any]) -> None:
    """Goal: the prompt's KV fits. Method: everything vLLM's template sees is equal for both bodies."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **SHAPING, **options}
    legs = [
        protocol.ChatCompletionRequest(**leg)
        for leg in (for_prefill(body, "chat"), rewrite.for_decode(body, {"do_remote_prefill": True}))
    ]

    prefill, decode = (leg.build_chat_params(None, "auto") for leg in legs)
    assert decode == prefill
    assert legs[1].tools == legs[0].tools


@pytest.mark.engine
@pytest.mark.parametrize("options", [{}, {"logprobs": 3}, {"echo": True}, {"prompt": [1, 2]}, {"suffix": "x"}])
def test_prefill_generates_exactly_one_token(options: dict[str, Any]) -> None:
    """Goal: the prefill ends by length at its first token. Method: vLLM's own sampling parameters of the first leg."""
    body = {"model": "m", "prompt": "p", **SHAPING, **options}
    request = completion_protocol.CompletionRequest(**for_prefill(body, "completions"))
    sampling = request.to_sampling_params(request.max_tokens, {})

    wanted = (1, 0, 1, [], True, None, None)
    seen = (
        sampling.max_tokens,
        sampling.min_tokens,
        sampling.n,
        sampling.stop,
        sampling.ignore_eos,
        sampling.logprobs,
        sampling.prompt_logprobs,
    )
    assert wanted == seen
    assert {"do_remote_decode": True, "transfer_id": "t1"} == sampling.extra_args["kv_transfer_params"]


@pytest.mark.engine
def test_params_cannot_be_smuggled_in_extra_arguments() -> None:
    """Goal: vLLM merges vllm_xargs into what connectors read; ours must win. Method: a body with both."""
    body = rewrite.stripped({"model": "m", "prompt": "p", "vllm_xargs": {"kv_transfer_params": "evil", "kept": 1}})
    request = completion_protocol.CompletionRequest(**rewrite.for_decode(body, None))

    assert {"kept": 1} == request.to_sampling_params(5, {}).extra_args
