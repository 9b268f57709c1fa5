"""NativeEngine: one Mooncake TransferEngine object, from its making to its destruction. The only code that touches it.

What Mooncake leaves to its caller and this class settles (0.3.13.post1):
- a call before `initialize` or after the end ends the process: the object is made ready in the constructor, and no call
  passes after `destroy`;
- there is no close: the object is destroyed when its last Python reference goes. `destroy` drops ours and looks whether
  it was the last;
- destruction joins a thread that wakes once a second, with the GIL held: `listener` makes that thread wake more often;
- lists of unequal length are read out of bounds: they are built here from arrays of one length;
- its synchronous call asks for the state of every descriptor, again and again, until all are done. Over TCP that takes a core,
  and the copy half as long again: large reads are submitted and slept for (`_read_asleep`).
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines import codes, listener
from vllm_mooncake_ascend.errors import EngineError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.types import Outcome, Session

_NOT_SUBMITTED = 0
"""In the place of a batch's id, which must not be asked for: that ends the process."""
_DONE, _PENDING = 1, 0
"""Of `transfer_check_status`."""
_FAILED = -1
"""What Mooncake's synchronous call answers to whatever went wrong."""


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
    call_timeout_s: float
    """The longest a read may wait for a silent peer; a second a GB comes on top."""


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
        self._call_timeout_s = settings.call_timeout_s
        self._may_sleep = settings.protocol == "tcp"
        """Measured there alone; on Ascend a call waits in CANN."""
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
        """Read a batch; returns when it is done or failed, or the time of a call has passed. Returns the code of
        Mooncake's synchronous call."""
        if self._may_sleep and len(batch) > 2 and batch.num_bytes >= limits.MIN_SLEPT_READ_BYTES:
            return self._read_asleep(session, batch)
        return int(self._alive().batch_transfer_sync_read(session, *_lists(batch)))

    def _read_asleep(self, session: Session, batch: CopyBatch) -> int:
        """The same without a busy wait.

        Only a batch of one descriptor can be asked whether it is done without being waited for (transfer_engine_py.cpp,
        `transferCheckStatus` looks at the first). What is queued for a peer is moved in order, so the first and the last
        descriptor are batches of their own: if the first fails so would the others, one after the other; when the last is done
        so are the others, but for the few on other connections, for which Mooncake's own wait will do.

        A batch that was not seen to end is never named again: Mooncake may have freed its state. The outcome is unknown then.
        """
        engine = self._alive()
        deadline_s = time.monotonic() + self._call_timeout_s + batch.num_bytes / 1e9
        batch_ids = []
        for part in (batch.part(0, 1), batch.part(1, len(batch) - 1), batch.part(len(batch) - 1, len(batch))):
            batch_id = engine.batch_transfer_async_read(session, *_lists(part))
            if batch_id == _NOT_SUBMITTED:
                return _FAILED
            batch_ids.append(batch_id)
        first, others, last = batch_ids
        if self._is_done(first, deadline_s) and self._is_done(last, deadline_s):
            return int(engine.get_batch_transfer_status([others]))
        return _FAILED

    def _is_done(self, batch_id: int, deadline_s: float) -> bool:
        """Sleep until a batch of one descriptor is done (True) or failed, or the time has passed."""
        while (state := self._alive().transfer_check_status(batch_id)) == _PENDING and time.monotonic() < deadline_s:
            time.sleep(limits.READ_POLL_S)
        return bool(state == _DONE)

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


def _lists(batch: CopyBatch) -> tuple[list[int], list[int], list[int]]:
    return batch.local_addresses.tolist(), batch.remote_addresses.tolist(), batch.lengths_bytes.tolist()


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
