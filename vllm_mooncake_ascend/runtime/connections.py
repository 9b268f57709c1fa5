"""Connections: one socket to each producer this engine speaks with, and the news of those that broke.

ZMQ reconnects by itself and says nothing about it; its socket monitor does. A connection that is not up for `GRACE_S`, or
that the producer refused for good, is closed and told as lost, once. The next message to that producer opens a new one.
Used by the control thread alone.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.runtime.address_policy import AddressPolicy
from vllm_mooncake_ascend.runtime.curve import CurveKeys
from vllm_mooncake_ascend.types import PeerAddress
from vllm_mooncake_ascend.wire import params

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""A connection may be down this long; a producer that only restarts its network is back sooner, a dead one is not."""
SEND_QUEUE_MESSAGES = 4_096
RECONNECT_MS = 100
LINGER_MS = 250
"""How long closing may take to get a last Release or Goodbye out; a lost peer gets no time."""
_UNREACHABLE = "no connection to it could be made"
_NOT_UNDERSTOOD = "the cluster secrets differ, or only one side has one, or what listens there is no side channel"

_REASONS = {
    zmq.EVENT_DISCONNECTED: "it closed the connection",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: _NOT_UNDERSTOOD,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: _NOT_UNDERSTOOD,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused this engine: our address is not in its `peers`",
}
_WATCHED = functools.reduce(int.__or__, _REASONS, int(zmq.EVENT_HANDSHAKE_SUCCEEDED))


@dataclasses.dataclass(slots=True)
class _Connection:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    down_since_s: float | None
    """None while it is up."""
    reason: str = _UNREACHABLE
    is_hopeless: bool = False
    """It will not come up again by itself: no grace."""


class Connections:
    """All sockets live in `context` and are polled by `poller`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        policy: AddressPolicy,
        keys: CurveKeys | None,
    ) -> None:
        self._context = context
        self._poller = poller
        self._policy = policy
        self._keys = keys
        self._connections: dict[PeerAddress, _Connection] = {}
        self._owners: dict[zmq.Socket[bytes], PeerAddress] = {}
        """Which connection a polled socket belongs to."""

    def __len__(self) -> int:
        return len(self._connections)

    def send(self, peer: PeerAddress, frame: bytes, now_s: float) -> str:
        """Queue a frame for a producer, connecting first if need be.

        Returns:
            Empty, or why the frame was dropped: a label of `metrics.names.MESSAGES_DROPPED`.
        """
        if peer not in self._connections:
            host, _ = params.split_address(peer)
            if not self._policy.allows(host):
                return "not_allowed"
            if len(self._connections) >= limits.MAX_PEERS:
                return "queue_full"
            try:
                self._connections[peer] = self._connect(peer, host, now_s)
            except zmq.ZMQError as error:  # an address ZMQ does not take, or no descriptor is left: the peer's loss, not ours
                logger.error("no socket to a peer could be made: peer=%s error=%s", peer, error)
                return "no_route"
        try:
            self._connections[peer].socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return "queue_full"
        return ""

    def holds(self, ready: zmq.Socket[bytes]) -> bool:
        """Whether a polled socket still belongs to a connection."""
        return ready in self._owners

    def owner_of(self, ready: zmq.Socket[bytes]) -> PeerAddress | None:
        """The producer whose messages a polled socket brings; None for a monitor, which is read at once."""
        peer = self._owners[ready]
        return None if ready is self._connections[peer].monitor else peer

    def watch(self, ready: zmq.Socket[bytes], now_s: float) -> None:
        """Read what a monitor has to say."""
        connection = self._connections[self._owners[ready]]
        while ready.poll(0):
            event = zmq.Event(parse_monitor_message(ready.recv_multipart(zmq.NOBLOCK))["event"])
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                connection.down_since_s = None
                continue
            if connection.down_since_s is None or event != zmq.EVENT_DISCONNECTED:
                connection.reason = _REASONS[event]
            if connection.down_since_s is None:
                connection.down_since_s = now_s
            connection.is_hopeless |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def take_lost(self, now_s: float) -> Iterator[tuple[PeerAddress, str]]:
        """Close the connections that stayed down too long; each with its reason."""
        for peer, connection in list(self._connections.items()):
            down_since_s = connection.down_since_s
            if down_since_s is not None and (connection.is_hopeless or now_s - down_since_s >= GRACE_S):
                self.close(peer, linger_ms=0)
                yield peer, connection.reason

    def next_check_s(self) -> float | None:
        """When `take_lost` may have something new to say."""
        downs = [c.down_since_s for c in self._connections.values() if c.down_since_s is not None]
        return min(downs) + GRACE_S if downs else None

    def close(self, peer: PeerAddress, *, linger_ms: int = LINGER_MS) -> None:
        """Close the socket to a producer, if there is one. What is not sent within `linger_ms` is dropped."""
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        for polled in (connection.socket, connection.monitor):
            del self._owners[polled]
            self._poller.unregister(polled)
        connection.socket.disable_monitor()
        connection.monitor.close(0)
        connection.socket.close(linger_ms)

    def close_all(self) -> None:
        for peer in list(self._connections):
            self.close(peer)

    def _connect(self, peer: PeerAddress, host: str, now_s: float) -> _Connection:
        dealer = self._context.socket(zmq.DEALER)
        try:
            monitor = self._set_up(dealer, peer, host)
        except zmq.ZMQError:
            dealer.close(0)  # the context could not end otherwise
            raise
        for polled in (dealer, monitor):
            self._owners[polled] = peer
            self._poller.register(polled, zmq.POLLIN)
        return _Connection(socket=dealer, monitor=monitor, down_since_s=now_s)

    def _set_up(self, dealer: zmq.Socket[bytes], peer: PeerAddress, host: str) -> zmq.Socket[bytes]:
        """Connect a socket that is watched; returns its monitor."""
        dealer.sndhwm = SEND_QUEUE_MESSAGES
        dealer.maxmsgsize = limits.MAX_MESSAGE_BYTES
        dealer.reconnect_ivl = RECONNECT_MS
        dealer.ipv6 = not host.replace(".", "").isdigit()
        if self._keys is not None:
            self._keys.apply_to_client(dealer)
        monitor = dealer.get_monitor_socket(_WATCHED)
        try:
            dealer.connect(f"tcp://{peer}")
        except zmq.ZMQError:
            dealer.disable_monitor()
            monitor.close(0)
            raise
        return monitor
