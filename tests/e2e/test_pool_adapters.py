"""Requests with LoRA adapters: the pool knows adapters by what they contain, whatever their names and folders are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_mooncake_ascend.testing.engine_pool import PoolEngines
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, wait_all_ready
from vllm_mooncake_ascend.testing.engine_prompts import Reference, random_prompt

pytestmark = pytest.mark.engine

NUM_TOKENS = 300
NUM_HIT_TOKENS = 288
RANK = 4
LAYERS, HIDDEN, KEY_WIDTH = 2, 128, 128
"""Of tiny-gqa."""


def make_adapter(folder: Path, seed: int) -> str:
    """An adapter of the key projections, big enough to change every answer."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(LAYERS):
        place = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        weights[f"{place}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=source)
        weights[f"{place}.lora_B.weight"] = torch.randn(KEY_WIDTH, RANK, generator=source)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["k_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_an_adapter_is_known_by_what_it_contains(
    start_in_pool: Callable[..., EngineProcess], reference: Reference, tmp_path: Path
) -> None:
    """Goal: KV of one adapter is never loaded for another, though they have one name and one folder on two machines.

    Method: one engine computes with two adapters; before the other one loads the second of them, its files are replaced.
    """
    same, changed = (make_adapter(tmp_path / name, seed=1) for name in ("same", "changed"))
    options = {"enable_lora": True, "max_lora_rank": 8}
    engines = [start_in_pool(f"adapters-{index}", **options) for index in range(2)]
    wait_all_ready(engines)
    pool = PoolEngines(engines, reference)
    prompt = random_prompt("adapters", NUM_TOKENS)

    ours = {name: pool.compute(pool.first, prompt, adapter=name) for name in (same, changed)}
    make_adapter(Path(changed), seed=2)
    theirs = {name: pool.compute(pool.second, prompt, adapter=name) for name in (same, changed, "")}

    assert [NUM_HIT_TOKENS, 0, 0] == [theirs[name].num_cached_tokens for name in (same, changed, "")]
    assert ours[same].text == theirs[same].text == ours[changed].text
    assert pool.expected(prompt) == theirs[""].text
    assert len({str(theirs[name].text) for name in (same, changed, "")}) == 3
