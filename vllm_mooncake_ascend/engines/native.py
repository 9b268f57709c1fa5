"""NativeEngine: one Mooncake TransferEngine object, from its making to its destruction. The only code that touches it.

What Mooncake leaves to its caller and this class settles (0.3.13.post1):
- a call before `initialize` or after the end ends the process: the object is made ready in the constructor, and no call
  passes after `destroy`;
- there is no close: the object is destroyed when its last Python reference goes. `destroy` drops ours and looks whether
  it was the last;
- destruction joins a thread that wakes once a second, with the GIL held: `listener` makes that thread wake more often;
- lists of unequal length are read out of bounds: they are built here from arrays of one length.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_mooncake_ascend.engines import codes, listener
from vllm_mooncake_ascend.errors import EngineError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.types import Outcome, Session


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to make an engine."""

    host: str
    """Address or name of this machine under which peers reach it."""
    protocol: str
    """One of `build.PROTOCOLS`."""
    device_name: str
    """RDMA adapters to use, comma separated; empty: all."""
    memory_location: str
    """Mooncake's word for where registered memory lies: `npu:0`, `cpu:0`, or `*`: Mooncake looks itself."""


class NativeEngine:
    """A Mooncake engine that is ready for use until `destroy`."""

    def __init__(self, settings: EngineSettings) -> None:
        """Raises EngineError(FAILED) when Mooncake cannot be loaded or set up."""
        engine: Any = _load()()
        code = engine.initialize(settings.host, "P2PHANDSHAKE", settings.protocol, settings.device_name)
        if code != 0:
            raise EngineError(
                f"making a transfer engine for {settings.protocol} on {settings.host}: "
                + codes.explain(codes.Call.INITIALIZE, code),
                outcome=codes.verdict(codes.Call.INITIALIZE, code).outcome,
            )
        self._engine: Any = engine
        self._last_seen = weakref.ref(engine)
        self._memory_location = settings.memory_location
        port = engine.get_rpc_port()
        listener.wake_often(port)
        self._session = _session(settings.host, port)

    @property
    def session(self) -> Session:
        """Where peers find this engine. A port of its own for each engine."""
        return self._session

    def register(self, regions: Sequence[Region]) -> int:
        """Register all of `regions` or none. Returns Mooncake's code."""
        addresses = [region.base_address for region in regions]
        lengths_bytes = [region.length_bytes for region in regions]
        return int(self._alive().batch_register_memory(addresses, lengths_bytes, self._memory_location))

    def open(self, session: Session) -> int:
        """Fetch the segment of a peer if this engine has not yet: a read of nothing. Returns Mooncake's code.

        Blocks up to 61 s on a peer that is stopped (measured): Mooncake waits that long for the exchange.
        """
        return int(self._alive().batch_transfer_sync_read(session, [], [], []))

    def read(self, session: Session, batch: CopyBatch) -> int:
        """Read a batch; busy until it is done, failed or MC_TRANSFER_TIMEOUT passed. Returns Mooncake's code."""
        return int(
            self._alive().batch_transfer_sync_read(
                session,
                batch.local_addresses.tolist(),
                batch.remote_addresses.tolist(),
                batch.lengths_bytes.tolist(),
            )
        )

    def destroy(self) -> bool:
        """End the engine. True when it is certainly gone: its connections closed, its threads joined.

        False while a thread is still inside one of its calls; it then goes when that call returns.
        """
        self._engine = None
        if self._last_seen() is not None:
            gc.collect()
        return self._last_seen() is None

    def _alive(self) -> Any:
        assert self._engine is not None, "no call may pass after destroy: it would end the process"
        return self._engine


def _load() -> Any:
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise EngineError(
            f"loading Mooncake Transfer Engine: {error}; Debian packages it needs: libibverbs1 librdmacm1 libnuma1 "
            "libcurl4; on Ascend source CANN's set_env.sh first",
            outcome=Outcome.FAILED,
        ) from error
    return TransferEngine


def _session(host: str, port: int) -> Session:
    return Session(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
