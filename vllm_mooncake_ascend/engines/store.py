"""MooncakeStore: `engines.base.KVStore` on real Mooncake Store. The pool's calls, guarded.

It has one client, or two: where it lends memory and `reads_apart`, gets and lookups have a client of their own that lends
none. After an UNKNOWN get the fence is the close of that client, and the objects in the memory we lend stay in the pool.
(Nothing landed in what was watched after such a close. Without it most of the bytes did, 160 s after the owner was stopped
and 100 s after the get had failed: there is no time after which they cannot.)

An UNKNOWN put is not fenced where that would take the memory we lend with it: one owner's death would empty the memory of all
who put something to it. Mooncake may read its source for as long, and send what it finds there to memory that others use by
then; `sealed_store` is what makes that harmless.

Before each call the health of the client that lends memory is looked at, which costs nothing: with the master dead a call
takes 4 s to say so. Calls soon after its death still find out the hard way, because that health is seconds old; they say
`is_lost`, and what to do about it is the breaker's business, not ours. A client that lends nothing never pings the master
(Mooncake 0.3.13 starts that with the first segment), and takes itself for healthy for ever; where we have no other, `health`
asks the master by a lookup.

While the master cannot be reached, `health` also looks whether a new one has come behind its name (`master_address`), and then
closes the clients, so that `connect` finds it. Where memory is lent that close holds the GIL for up to 9 s (measured), so
Mooncake gets its chance to follow first.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines import build, environment, master_address, store_codes
from vllm_mooncake_ascend.engines.base import KeyOutcome, KeyResult, StoreAnswer, StoreHealth, StoreKey
from vllm_mooncake_ascend.engines.master_address import MasterWatch, Resolver
from vllm_mooncake_ascend.engines.native_store import MIN_SEGMENT_BYTES, NativeStore, StoreSettings
from vllm_mooncake_ascend.engines.register import MemoryRegister
from vllm_mooncake_ascend.engines.store_client import StoreClient
from vllm_mooncake_ascend.engines.store_codes import StoreCall
from vllm_mooncake_ascend.engines.store_refusal import data_refusal, lookup_refusal, removal_refusal
from vllm_mooncake_ascend.errors import ConfigError, EngineError
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.types import Outcome

_LOG = logging.getLogger(__name__)
_NO_KEY = "mooncake-ascend-health"
"""Nobody puts this."""


class MooncakeStore:
    """Client of one pool. Make it in the thread that holds the device context (Ascend)."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        alignment_bytes: int = 1,
        resolve: Resolver = master_address.resolve,
    ) -> None:
        """Not connected yet. Adds safe MC_* defaults to this process's environment.

        Args:
            settings: which pool, and what we lend to it.
            alignment_bytes: `Device.alignment_bytes` of the device whose memory will be registered.
            resolve: how the master's name is looked up.
        Raises:
            ConfigError: the installed Mooncake or the environment cannot serve the protocol.
        """
        _prepare_process(settings)
        self._settings = settings
        self._lock = threading.Lock()
        """Of everything but calls of put, get, exists and remove."""
        self._register_lock = threading.Lock()
        """Held for moments."""
        self._register = MemoryRegister(alignment_bytes=alignment_bytes)
        self._serving = StoreClient(settings, segment_bytes=settings.segment_bytes)
        has_two = settings.reads_apart and settings.segment_bytes > 0
        self._reading = StoreClient(settings, segment_bytes=0) if has_two else self._serving
        self._is_closed = False
        self._watch = MasterWatch(settings.master_address, resolve)
        self._is_leaving = False
        """The clients are to be closed before any connects again."""

    def connect(self) -> None:
        with self._lock:
            if self._is_closed:
                raise EngineError("connecting to the pool: the store is closed", outcome=Outcome.REFUSED)
            if not any(client.is_connected for client in self._clients()):
                self._watch.note_connecting()
            for client in self._clients():
                if not client.is_connected:
                    client.connect(self._register.regions)
                    _LOG.info("connected to the pool master=%s", self._settings.master_address)

    def register(self, regions: Sequence[Region]) -> None:
        with self._lock:
            if self._is_closed:
                raise EngineError("registering memory: the store is closed", outcome=Outcome.REFUSED)
            for region in self._register.missing(regions):
                for client in self._clients():
                    client.register(region)
                with self._register_lock:
                    self._register.add([region])

    def put(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        refusal = self._data_refusal(keys, batch)
        if refusal is not None:
            return _all(keys, store_codes.refused(f"putting {len(keys)} keys: {refusal}"))
        return self._ask(self._serving, StoreCall.PUT, keys, lambda native: native.put(keys, batch), store_codes.put_result)

    def get(self, keys: Sequence[StoreKey], batch: StoreBatch) -> StoreAnswer:
        refusal = self._data_refusal(keys, batch)
        if refusal is not None:
            return _all(keys, store_codes.refused(f"getting {len(keys)} keys: {refusal}"))

        def result(answer: int) -> KeyResult:
            return store_codes.get_result(answer, value_bytes=batch.value_bytes)

        return self._ask(self._reading, StoreCall.GET, keys, lambda native: native.get(keys, batch), result)

    def exists(self, keys: Sequence[StoreKey]) -> StoreAnswer:
        refusal = lookup_refusal(keys)
        if refusal is not None:
            return _all(keys, store_codes.refused(f"looking {len(keys)} keys up: {refusal}"))
        return self._ask(self._reading, StoreCall.EXISTS, keys, lambda native: native.exists(keys), store_codes.exists_result)

    def remove(self, keys: Sequence[StoreKey], *, prefix: str, even_in_use: bool = False) -> StoreAnswer:
        refusal = removal_refusal(keys, prefix)
        if refusal is not None:
            return _all(keys, store_codes.refused(f"removing {len(keys)} keys: {refusal}"))

        def ask(native: NativeStore) -> list[int]:
            return native.remove(keys, even_in_use=even_in_use)

        return self._ask(self._serving, StoreCall.REMOVE, keys, ask, store_codes.remove_result)

    def health(self) -> StoreHealth:
        if not self._is_leaving:
            health = self._health()
            if not self._watch.is_left_behind(health):
                return health
            self._is_leaving = True
        return self._leave()

    def fence(self) -> bool:
        with self._lock:
            return not self._reading.is_unresolved or self._fence(self._reading)

    def close(self) -> bool:
        with self._lock:
            self._is_closed = True
            are_closed = [client.close(wait_s=limits.STORE_CALL_S) for client in self._clients()]
        if not all(are_closed):
            _LOG.error("a call to the pool does not end, so its client stays open")
        return all(are_closed)

    def _health(self) -> StoreHealth:
        if not all(client.is_connected for client in self._clients()):
            return StoreHealth.CLOSED
        if self._settings.segment_bytes > 0:
            return self._serving.health()
        return StoreHealth.CONNECTED if self._has_master() else StoreHealth.UNREACHABLE

    def _has_master(self) -> bool:
        """Ask it."""
        return not master_address.silence(self._settings.master_address) and not self.exists((_NO_KEY,)).is_lost

    def _leave(self) -> StoreHealth:
        """Close all clients; those of calls under way are asked again."""
        with self._lock:
            self._is_leaving = not all([client.close(wait_s=0.0) for client in self._clients()])
        if self._is_leaving:
            return StoreHealth.UNREACHABLE
        _LOG.warning("the master of the pool has moved; connecting anew to master=%s", self._settings.master_address)
        return StoreHealth.CLOSED

    def _clients(self) -> tuple[StoreClient, ...]:
        """The serving one first: what it lends is there when the other one asks."""
        return (self._serving,) if self._serving is self._reading else (self._serving, self._reading)

    def _ask(
        self,
        client: StoreClient,
        call: StoreCall,
        keys: Sequence[StoreKey],
        ask: Callable[[NativeStore], list[int]],
        result: Callable[[int], KeyResult],
    ) -> StoreAnswer:
        """Make one call, if there is a client and a master, and translate what it answers."""
        if not keys:
            return StoreAnswer(results=(), is_lost=False)
        if self._settings.segment_bytes > 0 and self._serving.health() is StoreHealth.UNREACHABLE:
            return _all(keys, store_codes.refused("the master of the pool does not answer"), is_lost=True)
        with client.call() as native:
            if native is None:
                return _all(keys, store_codes.refused("there is no connection to the pool; `connect` makes one"), is_lost=True)
            try:
                answers = ask(native)
            except Exception:
                # A bug, perhaps after bytes began to move: the fence must not take this client for one of which all is known.
                client.note_unknown()
                raise
            if len(answers) == len(keys):
                results = tuple(map(result, answers))
            else:
                results = (store_codes.unanswered(call, len(answers), len(keys)),) * len(keys)
            if call in store_codes.MOVES_BYTES and any(one.outcome is KeyOutcome.UNKNOWN for one in results):
                client.note_unknown()
        is_lost = any(map(store_codes.is_lost, answers))
        if is_lost and call is StoreCall.GET:
            # The owner of an SSD tier that does not answer gives the same codes.
            is_lost = not self._has_master()
        return StoreAnswer(results=results, is_lost=is_lost)

    def _data_refusal(self, keys: Sequence[StoreKey], batch: StoreBatch) -> str | None:
        with self._register_lock:
            return data_refusal(keys, batch, self._register)

    def _fence(self, client: StoreClient) -> bool:
        if not client.close(wait_s=0.0):
            return False
        _LOG.info("client of the pool closed why='an earlier call may still move bytes'")
        # All clients must have the same master: when it has moved, `health` closes the others too.
        self._is_leaving = self._is_leaving or self._watch.has_moved()
        if not self._is_closed and not self._is_leaving:
            try:
                client.connect(self._register.regions)
            except EngineError as error:
                _LOG.warning("the pool cannot be used for now: %s", error)
        return True


def _all(keys: Sequence[StoreKey], result: KeyResult, *, is_lost: bool = False) -> StoreAnswer:
    return StoreAnswer(results=(result,) * len(keys), is_lost=is_lost)


def _prepare_process(settings: StoreSettings) -> None:
    """Check the build, add our defaults to the environment and check it."""
    objection = build.objection(build.installed_build(), protocol=settings.protocol)
    if objection is not None:
        raise ConfigError(f"using the pool: {objection}")
    if 0 < settings.segment_bytes < MIN_SEGMENT_BYTES:
        raise ConfigError(
            f"lending {settings.segment_bytes} bytes to the pool: Mooncake takes {MIN_SEGMENT_BYTES} (16 MiB) or more, or 0"
        )
    os.environ.update(environment.safe_defaults(os.environ, protocol=settings.protocol, host=settings.host))
    os.environ.update(environment.store_defaults(os.environ))
    for problem in environment.problems(os.environ, protocol=settings.protocol, host=settings.host):
        if problem.fatal:
            raise ConfigError(problem.text)
        _LOG.warning("%s", problem.text)
