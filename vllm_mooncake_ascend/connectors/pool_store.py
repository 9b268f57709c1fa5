"""How the processes of an engine are clients of the pool."""

from __future__ import annotations

from vllm_mooncake_ascend.config.pool import PoolConfig
from vllm_mooncake_ascend.engines.base import KVStore
from vllm_mooncake_ascend.engines.native_store import StoreSettings
from vllm_mooncake_ascend.engines.store import MooncakeStore


def make_store(config: PoolConfig, *, segment_bytes: int, alignment_bytes: int = 1) -> KVStore:
    """A client, not connected yet.

    Args:
        segment_bytes: memory it lends to the pool.
        alignment_bytes: of the memory that will be registered.
    Raises:
        ConfigError: the installed Mooncake or the environment cannot serve the protocol.
    """
    settings = StoreSettings(
        host=config.host,
        protocol=config.protocol,
        master_address=config.master_address,
        segment_bytes=segment_bytes,
        device_name=config.device_name,
        num_replicas=config.num_replicas,
        soft_pin=config.soft_pin,
        preferred_segments=config.preferred_segments,
        tenant=config.tenant,
        reads_apart=config.reads_apart,
    )
    return MooncakeStore(settings, alignment_bytes=alignment_bytes)
