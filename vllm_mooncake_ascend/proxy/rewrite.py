"""API bodies: what of a client's request goes to prefill, what to decode, and which requests have no use for prefill.

Rule for prefill: the prompt must be rendered exactly as decode will render it, and one token must be generated whatever
the client asked for. So fields are taken away by name and everything else goes through, unknown fields included: each
may change the prompt (tools, tool_choice, response_format, reasoning_effort, chat_template_kwargs, cache_salt...).

    field                                          to prefill            why
    max_tokens, max_completion_tokens (chat)       1                     one token ends the prefill
    min_tokens                                     removed               more than max_tokens is an error
    n, best_of                                     1, removed            children share the one prompt
    stop, stop_token_ids, include_stop_str...      removed               a stop at the first token is decode's to find
    ignore_eos                                     true                  so is the end of the text
    stream, stream_options, stream_interval        false, removed        the answer is read as one body
    logprobs and what belongs to it, echo          removed               decode answers them
    return_token_ids and the like                  removed               they only lengthen prefill's answer
    structured_outputs, guided_*                   removed               they bind the answer, not the prompt
    kv_transfer_params                             ours                  never a client's: they name engines to read from

Some requests go to decode alone (`reason_for_local`): vLLM would not use remote KV for them, or prefill cannot give it.
A client's `kv_transfer_params` never reach an engine, on either leg, not even inside `vllm_xargs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.types import TransferId

JsonObject = Mapping[str, object]
"""A body or a part of one. What is in it is the API's business; nothing here changes one in place."""

Endpoint = Literal["completions", "chat"]

LocalReason = Literal["prompt_list", "prompt_embeds", "prompt_logprobs", "beam_search", "truncation"]
"""Why a request goes to decode alone; also a label of a metric."""

_CLIENTS_MUST_NOT_SEND = frozenset({"kv_transfer_params", "ec_transfer_params"})

_NOT_FOR_PREFILL = frozenset(
    {
        "max_completion_tokens",
        "min_tokens",
        "best_of",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "stream_options",
        "stream_interval",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "logprob_token_ids",
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_token_offsets",
        "return_prompt_text",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
    }
)


def parse_object(raw: bytes) -> JsonObject:
    """The JSON object in `raw`, read as leniently as vLLM itself reads it.

    Raises:
        RemoteProtocolError: it is no JSON, or no object.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"the body must be a JSON object, got {type(value).__name__}")
    return value


def as_bytes(body: JsonObject) -> bytes:
    """`body` as compact JSON in ASCII: lone surrogates a client sent survive in it.

    Raises:
        RemoteProtocolError: it was parsed, but is nested too deeply to be written.
    """
    try:
        return json.dumps(body, separators=(",", ":")).encode()
    except RecursionError as error:
        raise RemoteProtocolError("the body is nested too deeply") from error


def stripped(body: JsonObject) -> JsonObject:
    """A client's body without what only engines and this proxy may say."""
    kept = {key: value for key, value in body.items() if key not in _CLIENTS_MUST_NOT_SEND}
    extras = kept.get("vllm_xargs")
    if isinstance(extras, dict):
        kept["vllm_xargs"] = {key: value for key, value in extras.items() if key not in _CLIENTS_MUST_NOT_SEND}
    return kept


def reason_for_local(body: JsonObject, endpoint: Endpoint) -> LocalReason | None:
    """Why remote KV is of no use to this request, or None when it is."""
    if endpoint == "completions" and _has_several_prompts(body.get("prompt")):
        return "prompt_list"  # prefill answers with the params of one prompt only
    if body.get("prompt_embeds") is not None:
        return "prompt_embeds"
    if _wants_prompt_logprobs(body, endpoint):
        return "prompt_logprobs"  # decode must compute the prompt to have them
    if body.get("use_beam_search"):
        return "beam_search"  # every beam is a request of its own with a longer prompt
    truncate_to = body.get("truncate_prompt_tokens")
    if isinstance(truncate_to, int) and truncate_to < 0:
        return "truncation"  # "as many as fit" depends on max_tokens, which differs between the legs
    return None


def for_prefill(body: JsonObject, endpoint: Endpoint, transfer_id: TransferId) -> JsonObject:
    """The request that makes prefill compute and keep the KV of the prompt of `body` (already `stripped`)."""
    kept = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    kept.update(max_tokens=1, n=1, ignore_eos=True, stream=False)
    if endpoint == "chat":
        kept["max_completion_tokens"] = 1
    kept["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": transfer_id}
    return kept


def for_decode(body: JsonObject, params: JsonObject | None) -> JsonObject:
    """The client's own request (already `stripped`), with prefill's params unchanged where there are any."""
    return body if params is None else {**body, "kv_transfer_params": params}


def _has_several_prompts(prompt: object) -> bool:
    """A list of texts or of token lists; a list of integers is one prompt."""
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _wants_prompt_logprobs(body: JsonObject, endpoint: Endpoint) -> bool:
    """vLLM computes prompt log probabilities also for `echo`: for completions with `logprobs`, for chat always."""
    if body.get("prompt_logprobs") is not None:
        return True
    return bool(body.get("echo")) and (endpoint == "chat" or body.get("logprobs") is not None)
