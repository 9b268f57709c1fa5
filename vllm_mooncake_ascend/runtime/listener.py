"""Listener: the one socket readers connect to, and who they are. Used by the control thread alone, after it was bound.

A port that is taken or an address that is not this machine's is the operator's error and ends the start with a message;
after that no peer can make anything here fail.
"""

from __future__ import annotations

import collections
import errno
from collections.abc import Callable, Iterator

import msgspec
import zmq

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.runtime.address_policy import AddressPolicy, resolve
from vllm_mooncake_ascend.runtime.admission import DOMAIN, Admission
from vllm_mooncake_ascend.runtime.curve import CurveKeys
from vllm_mooncake_ascend.types import PeerAddress
from vllm_mooncake_ascend.wire import params

HANDSHAKE_MS = 5_000
"""Who connects and does not finish ZMQ's handshake is dropped after this."""
SEND_QUEUE_MESSAGES = 4_096
RECEIVE_QUEUE_MESSAGES = 256
KEEPALIVE_IDLE_S = 60
"""Silence after which the kernel asks whether the other machine still exists, so that its socket can go."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where readers are to connect."""

    host: str
    port: int
    """0: any free one."""


class Listener:
    """Bound when made.

    Raises:
        ConfigError: the address cannot be listened on; says which and what to do.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listening: Listening,
        policy: AddressPolicy,
        keys: CurveKeys | None,
        count: Callable[[str, str], None],
    ) -> None:
        self.admission = Admission(context, policy, keys, count)
        self.socket = context.socket(zmq.ROUTER)
        self._readers: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        """Who has spoken; the one silent longest is forgotten first."""
        _set_options(self.socket)
        if keys is not None:
            keys.apply_to_server(self.socket)
        try:
            port = _bind(self.socket, listening)
        except ConfigError:
            self.close(linger_ms=0)
            raise
        self.address: PeerAddress = params.format_address(listening.host, port)

    def receive(self, most: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """At most `most` messages that have come: the reader's routing id and the frames."""
        for _ in range(most):
            try:
                peer, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield peer, frames

    def remember(self, reader: bytes) -> None:
        """This reader has said something sensible."""
        self._readers[reader] = None
        self._readers.move_to_end(reader)
        if len(self._readers) > limits.MAX_PEERS:
            self._readers.popitem(last=False)

    def send(self, reader: bytes, frame: bytes) -> str:
        """Queue a frame for a reader; empty, or why it was dropped (a label of `metrics.names.MESSAGES_DROPPED`)."""
        try:
            self.socket.send_multipart([reader, frame], zmq.NOBLOCK)
        except zmq.Again:
            return "queue_full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._readers.pop(reader, None)
            return "no_route"
        return ""

    def send_to_all(self, frame: bytes) -> None:
        """Queue a frame for every reader that has spoken."""
        for reader in list(self._readers):
            self.send(reader, frame)

    def close(self, *, linger_ms: int) -> None:
        self.socket.close(linger_ms)
        self.admission.close()


def _set_options(router: zmq.Socket[bytes]) -> None:
    router.router_mandatory = True
    router.sndhwm = SEND_QUEUE_MESSAGES
    router.rcvhwm = RECEIVE_QUEUE_MESSAGES
    router.maxmsgsize = limits.MAX_MESSAGE_BYTES
    router.handshake_ivl = HANDSHAKE_MS
    router.tcp_keepalive = 1
    router.tcp_keepalive_idle = KEEPALIVE_IDLE_S
    router.zap_domain = DOMAIN


def _bind(router: zmq.Socket[bytes], listening: Listening) -> int:
    addresses = resolve(listening.host)
    if not addresses:
        raise ConfigError(
            f"side_channel_host={listening.host!r} has no address; set side_channel_host in kv_connector_extra_config to an "
            "address of this machine that decode engines can reach"
        )
    router.ipv6 = ":" in addresses[0]
    endpoint = params.format_address(addresses[0], listening.port)
    try:
        router.bind(f"tcp://{endpoint}" if listening.port else f"tcp://{endpoint.removesuffix('0')}*")
    except zmq.ZMQError as error:
        raise _cannot_listen(listening, error) from error
    last_endpoint = router.last_endpoint
    assert isinstance(last_endpoint, bytes)
    return int(last_endpoint.rpartition(b":")[2])


def _cannot_listen(listening: Listening, error: zmq.ZMQError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"side_channel_port={listening.port} on {listening.host} is taken by another process; choose another, or leave "
            "side_channel_port out: then any free port is taken and told to peers"
        )
    return ConfigError(
        f"cannot listen on side_channel_host={listening.host!r}, side_channel_port={listening.port}: {error.strerror}; set "
        "side_channel_host to an address of this machine that decode engines can reach"
    )
