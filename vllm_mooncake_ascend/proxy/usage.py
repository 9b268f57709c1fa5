"""The prompt figures of an answer.

Decode counts the tokens that came from prefill as cached, because it found them computed. What a client is billed by, and
what it means by cached, is prefill's figure. vLLM from 0.32 on puts that right itself where prefill's params carry
`remote_prefill_cached_tokens`; before, it is put right here. It is touched only where both sides tell it (vLLM's
`--enable-prompt-tokens-details`); prompt_tokens, completion_tokens and all else are decode's.
"""

from __future__ import annotations

import json

from vllm_mooncake_ascend.proxy.rewrite import JsonObject, as_bytes
from vllm_mooncake_ascend.proxy.sse import data_of, event_of

_CACHED = "cached_tokens"
_MARK = b'"cached_tokens"'


def cached_tokens_of(prefill_answer: JsonObject) -> int | None:
    """How many prompt tokens prefill had in its cache, or None when its answer does not tell."""
    details = _details_of(prefill_answer)
    told = _count(details.get(_CACHED)) if details is not None else None
    params = prefill_answer.get("kv_transfer_params")
    if told is None and isinstance(params, dict):
        told = _count(params.get("remote_prefill_cached_tokens"))
    return told


def corrected_body(body: bytes, cached_tokens: int) -> bytes:
    """Decode's whole answer with prefill's figure; the very same bytes where there is nothing to put right."""
    if _MARK not in body:
        return body
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return body  # not ours to judge: the client gets what decode said
    details = _details_of(answer)
    if details is None or _count(details.get(_CACHED)) in (None, cached_tokens):
        return body
    details[_CACHED] = cached_tokens
    return as_bytes(answer)


def corrected_event(event: bytes, cached_tokens: int) -> bytes:
    """The same for one event of a stream; only the event with the usage differs."""
    if _MARK not in event:
        return event
    data = data_of(event)
    if data is None:
        return event
    corrected = corrected_body(data, cached_tokens)
    return event if corrected is data else event_of(corrected)


def _details_of(answer: object) -> dict[str, object] | None:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return details if isinstance(details, dict) else None


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
