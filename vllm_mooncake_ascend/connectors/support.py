"""What is refused at start, by name. The README's support table says the same in the user's words."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from vllm_mooncake_ascend.config.pool import PoolConfig
from vllm_mooncake_ascend.connectors import kv_cache
from vllm_mooncake_ascend.errors import ConfigError

logger = logging.getLogger(__name__)


def refuse_unsupported(connector: str, vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise for everything this version cannot move correctly.

    Raises:
        ConfigError: names each unsupported setting and the way round it.
    """
    found = [*_unsupported_settings(vllm_config), *_unsupported_caches(kv_cache_config)]
    if found:
        raise ConfigError(f"{connector} cannot serve this engine: " + "; ".join(found))


def pool_settings(vllm_config: Any, config: PoolConfig, *, device_type: str) -> PoolConfig:
    """The settings of the pool as far as this engine can follow them.

    Raises:
        ConfigError: what this engine computes of a prefix is of no use to another prompt, or nobody is to use it.
    """
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "the prefix pool needs prefix caching, which is off: --no-enable-prefix-caching is set, or vLLM knows that a "
            "prompt of this model cannot start from another's KV (non-causal attention, mean or CLS pooling; its log says so); "
            "remove that setting, or start this engine without the pool"
        )
    role = vllm_config.kv_transfer_config
    if config.loads and device_type != "cpu" and not role.is_kv_consumer and vllm_config.max_concurrent_batches > 1:
        # Scheduler.defer_block_free: for a consumer vLLM keeps the blocks of an ended request until the step under way has
        # written its last to them. On CPU a step ends before the next one begins.
        logger.warning(
            "prefix pool: this engine saves and does not load: with kv_role %s and asynchronous scheduling vLLM gives out "
            "blocks that a step under way still writes to; set kv_role to kv_both to load, too",
            role.kv_role,
        )
        return msgspec.structs.replace(config, loads=False)
    return config


def _unsupported_settings(vllm_config: Any) -> list[str]:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    checks = {
        "speculative decoding (draft layers may be written after the token was reported): start without "
        "--speculative-config": vllm_config.speculative_config is not None,
        "pipeline parallelism: use tensor parallelism only": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism: use --prefill-context-parallel-size 1": (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1
        ),
        "decode context parallelism: use --decode-context-parallel-size 1": (
            getattr(parallel, "decode_context_parallel_size", 1) > 1
        ),
        "sleep mode (memory would be unmapped while peers may read it): start without --enable-sleep-mode": (
            bool(getattr(model, "enable_sleep_mode", False))
        ),
        "encoder-decoder models": bool(getattr(model, "is_encoder_decoder", False)),
        "KV scales of this engine's own first prompts (another engine's differ): start without --calculate-kv-scales": (
            bool(getattr(vllm_config.cache_config, "calculate_kv_scales", False))
        ),
    }
    return [name for name, applies in checks.items() if applies]


def _unsupported_caches(kv_cache_config: Any) -> list[str]:
    if kv_cache_config is None:
        return []
    found = []
    groups = kv_cache.describe_groups(kv_cache_config)
    if len(groups) > 1:
        kinds = ", ".join(sorted({group.kind for group in groups}))
        found.append(
            f"several KV cache groups ({len(groups)}: {kinds}): models that mix attention kinds are not supported yet; "
            "with sliding windows only, --disable-hybrid-kv-cache-manager makes one group"
        )
    found.extend(
        f"KV cache kind {group.kind}: only full attention and MLA are supported yet"
        for group in groups
        if group.kind not in kv_cache.SUPPORTED_KINDS
    )
    return sorted(set(found))
