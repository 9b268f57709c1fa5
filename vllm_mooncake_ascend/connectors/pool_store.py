"""How the processes of an engine are clients of the pool."""

from __future__ import annotations

from vllm_mooncake_ascend.config.pool import PoolConfig
from vllm_mooncake_ascend.engines.base import KVStore
from vllm_mooncake_ascend.engines.native_store import StoreSettings
from vllm_mooncake_ascend.engines.sealed_store import SealedStore
from vllm_mooncake_ascend.engines.store import MooncakeStore


def has_seals(device_type: str) -> bool:
    """Whether objects of engines on this kind of device are sealed: where their KV memory is the host's."""
    return device_type == "cpu"


def make_store(config: PoolConfig, *, segment_bytes: int, alignment_bytes: int = 1, is_sealed: bool = False) -> KVStore:
    """A client, not connected yet.

    Args:
        segment_bytes: memory it lends to the pool.
        alignment_bytes: of the memory that will be registered.
        is_sealed: see `has_seals`; of no use to a client that neither puts nor gets.
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
    store = MooncakeStore(settings, alignment_bytes=alignment_bytes)
    return SealedStore(store) if is_sealed else store
