"""The only reader of vLLM's Request: prompt identity, what its kv_transfer_params ask, whether it ended with KV."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.connectors import adapters
from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire import params


def request_id(request: Any) -> RequestId:
    return RequestId(request.request_id)


def wish(request: Any, *, secret: bytes | None, now_s: float) -> params.RemoteDecode | params.RemotePrefill | None:
    """What the request asks of us, or None.

    Raises:
        RemoteProtocolError: the request's kv_transfer_params, or the request itself, cannot be served remotely.
    """
    meaning = params.parse(request.kv_transfer_params, secret=secret, now_s=now_s)
    if meaning is not None and request.prompt_token_ids is None:
        raise RemoteProtocolError("a prompt given as embeddings cannot be transferred")
    if meaning is not None and len(request.request_id) > limits.MAX_ID_CHARS:
        raise RemoteProtocolError(
            f"the request id has {len(request.request_id)} characters, at most {limits.MAX_ID_CHARS} can be sent to a peer;"
            " shorten X-Request-Id"
        )
    return meaning


def drop_odd_params(request: Any) -> None:
    """vLLM reads kv_transfer_params as a dict (Scheduler.add_request, after the connector was told) and would end the engine
    over anything else; a client gets that past its API's check with vllm_xargs."""
    if not isinstance(request.kv_transfer_params, dict):
        request.kv_transfer_params = None


def prompt_digest(request: Any) -> bytes:
    """SHA-256 over everything that makes the KV of this prompt what it is: its tokens and vLLM's extra hash keys.

    Two requests with one digest have interchangeable prompt KV on engines with one fingerprint. Source: the keys vLLM
    adds to its block hashes (LoRA, multimodal items with their positions, cache salt).
    """
    digest = hashlib.sha256()
    tokens = np.asarray(request.prompt_token_ids, dtype="<i8")
    digest.update(len(tokens).to_bytes(8, "little"))
    digest.update(tokens.tobytes())
    for key in _extra_keys(request):
        encoded = key.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def may_use_cached(request: Any) -> bool:
    """Whether KV of somebody else may stand in for computing: not where every token's log probabilities are wanted, and not
    for the stand-in of a request that its API server has refused (0.30+)."""
    skips = bool(getattr(request, "skip_reading_prefix_cache", False))
    return not skips and not getattr(request, "abort_immediately", False)


def may_be_rewritten(request: Any) -> bool:
    """Whether tokens of the request may be taken back while a step computes their KV (vLLM's streaming-input sessions)."""
    return bool(getattr(request, "resumable", False))


def num_prompt_tokens(request: Any) -> int:
    return int(request.num_prompt_tokens)


def num_written_tokens(request: Any) -> int:
    """Tokens of the request whose KV is written: computed ones less those of steps still in flight."""
    in_flight = getattr(request, "num_in_flight_tokens", 0)
    return max(0, int(request.num_computed_tokens) - int(in_flight))


def ended_with_kv(request: Any) -> bool:
    """Whether the request finished in a way that leaves its KV complete (by length, by a stop, by repeating itself)."""
    return request.status.name in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "FINISHED_REPETITION")


def end_reason(request: Any) -> str:
    """Bounded word for how the request ended, for messages and metrics."""
    return str(request.status.name).removeprefix("FINISHED_").lower()


def _extra_keys(request: Any) -> list[str]:
    keys = []
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        content = adapters.digest_of(lora)
        keys.append(f"lora:{lora.lora_name}:{lora.lora_path if content is None else content.hex()}")
    salt = getattr(request, "cache_salt", None)
    if salt:
        keys.append(f"salt:{salt}")
    for feature in getattr(request, "mm_features", None) or ():
        position = feature.mm_position
        keys.append(f"mm:{feature.identifier}:{position.offset}:{position.length}")
    return keys
