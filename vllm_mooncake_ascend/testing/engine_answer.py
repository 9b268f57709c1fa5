"""What comes back of a request that a test gave to an engine, put together piece by piece, and when two answers are equal."""

from __future__ import annotations

import json
from typing import Any

from vllm_mooncake_ascend.testing.engine_messages import Output

LOGPROB_TOLERANCE = 1e-3
"""Rounding in float32 moves log probabilities by some 1e-5, depending on how a prompt was cut into chunks and batches; one
wrong block of KV moves them by 1e-2, and may well leave the tokens of a small random model as they are."""


class Text:
    """Tokens with their log probabilities. Equal to another text of the same tokens and, but for rounding, probabilities."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Text):
            return NotImplemented
        if self.token_ids != other.token_ids or len(self.logprobs) != len(other.logprobs):
            return False
        return all(abs(one - two) <= LOGPROB_TOLERANCE for one, two in zip(self.logprobs, other.logprobs, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Text({self.token_ids}, {[round(logprob, 5) for logprob in self.logprobs]})"


class Answer:
    """What has come back so far of one request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.texts: dict[int, Text] = {}
        """Each of the n answers."""
        self.finish_reasons: dict[int, str] = {}
        self.kv_transfer_params: Any = None
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0

    def add(self, output: Output) -> None:
        """Take up one piece of news."""
        text = self.texts.setdefault(output.index, Text())
        text.token_ids.extend(output.token_ids)
        text.logprobs.extend(output.logprobs)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, output.num_prompt_logprobs)
        if output.finish_reason:
            self.finish_reasons[output.index] = output.finish_reason
        params = json.loads(output.params_json)
        if params is not None:
            self.kv_transfer_params = params

    @property
    def text(self) -> Text:
        """The first answer."""
        return self.texts.get(0, Text())

    @property
    def finish_reason(self) -> str:
        """How the first answer ended; empty while it goes on."""
        return self.finish_reasons.get(0, "")
