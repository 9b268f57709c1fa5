"""Farewells: releases as they go over the side channels of prefill engines.

The proxy is a reader that never reads: it says Release under an incarnation of its own and with an empty request id. A
producer ends the transfer when no decode engine has subscribed to it; one that has is not disturbed. The answer is:

    Verdict      of this transfer: done
    Gone         of this transfer: it was over already
    Welcome      of another incarnation: the engine was restarted and holds nothing any more
    Goodbye      the engine shuts down, or does not speak with us: failed
    (nothing)    sent again each `limits.RESEND_S`, failed after `limits.PEER_ANSWER_S`

One socket a producer while releases to it are under way, none otherwise: thousands of clients may leave at once, and a
producer that is dead must not hold up the releases to others. (`runtime.release.send_release` says the same for one that
can wait, with a socket of its own.) Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from typing import cast

import zmq
import zmq.asyncio

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import PeerLost, RemoteProtocolError
from vllm_mooncake_ascend.proxy.rewrite import JsonObject
from vllm_mooncake_ascend.runtime.curve import CurveKeys, curve_keys
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire import codec, messages
from vllm_mooncake_ascend.wire import params as wire_params

NO_READER = RequestId("")
SENDS = int(limits.PEER_ANSWER_S / limits.RESEND_S)


class Farewells:
    """Delivers releases; a `release.ReleaseSender`."""

    def __init__(self, cluster_secret: bytes | None) -> None:
        self._context = zmq.asyncio.Context()
        self._context.max_sockets = limits.MAX_PEERS
        self._keys = curve_keys(cluster_secret)
        self._incarnation = Incarnation(uuid.uuid4().hex)
        self.links: dict[PeerAddress, _Link] = {}
        """Producers that releases are under way to."""

    async def release(self, params: JsonObject) -> None:
        """See `ReleaseSender.release`."""
        transfer = wire_params.parse(params, secret=None, now_s=0.0)  # from prefill itself: decode checks its signature
        if not isinstance(transfer, wire_params.RemotePrefill):
            raise RemoteProtocolError("prefill's kv_transfer_params name no transfer, so there is none to release")
        frame = codec.encode(
            messages.Release(
                incarnation=self._incarnation,
                expected=transfer.incarnation,
                transfer_id=transfer.transfer_id,
                request_id=NO_READER,
            )
        )
        await self._link_to(transfer.address).say(transfer.transfer_id, transfer.incarnation, frame)

    async def close(self) -> None:
        """See `ReleaseSender.close`."""
        for link in list(self.links.values()):
            await link.close()
        self._context.destroy(linger=0)

    def _link_to(self, address: PeerAddress) -> _Link:
        link = self.links.get(address)
        if link is None:
            socket = _connected(self._context, address, self._keys)
            link = _Link(socket, address, on_close=lambda: self.links.pop(address, None))
            self.links[address] = link
        return link


class _Link:
    """The socket to one producer, and who waits for its answers."""

    def __init__(self, socket: zmq.asyncio.Socket, address: PeerAddress, on_close: Callable[[], object]) -> None:
        self._socket = socket
        self._address = address
        self._on_close = on_close
        self._waiting: dict[TransferId, tuple[Incarnation, asyncio.Future[None]]] = {}
        self._listener = asyncio.create_task(self._listen())

    async def say(self, transfer_id: TransferId, expected: Incarnation, frame: bytes) -> None:
        """Send `frame` until it is answered.

        Raises:
            PeerLost: it was not, or the producer refused us.
        """
        if transfer_id in self._waiting:
            return await asyncio.shield(self._waiting[transfer_id][1])  # the same is being said already
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[transfer_id] = (expected, answered)
        try:
            for _ in range(SENDS):
                await self._send(frame)
                await asyncio.wait([answered], timeout=limits.RESEND_S)
                if answered.done():
                    return answered.result()
            raise PeerLost(f"prefill engine at {self._address} left a release unanswered for {limits.PEER_ANSWER_S:.0f} s")
        finally:
            answered.cancel()
            self._waiting.pop(transfer_id, None)
            if not self._waiting:
                await self.close()

    async def close(self) -> None:
        """Close the socket; whoever still waits is told that there is no answer."""
        self._on_close()
        self._tell_all(PeerLost(f"the side channel to {self._address} is closed"))
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        self._socket.close(linger=0)

    async def _send(self, frame: bytes) -> None:
        try:
            await self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            pass  # its queue is full: the next turn tries again

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                self._hear(codec.decode_from_producer(frames[0]))
            except RemoteProtocolError as error:
                self._tell_all(PeerLost(f"what listens at {self._address} speaks no side channel of ours: {error}"))

    def _hear(self, message: messages.FromProducer) -> None:
        match message:
            case messages.Verdict(transfer_id=transfer_id) | messages.Gone(transfer_id=transfer_id):
                if transfer_id in self._waiting:
                    _set(self._waiting[transfer_id][1], None)
            case messages.Welcome(incarnation=incarnation):
                for expected, answered in self._waiting.values():
                    if expected != incarnation:
                        _set(answered, None)
            case messages.Goodbye(reason=reason):
                self._tell_all(PeerLost(f"prefill engine at {self._address} refuses: {reason}"))
            case messages.Offer() | messages.Renewed():
                pass  # we subscribe to nothing and renew nothing

    def _tell_all(self, error: PeerLost) -> None:
        for _, answered in self._waiting.values():
            _set(answered, error)


def _set(answered: asyncio.Future[None], error: PeerLost | None) -> None:
    """Answer once; what comes twice changes nothing."""
    if answered.done():
        return
    if error is None:
        answered.set_result(None)
    else:
        answered.set_exception(error)


def _connected(context: zmq.asyncio.Context, address: PeerAddress, keys: CurveKeys | None) -> zmq.asyncio.Socket:
    host, _ = wire_params.split_address(address)
    try:
        socket = context.socket(zmq.DEALER)
    except zmq.ZMQError as error:  # no more files, or sockets of this context
        raise PeerLost(f"no socket can be had to speak to the prefill engine at {address}: {error}") from error
    socket.linger = 0
    socket.maxmsgsize = limits.MAX_MESSAGE_BYTES
    socket.ipv6 = not host.replace(".", "").isdigit()
    if keys is not None:
        keys.apply_to_client(cast("zmq.Socket[bytes]", socket))  # options are set alike on both kinds of socket
    socket.connect(f"tcp://{address}")
    return socket
