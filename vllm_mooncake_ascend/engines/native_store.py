"""NativeStore: one MooncakeDistributedStore object, from its setup to its close. The only code that touches it.

What Mooncake leaves to its caller and this class settles (0.3.13.post1):
- almost every call before `setup`, after `close`, or during `close` ends the process: the object is set up in the
  constructor, no call passes after `close`, and `store_client` lets nobody close while a call is under way;
- `setup` and `close` hold the GIL, `setup` for 90 s when no master listens, and 2.4 s when it is stopped: it must answer first;
- names of options differ between versions: they are looked for on the object.

Never used: `prefer_alloc_in_same_node` (a get with it does not look at the object lease) and single-buffer calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import StoreHealth, StoreKey
from vllm_mooncake_ascend.engines.master_address import silence
from vllm_mooncake_ascend.errors import EngineError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.types import Outcome

MIN_SEGMENT_BYTES = limits.SEGMENT_MIN_BYTES


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to be a client of the pool."""

    host: str
    """Address or name of this machine under which other clients reach it."""
    protocol: str
    """One of `build.PROTOCOLS`."""
    master_address: str
    """`host:port`, or Mooncake's `etcd://...`, `redis://...`, `k8s://...` for a master with stand-ins."""
    segment_bytes: int
    """Memory that this client lends to the pool; it goes with this process. 0 where other processes (`mooncake_client`) own
    all of it, or for a client that only reads."""
    device_name: str = ""
    """RDMA adapters to use, comma separated; empty: all."""
    num_replicas: int = 1
    """Copies of each object; Mooncake does its best, and reads only one of them."""
    soft_pin: bool = False
    """Evict our objects after those of others."""
    preferred_segments: tuple[str, ...] = ()
    """Names (`host:port`) of segments to put objects into if there is room. Empty: our own, if we lend memory."""
    tenant: str = ""
    """Only looked at by a master with --enable_multi_tenants."""
    reads_apart: bool = True
    """If we lend memory, get through a client of its own, so that a fence after an UNKNOWN get does not take the lent memory
    with it. Costs speed for what lies in our own segment (TCP loopback for a memcpy: about 1 GB/s for 4)."""

    def __post_init__(self) -> None:
        assert self.segment_bytes >= 0
        assert self.num_replicas >= 1


class NativeStore:
    """A client that is set up until `close`."""

    def __init__(self, settings: StoreSettings, *, segment_bytes: int) -> None:
        """`segment_bytes`: what this client lends.

        Raises:
            EngineError(FAILED): Mooncake cannot be loaded, no master listens, or it does not take us.
        """
        why = silence(settings.master_address)
        if why:
            raise EngineError(
                f"connecting to the pool's master at {settings.master_address}: {why}; check that mooncake_master runs there",
                outcome=Outcome.FAILED,
            )
        module = _load()
        store: Any = module.MooncakeDistributedStore()
        tenant = {"tenant_id": settings.tenant} if settings.tenant else {}
        code = store.setup(
            settings.host,
            "P2PHANDSHAKE",
            segment_bytes,
            0,
            settings.protocol,
            settings.device_name,
            settings.master_address,
            **tenant,
        )
        if code != 0:
            raise EngineError(_setup_failure(settings, segment_bytes, int(code)), outcome=Outcome.FAILED)
        self._store: Any = store
        self._config = _replicate_config(module, settings, own_segment=store.get_hostname() if segment_bytes else "")

    @property
    def segment_name(self) -> str:
        """Mooncake's name of this client and of the segment it lends: `host:port`."""
        return str(self._alive().get_hostname())

    def register(self, region: Region) -> int:
        """Returns Mooncake's code."""
        return int(self._alive().register_buffer(region.base_address, region.length_bytes))

    def put(self, keys: Sequence[StoreKey], batch: StoreBatch) -> list[int]:
        """Code of each key."""
        answers = self._alive().batch_put_from_multi_buffers(list(keys), batch.pointers(), batch.sizes(), self._config)
        return [int(answer) for answer in answers]

    def get(self, keys: Sequence[StoreKey], batch: StoreBatch) -> list[int]:
        """Number of bytes or code of each key. Blocks up to 60 s on an owner that is stopped (measured)."""
        answers = self._alive().batch_get_into_multi_buffers(list(keys), batch.pointers(), batch.sizes())
        return [int(answer) for answer in answers]

    def exists(self, keys: Sequence[StoreKey]) -> list[int]:
        """1, 0 or code of each key."""
        return [int(answer) for answer in self._alive().batch_is_exist(list(keys))]

    def remove(self, keys: Sequence[StoreKey], *, even_in_use: bool = False) -> list[int]:
        """Code of each key."""
        return [int(answer) for answer in self._alive().batch_remove(list(keys), even_in_use)]

    def health(self) -> StoreHealth:
        """What the client's last ping said: one a second, five seconds apart when they fail. Without a segment: CONNECTED."""
        states = {0: StoreHealth.CONNECTED, 1: StoreHealth.CLOSED}
        return states.get(int(self._alive().health_check()), StoreHealth.UNREACHABLE)

    def close(self) -> None:
        """Unmount the segment and stop. No call of another thread may be under way."""
        store, self._store = self._alive(), None
        store.close()

    def _alive(self) -> Any:
        assert self._store is not None, "no call may pass after close: it would end the process"
        return self._store


def _setup_failure(settings: StoreSettings, segment_bytes: int, code: int) -> str:
    causes = {-600: "this build of Mooncake does not serve the protocol, or a size is not valid"}
    cause = causes.get(code, "no port could be bound, the memory could not be had, or the master did not answer")
    return (
        f"becoming a client of the pool at {settings.master_address} over {settings.protocol} with {segment_bytes} bytes to "
        f"lend: setup returned {code}: {cause}; read Mooncake's own lines above with MC_LOG_LEVEL=INFO"
    )


def _replicate_config(module: Any, settings: StoreSettings, *, own_segment: str) -> Any:
    """Where to put objects, in the words of the installed version."""
    config = module.ReplicateConfig()
    config.replica_num = settings.num_replicas
    preferred = settings.preferred_segments or ((own_segment,) if own_segment else ())
    if preferred and hasattr(config, "preferred_segments"):
        config.preferred_segments = list(preferred)
    elif preferred:
        config.preferred_segment = preferred[0]
    if settings.soft_pin and hasattr(config, "soft_pin_action"):
        config.soft_pin_action = module.SoftPinAction.ENABLE
    elif settings.soft_pin:
        # Up to 0.3.12.
        config.with_soft_pin = True
    return config


def _load() -> Any:
    try:
        from mooncake import store
    except ImportError as error:
        raise EngineError(
            f"loading Mooncake Store: {error}; Debian packages it needs: libibverbs1 librdmacm1 libnuma1 libcurl4; on Ascend "
            "source CANN's set_env.sh first",
            outcome=Outcome.FAILED,
        ) from error
    return store
