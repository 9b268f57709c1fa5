"""MooncakeTransferEngine: `base.TransferEngine` on the real Mooncake.

Over TCP there are two Mooncake engines in a worker:
- the *serving* one has our memory registered and is what peers read from; it lives as long as the adapter;
- the *reading* one is made at the first read and does nothing but read. Its destruction closes every connection on which
  bytes of a failed read could still arrive, which is the only fence there is: unregistering memory is none, and neither are
  Mooncake's own timeouts. After an UNKNOWN read it is destroyed by `fence` or, at the latest, before the next read.

On Ascend one engine does both: a process may have only one, and registering twice costs its limited regions. RDMA has one,
too: destroying it waits up to 10 s with the GIL held and may leave a queue pair behind with no more than a log line
(`rdma_context.cpp`, read, not run), so it would be neither cheap nor certain. There `fence` answers False and
`limits.QUARANTINE_S` stands.

A read from a peer we have no connection to first opens its segment, which moves no byte. So an unreachable peer is a clean
FAILED, and only reads that may have moved something are UNKNOWN. Opening has a deadline of ours where engines are apart
(Mooncake would wait 61 s for a stopped peer): past it the reading engine is abandoned to the waiting thread and another
one is made.

One lock serialises everything: one thread of Mooncake moves the bytes of all reads, and no call can meet an engine that is
being destroyed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from vllm_mooncake_ascend.engines import build, codes, environment
from vllm_mooncake_ascend.engines.base import ReadResult
from vllm_mooncake_ascend.engines.deadline import call_with_deadline
from vllm_mooncake_ascend.engines.native import EngineSettings, NativeEngine
from vllm_mooncake_ascend.engines.refusal import refusal
from vllm_mooncake_ascend.engines.register import MemoryRegister
from vllm_mooncake_ascend.errors import ConfigError, EngineError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.types import Outcome, Session

_LOG = logging.getLogger(__name__)
_DONE = ReadResult(outcome=Outcome.DONE, reason="")


class MooncakeTransferEngine:
    """Transfer engine of one worker process. Make it in the thread that holds the device context (Ascend)."""

    def __init__(
        self,
        *,
        host: str,
        protocol: str,
        device_name: str = "",
        memory_location: str = "*",
        alignment_bytes: int = 1,
    ) -> None:
        """Start serving; no memory is registered yet. Adds safe MC_* defaults to this process's environment.

        Args:
            host: address of this machine under which peers reach it.
            protocol: one of `build.PROTOCOLS`.
            device_name: RDMA adapters to use, comma separated; empty: all.
            memory_location: `Device.memory_location()` of the device that holds the KV cache.
            alignment_bytes: `Device.alignment_bytes` of that device.
        Raises:
            ConfigError: the installed Mooncake or the environment cannot serve `protocol`.
            EngineError: Mooncake could not be loaded or set up.
        """
        self._call_timeout_s = _prepare_process(protocol, host)
        self._settings = EngineSettings(
            host=host,
            protocol=protocol,
            device_name=device_name,
            memory_location=memory_location,
            call_timeout_s=self._call_timeout_s,
        )
        self._reads_apart = protocol == "tcp"
        self._lock = threading.Lock()
        self._register = MemoryRegister(alignment_bytes=alignment_bytes)
        self._serving: NativeEngine | None = NativeEngine(self._settings)
        self._session = self._serving.session
        self._reading: NativeEngine | None = None if self._reads_apart else self._serving
        self._opened: set[Session] = set()
        self._is_unresolved = False
        """Some read was UNKNOWN and what it left behind has not been destroyed."""

    @property
    def session(self) -> Session:
        return self._session

    def register(self, regions: Sequence[Region]) -> None:
        with self._lock:
            if self._serving is None:
                raise EngineError("registering memory: the transfer engine is closed", outcome=Outcome.REFUSED)
            missing = self._register.missing(regions)
            if not missing:
                return
            self._register_with(self._serving, missing)
            if self._reads_apart and self._reading is not None:
                self._drop_reading_engine("more memory was registered")
            self._register.add(missing)

    def read(self, session: Session, batch: CopyBatch) -> ReadResult:
        with self._lock:
            reason = "the transfer engine is closed" if self._serving is None else refusal(session, batch, self._register)
            if reason is not None:
                return ReadResult(outcome=Outcome.REFUSED, reason=f"reading from {session!r}: {reason}")
            if len(batch) == 0:
                return _DONE
            try:
                reading = self._reading_engine()
                failure = self._open(reading, session)
            except EngineError as error:
                failure = f"making the reading engine: {error}"
            if failure is not None:
                return ReadResult(outcome=Outcome.FAILED, reason=f"reading from {session!r}: {failure}")
            return self._read(reading, session, batch)

    def fence(self) -> bool:
        with self._lock:
            if self._is_unresolved and self._reads_apart and self._reading is not None:
                self._drop_reading_engine("an earlier read may still land")
            return not self._is_unresolved

    def close(self) -> None:
        with self._lock:
            if self._serving is None:
                return
            if self._reads_apart and self._reading is not None:
                self._drop_reading_engine("closing")
            self._reading = None
            self._opened.clear()
            self._serving.destroy()
            self._serving = None

    def _reading_engine(self) -> NativeEngine:
        """The engine to read with, free of whatever an UNKNOWN read left behind where that can be had."""
        if self._reads_apart and self._is_unresolved and self._reading is not None:
            self._drop_reading_engine("an earlier read may still land")
        if self._reading is None:
            engine = NativeEngine(self._settings)
            self._register_with(engine, self._register.regions)
            self._reading = engine
        return self._reading

    def _open(self, reading: NativeEngine, session: Session) -> str | None:
        """Make sure the peer's segment is known. Returns why it cannot be, None when it is."""
        if session in self._opened:
            return None
        code: int | None
        if self._reads_apart:
            code = call_with_deadline(lambda: reading.open(session), timeout_s=self._call_timeout_s)
        else:
            code = reading.open(session)
        if code is None:
            # The thread that waits for the peer keeps the old engine alive until it returns (61 s); so at most about
            # 61 s / call timeout of them exist at once. Nothing was asked of it that could still land.
            self._reading = None
            self._opened.clear()
            return f"the peer's engine did not answer within {self._call_timeout_s:.0f} s; it is stopped or unreachable"
        if code != 0:
            return codes.explain(codes.Call.OPEN, code)
        self._opened.add(session)
        return None

    def _read(self, reading: NativeEngine, session: Session, batch: CopyBatch) -> ReadResult:
        try:
            code = reading.read(session, batch)
        except Exception:
            # A bug, perhaps after bytes began to move: the fence must not take this engine for one of which all is known.
            self._is_unresolved = True
            raise
        outcome = codes.verdict(codes.Call.READ, code).outcome
        if outcome is Outcome.DONE:
            return _DONE
        if outcome is Outcome.UNKNOWN:
            self._is_unresolved = True
            self._opened.discard(session)
        return ReadResult(outcome=outcome, reason=f"reading from {session!r}: {codes.explain(codes.Call.READ, code)}")

    def _drop_reading_engine(self, why: str) -> None:
        assert self._reading is not None, "there is one to drop"
        assert self._reading is not self._serving, "peers still read from it"
        is_gone = self._reading.destroy()
        self._reading = None
        self._opened.clear()
        self._is_unresolved = self._is_unresolved and not is_gone
        _LOG.info("reading engine destroyed why=%r is_gone=%s", why, is_gone)

    def _register_with(self, engine: NativeEngine, regions: Sequence[Region]) -> None:
        if not regions:
            return
        code = engine.register(regions)
        if code != 0:
            raise EngineError(
                f"registering {len(regions)} regions for {self._settings.protocol}: "
                + codes.explain(codes.Call.REGISTER, code),
                outcome=codes.verdict(codes.Call.REGISTER, code).outcome,
            )


def _prepare_process(protocol: str, host: str) -> float:
    """Check the build, add our defaults to the environment and check it. Returns the bound of one call in seconds."""
    objection = build.objection(build.installed_build(), protocol=protocol)
    if objection is not None:
        raise ConfigError(f"making a transfer engine: {objection}")
    os.environ.update(environment.safe_defaults(os.environ, protocol=protocol, host=host))
    for problem in environment.problems(os.environ, protocol=protocol, host=host):
        if problem.fatal:
            raise ConfigError(problem.text)
        _LOG.warning("%s", problem.text)
    return environment.call_timeout_s(os.environ)
