"""What happens before the first request: refusals by name, the plugin, the identity of a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from vllm_mooncake_ascend.config.pool import PoolConfig, parse_pool
from vllm_mooncake_ascend.connectors import identity, plugin, support
from vllm_mooncake_ascend.errors import ConfigError

Make = Callable[..., Any]
MODEL = Path(__file__).parents[2] / "build" / "models" / "tiny-gqa"


def test_an_ordinary_engine_is_not_refused(make_engine: Make) -> None:
    """Goal: no false alarm. Method: the configuration of an engine that runs."""
    engine = make_engine("kv_both")

    support.refuse_unsupported("MooncakeConnectorV1", engine.config, engine.cache_config)


@pytest.mark.parametrize(
    ("part", "name", "value", "words"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline parallelism"),
        ("parallel_config", "decode_context_parallel_size", 2, "decode context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "prefill context parallelism"),
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
        ("cache_config", "calculate_kv_scales", True, "--calculate-kv-scales"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(make_engine: Make, part: str, name: str, value: object, words: str) -> None:
    """Goal: an engine that could go wrong does not start. Method: one setting at a time on a real configuration."""
    engine = make_engine("kv_both")
    setattr(getattr(engine.config, part), name, value)

    with pytest.raises(ConfigError, match=words):
        support.refuse_unsupported("MooncakeConnectorV1", engine.config, engine.cache_config)


def pool_config() -> PoolConfig:
    config, _ = parse_pool({"master_address": "127.0.0.1:9"}, {}, device_type="cpu", default_host="127.0.0.1")
    return config


def test_a_pool_without_prefix_caching_is_refused_by_name(make_engine: Make) -> None:
    """Goal: where vLLM turned prefix caching off, a prompt must not start from another's KV. Method: as it does."""
    engine = make_engine("kv_both", prefix_caching=False)

    with pytest.raises(ConfigError, match="the prefix pool needs prefix caching"):
        support.pool_settings(engine.config, pool_config(), device_type="cpu")


@pytest.mark.parametrize(
    ("role", "asynchronous", "device_type", "loads"),
    [
        ("kv_producer", True, "npu", False),
        ("kv_producer", False, "npu", True),
        ("kv_producer", True, "cpu", True),
        ("kv_both", True, "npu", True),
        ("kv_consumer", True, "cuda", True),
    ],
)
def test_an_engine_loads_only_where_vllm_keeps_blocks_that_are_written_to(
    make_engine: Make, role: str, asynchronous: bool, device_type: str, loads: bool
) -> None:
    """Goal: no load into a block that a step under way still writes to. Method: `Scheduler.defer_block_free` says where vLLM
    keeps such blocks."""
    engine = make_engine(role, asynchronous=asynchronous)

    assert loads == support.pool_settings(engine.config, pool_config(), device_type=device_type).loads
    assert loads == (engine.scheduler.defer_block_free or not asynchronous or device_type == "cpu")


def test_speculative_decoding_is_refused_by_name(make_engine: Make) -> None:
    """Goal: draft layers are not read too early. Method: any speculative configuration."""
    engine = make_engine("kv_both")
    engine.config.speculative_config = object()

    with pytest.raises(ConfigError, match="speculative decoding"):
        support.refuse_unsupported("MooncakeConnectorV1", engine.config, engine.cache_config)


def test_several_cache_groups_are_refused_with_the_way_round(make_engine: Make) -> None:
    """Goal: hybrid models are named with what helps. Method: a sliding window group beside full attention."""
    engine = make_engine("kv_both")
    full = engine.cache_config.kv_cache_groups[0]
    spec = full.kv_cache_spec
    window = SlidingWindowSpec(
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
        sliding_window=64,
    )
    groups = [full, KVCacheGroupSpec(layer_names=["w"], kv_cache_spec=window)]
    cache_config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)

    with pytest.raises(ConfigError, match=r"several KV cache groups.*--disable-hybrid-kv-cache-manager"):
        support.refuse_unsupported("MooncakeConnectorV1", engine.config, cache_config)


def test_the_plugin_registers_once_and_over_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: vLLM calls plugins in every process and again; vllm-ascend has the name too. Method: its real registry."""
    registry: dict[str, Any] = {}
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)

    plugin.register()
    ours = registry["MooncakeConnectorV1"]
    plugin.register()

    assert ours is registry["MooncakeConnectorV1"]
    assert "MooncakeConnectorV1" == ours().__name__
    registry["MooncakeConnectorV1"] = theirs = object()
    plugin.register()
    assert theirs is registry["MooncakeConnectorV1"]


def test_a_model_is_known_by_its_files_not_its_folder(make_engine: Make, tmp_path: Path) -> None:
    """Goal: one model in two places is one, a fine-tune of it is another. Method: a copy, then one byte of it changed."""
    engine = make_engine("kv_both")
    here = identity.cache_identity(engine.config, "cpu")
    copy = tmp_path / "elsewhere"
    shutil.copytree(MODEL, copy)
    engine.config.model_config.model = str(copy)
    moved = identity.cache_identity(engine.config, "cpu")
    weights = next(copy.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)

    tuned = identity.cache_identity(engine.config, "cpu")

    assert here == moved
    assert ["model weights"] == [name for name in here if here[name] != tuned[name]]
