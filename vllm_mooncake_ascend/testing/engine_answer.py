"""What comes back of a request that a test gave to an engine, put together piece by piece."""

from __future__ import annotations

import json
from typing import Any

from vllm_mooncake_ascend.testing.engine_messages import Output


class Answer:
    """What has come back so far of one request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.tokens: dict[int, list[int]] = {}
        """Token ids of each of the n answers."""
        self.logprobs: dict[int, list[float]] = {}
        self.finish_reasons: dict[int, str] = {}
        self.kv_transfer_params: Any = None
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0

    def add(self, output: Output) -> None:
        """Take up one piece of news."""
        self.tokens.setdefault(output.index, []).extend(output.token_ids)
        self.logprobs.setdefault(output.index, []).extend(output.logprobs)
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, output.num_prompt_logprobs)
        if output.finish_reason:
            self.finish_reasons[output.index] = output.finish_reason
        params = json.loads(output.params_json)
        if params is not None:
            self.kv_transfer_params = params

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first answer."""
        return self.tokens.get(0, [])

    @property
    def finish_reason(self) -> str:
        """How the first answer ended; empty while it goes on."""
        return self.finish_reasons.get(0, "")
