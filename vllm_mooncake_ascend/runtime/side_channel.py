"""SideChannel: the sockets of one engine's side channel and the one control thread that owns them.

It listens for readers (where the engine produces), connects to producers (where it consumes), turns frames into messages
and hands them to its owner, sends what it is given, and calls its owner when a timer is due. It knows no machine.

Rules:
- No peer can stop the thread: a frame that is no message is counted and dropped, a huge one ends its connection. A
  producer that sends what is no message is told to the owner as lost, with what was wrong.
- Nothing waits for a peer: sends never block, full queues drop and count, sockets close within `LINGER_MS`.
- While the owner is crowded, readers' frames are dropped as they come: a reader repeats what matters.
- An exception of the owner, or a bug here, ends the thread loudly: it is logged and handed to the owner.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Protocol

import zmq

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.p2p import actions
from vllm_mooncake_ascend.runtime.address_policy import AddressPolicy
from vllm_mooncake_ascend.runtime.clock import boot_s
from vllm_mooncake_ascend.runtime.connections import LINGER_MS, Connections
from vllm_mooncake_ascend.runtime.curve import CurveKeys
from vllm_mooncake_ascend.runtime.doorbell import Doorbell
from vllm_mooncake_ascend.runtime.inbox import Inbox
from vllm_mooncake_ascend.runtime.listener import Listener, Listening
from vllm_mooncake_ascend.types import Incarnation, PeerAddress
from vllm_mooncake_ascend.wire import codec
from vllm_mooncake_ascend.wire.messages import FromProducer, FromReader, Goodbye

logger = logging.getLogger(__name__)

JOIN_S = 5.0
FRAMES_PER_TURN = 256
"""Frames taken from one socket before the others, timers and sends get their turn."""
MIN_WAIT_S = 0.001
"""Floor of a wait for a timer, so that a timer that stays due cannot make the thread spin."""

_HOPELESS = {
    "not_allowed": "it is neither this host nor listed in `peers`",
    "no_route": "no socket to it could be made",
}
"""Why nothing can be sent to a producer, however often it is tried."""

Outgoing = actions.SendToReader | actions.SendToProducer | actions.ClosePeer


class Owner(Protocol):
    """Who is told what happens. All calls come from the control thread."""

    def reader_spoke(self, peer: bytes, message: FromReader) -> None: ...

    def producer_spoke(self, peer: PeerAddress, message: FromProducer) -> None: ...

    def peer_disconnected(self, peer: PeerAddress, reason: str) -> None: ...

    def fire_timers(self) -> float | None:
        """Do what is due; returns seconds until the next time, None: never."""

    def is_crowded(self) -> bool:
        """Readers' messages cannot be taken now."""

    def count(self, name: str, label: str = "") -> None: ...

    def channel_failed(self, error: BaseException) -> None:
        """The thread has ended by an exception."""


class SideChannel:
    """One per scheduler-role connector. `submit`, `wake` and `close` may be called from any thread.

    Args:
        listening: where to listen for readers; None for an engine that only consumes. Bound at once.
        keys: of the cluster, None without a secret.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(
        self,
        owner: Owner,
        incarnation: Incarnation,
        *,
        listening: Listening | None,
        policy: AddressPolicy,
        keys: CurveKeys | None,
    ) -> None:
        self.policy = policy
        self._owner = owner
        self._incarnation = incarnation
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.max_sockets = 4 * limits.MAX_PEERS
        self._poller = zmq.Poller()
        self._doorbell = Doorbell()
        self._outbox: Inbox[Outgoing] = Inbox(capacity=limits.MAX_INBOX)
        self._connections = Connections(self._context, self._poller, policy, keys)
        self._listener: Listener | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mooncake-ascend-side-channel", daemon=True)
        try:
            if listening is not None:
                self._listener = Listener(self._context, listening, policy, keys, owner.count)
        except BaseException:
            self._close_sockets()
            raise
        self._poller.register(self._doorbell.fd, zmq.POLLIN)
        if self._listener is not None:
            self._poller.register(self._listener.admission.socket, zmq.POLLIN)
            self._poller.register(self._listener.socket, zmq.POLLIN)

    # --- from any thread ------------------------------------------------------------------------------------------

    @property
    def address(self) -> PeerAddress | None:
        """Where readers reach this engine; None where it does not listen."""
        return None if self._listener is None else self._listener.address

    def start(self) -> None:
        self._thread.start()

    def submit(self, outgoing: Outgoing) -> None:
        """Send, or close, soon and in order; dropped and counted when too much is waiting."""
        if not self._outbox.put(outgoing):
            self._owner.count(names.MESSAGES_DROPPED, "queue_full")
            return
        self.wake()

    def wake(self) -> None:
        """Let the thread ask `fire_timers` again."""
        if threading.current_thread() is not self._thread:
            self._doorbell.ring()

    def close(self) -> None:
        """Say Goodbye to readers, end the thread and close all sockets. A second call does nothing."""
        self._stopping.set()
        self._doorbell.ring()
        if self._thread.ident is None:
            self._close_sockets()
        elif self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                logger.error("the side channel's thread did not end within %.0f s", JOIN_S)

    # --- the control thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
            self._flush()
            self._say_goodbye()
        except Exception as error:  # the thread's outermost loop: it ends, and everybody hears of it
            logger.exception("the side channel has failed; no KV can be transferred until this engine is restarted")
            self._owner.channel_failed(error)
        finally:
            self._close_sockets()

    def _turn(self) -> None:
        wait_s = self._do_what_is_due()
        timeout_ms = None if wait_s is None else math.ceil(wait_s * 1e3)
        for ready, _ in self._poller.poll(timeout_ms):
            self._serve(ready)

    def _do_what_is_due(self) -> float | None:
        """Returns how long there is nothing to do unless something comes; None: for ever."""
        for peer, reason in self._connections.take_lost(boot_s()):
            self._owner.peer_disconnected(peer, reason)
        timer_wait_s = self._owner.fire_timers()
        self._flush()
        check_s = self._connections.next_check_s()
        waits = [timer_wait_s, None if check_s is None else check_s - boot_s()]
        return min((max(wait_s, MIN_WAIT_S) for wait_s in waits if wait_s is not None), default=None)

    def _serve(self, ready: zmq.Socket[bytes] | int) -> None:
        if ready == self._doorbell.fd:
            self._doorbell.hush()
        elif self._listener is not None and ready is self._listener.socket:
            self._hear_readers(self._listener)
        elif self._listener is not None and ready is self._listener.admission.socket:
            self._listener.admission.answer()
        else:
            assert not isinstance(ready, int), ready
            self._hear_connection(ready)

    # --- hearing ----------------------------------------------------------------------------------------------------

    def _hear_readers(self, listener: Listener) -> None:
        for reader, frames in listener.receive(FRAMES_PER_TURN):
            if self._owner.is_crowded():
                self._owner.count(names.MESSAGES_DROPPED, "crowded")
            elif len(frames) != 1:
                self._owner.count(names.MESSAGES_DROPPED, "frames")
            else:
                self._hear_reader(listener, reader, frames[0])

    def _hear_reader(self, listener: Listener, reader: bytes, frame: bytes) -> None:
        try:
            message = codec.decode_from_reader(frame)
        except VersionMismatch as error:
            self._owner.count(names.MESSAGES_DROPPED, "version")
            listener.send(reader, codec.encode(Goodbye(incarnation=self._incarnation, reason=str(error))))
        except RemoteProtocolError as error:
            self._owner.count(names.MESSAGES_DROPPED, "malformed")
            logger.debug("a frame from a reader was dropped: reader=%s reason=%s", reader.hex(), error)
        else:
            listener.remember(reader)
            self._owner.count(names.MESSAGES_RECEIVED)
            self._owner.reader_spoke(reader, message)

    def _hear_connection(self, ready: zmq.Socket[bytes]) -> None:
        if not self._connections.holds(ready):  # closed by what another socket of this turn brought
            return
        peer = self._connections.owner_of(ready)
        if peer is None:
            self._connections.watch(ready, boot_s())
            return
        for _ in range(FRAMES_PER_TURN):
            try:
                frames = ready.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not self._hear_producer(peer, frames):
                return

    def _hear_producer(self, peer: PeerAddress, frames: list[bytes]) -> bool:
        """Returns whether the connection still stands."""
        try:
            if len(frames) != 1:
                raise RemoteProtocolError(f"a message has one frame, got {len(frames)}")
            message = codec.decode_from_producer(frames[0])
        except RemoteProtocolError as error:
            self._owner.count(names.MESSAGES_DROPPED, "version" if isinstance(error, VersionMismatch) else "malformed")
            self._connections.close(peer, linger_ms=0)
            self._owner.peer_disconnected(peer, str(error))
            return False
        self._owner.count(names.MESSAGES_RECEIVED)
        self._owner.producer_spoke(peer, message)
        return True

    # --- sending ----------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        for outgoing in self._outbox.drain():
            if isinstance(outgoing, actions.ClosePeer):
                self._connections.close(outgoing.peer)
                continue
            try:
                frame = codec.encode(outgoing.message)
            except LocalProtocolError as error:
                self._owner.count(names.MESSAGES_DROPPED, "not_sendable")
                logger.error("a message was not sent: %s", error)
                continue
            dropped = self._send(outgoing, frame)
            if dropped:
                self._owner.count(names.MESSAGES_DROPPED, dropped)

    def _send(self, outgoing: actions.SendToReader | actions.SendToProducer, frame: bytes) -> str:
        if isinstance(outgoing, actions.SendToReader):
            return "no_route" if self._listener is None else self._listener.send(outgoing.peer, frame)
        dropped = self._connections.send(outgoing.peer, frame, boot_s())
        if dropped in _HOPELESS:
            self._owner.peer_disconnected(outgoing.peer, _HOPELESS[dropped])
        return dropped

    def _say_goodbye(self) -> None:
        if self._listener is not None:
            goodbye = Goodbye(incarnation=self._incarnation, reason="this engine shuts down")
            self._listener.send_to_all(codec.encode(goodbye))

    def _close_sockets(self) -> None:
        self._connections.close_all()
        if self._listener is not None:
            self._listener.close(linger_ms=LINGER_MS)
        self._doorbell.close()
        self._context.term()
