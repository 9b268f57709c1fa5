"""What makes two caches one, and what makes them two, beside the model's own files (`test_start`)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_mooncake_ascend.connectors import identity

LONG_ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def config_of(
    hf_config: dict[str, Any] | None = None, *, folder: Path | str = "org/model", max_model_len: int = 2048, **model: Any
) -> Any:
    """What is read of a `VllmConfig`."""
    values = {"model_type": "llama", **(hf_config or {})}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{
                "hf_config": SimpleNamespace(to_dict=lambda: values, _commit_hash=model.pop("commit", None)),
                "model": str(folder),
                "revision": None,
                "dtype": "torch.bfloat16",
                "quantization": None,
                "max_model_len": max_model_len,
                "multimodal_config": None,
                **model,
            }
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
    )


def different(one: Any, other: Any) -> list[str]:
    here, there = identity.cache_identity(one, "npu"), identity.cache_identity(other, "npu")
    return [name for name in here if here[name] != there[name]]


def test_engines_of_another_length_share() -> None:
    """Goal: what reaches no KV byte separates nobody. Method: an ordinary model, other lengths."""
    ropes = [{}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"rope_scaling": {"type": "linear", "factor": 2.0}}]

    assert [[], [], []] == [different(config_of(rope), config_of(rope, max_model_len=131_072)) for rope in ropes]


@pytest.mark.parametrize(
    "hf_config",
    [
        {"rope_parameters": LONG_ROPE},
        {"text_config": {"rope_parameters": {"full_attention": LONG_ROPE}}},
        {"rope_scaling": {"type": "longrope", "factor": 32.0}, "original_max_position_embeddings": 4096},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
    ],
)
def test_engines_share_only_what_their_lengths_leave_alike(hf_config: dict[str, Any]) -> None:
    """Goal: vLLM chooses other factors for engines that may run longer prompts. Method: models in which it does."""
    short, other, long = (config_of(hf_config, max_model_len=length) for length in (2048, 4096, 131_072))

    assert ["use of max_model_len"] == different(short, long)
    is_dynamic = hf_config.get("rope_scaling", {}).get("type") == "dynamic"
    assert (["use of max_model_len"] if is_dynamic else []) == different(short, other)


def test_images_are_the_same_only_behind_the_same_processor(tmp_path: Path) -> None:
    """Goal: vLLM's hash of an image knows nothing of the server's settings for its processor, nor of its files. Method: change
    either."""
    settings = {"mm_processor_kwargs": {"use_fast": True}, "video_pruning_rate": None}
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    here = config_of(folder=tmp_path, multimodal_config=SimpleNamespace(**settings))
    same = identity.cache_identity(here, "npu")
    slow = config_of(
        folder=tmp_path, multimodal_config=SimpleNamespace(**{**settings, "mm_processor_kwargs": {"use_fast": False}})
    )

    assert ["multimodal processor"] == different(here, slow)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.4]}')
    now = identity.cache_identity(here, "npu")
    assert ["multimodal processor"] == [name for name in same if same[name] != now[name]]


def write_weights(file: Path, tensors: dict[str, bytes]) -> None:
    """A safetensors file."""
    header, offset = {}, 0
    for name, content in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [offset, offset + len(content)]}
        offset += len(content)
    encoded = json.dumps(header).encode()
    file.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(tensors.values()))


@pytest.mark.parametrize("changed", ["embed", "q_proj", "k_scale", "norm"])
def test_a_fine_tune_of_one_kind_of_tensor_is_another_model(tmp_path: Path, changed: str) -> None:
    """Goal: merged adapters change the projections alone, a calibration the scales. Method: change one tensor of many."""
    tensors = {
        "embed": b"\1" * 100_000,
        "q_proj": b"\2" * 9_000,
        "mlp": b"\3" * 50_000,
        "k_scale": b"\4" * 4,
        "norm": b"\5" * 8,
    }
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    write_weights(tmp_path / "one" / "model.safetensors", tensors)
    write_weights(tmp_path / "other" / "model.safetensors", {**tensors, changed: b"\7" * len(tensors[changed])})

    assert ["model weights"] == different(config_of(folder=tmp_path / "one"), config_of(folder=tmp_path / "other"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_weights_of_other_kinds_are_known_by_content(tmp_path: Path, name: str) -> None:
    """Goal: one path on two hosts may hold two models. Method: files that are no safetensors, of equal size."""
    found = []
    for filling in (b"\1", b"\2", b"\1"):
        (tmp_path / name).write_bytes(b"GGUF\3\0\0\0" + filling * 50_000)
        found.append(identity.cache_identity(config_of(folder=tmp_path), "npu")["model weights"])

    assert found[0] == found[2]
    assert found[0] != found[1]


def test_a_model_of_the_hub_is_known_by_its_commit() -> None:
    """Goal: `main` moves. Method: one name, two commits."""
    assert ["model weights"] == different(config_of(commit="a" * 40), config_of(commit="b" * 40))


def test_dummy_weights_are_not_the_models() -> None:
    """Goal: an engine that never read the files shares nothing with one that did. Method: `--load-format dummy`."""
    dummy = config_of()
    dummy.load_config.load_format = "dummy"

    assert ["model weights"] == different(config_of(), dummy)


def test_another_format_of_the_same_shape_is_another_cache() -> None:
    """Goal: vllm-ascend's NZ format cannot be seen in a tensor's shape. Method: its setting."""
    fractal = config_of()
    fractal.additional_config = {"enable_kv_nz": True}

    assert ["attention kernel"] == different(config_of(), fractal)
