"""The process of `pool verify`: one vLLM engine that computes prompts and compares them with a pool (`pool_verifier`).

    python -m vllm_mooncake_ascend.connectors.verify PROMPTS VERDICTS [options of vLLM]

PROMPTS has one JSON value a line: a text, a list of chat messages, or a list of token ids. VERDICTS is written at the end, as
JSON, one `Verdict` for each prompt.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_mooncake_ascend.errors import ConfigError


def main() -> None:
    # Scheduler and worker in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    prompts_path, verdicts_path, *arguments = sys.argv[1:]
    prompts = [json.loads(line) for line in Path(prompts_path).read_text().splitlines() if line.strip()]
    engine = _engine(arguments)
    try:
        for index, prompt in enumerate(prompts):
            _compute(engine, f"prompt-{index}", _token_ids(engine, prompt))
    finally:
        engine.engine_core.shutdown()
    from vllm_mooncake_ascend.connectors.pool_verifier import VERDICTS

    Path(verdicts_path).write_bytes(msgspec.json.encode(VERDICTS))


def _engine(arguments: Sequence[str]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(list(arguments))))


def _token_ids(engine: Any, prompt: Any) -> list[int]:
    """The tokens that vLLM's server would make of the prompt."""
    if isinstance(prompt, str):
        return list(engine.get_tokenizer().encode(prompt))
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    if isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt):
        text = engine.get_tokenizer().apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        return list(engine.get_tokenizer().encode(text, add_special_tokens=False))
    raise ConfigError(f"a prompt must be a text, a list of messages, or a list of token ids, not {prompt!r:.80}")


def _compute(engine: Any, request_id: str, token_ids: list[int]) -> None:
    """One prompt and one token."""
    from vllm import SamplingParams

    engine.add_request(request_id, {"prompt_token_ids": token_ids}, SamplingParams(temperature=0.0, max_tokens=1))
    while engine.has_unfinished_requests():
        engine.step()


if __name__ == "__main__":
    main()
