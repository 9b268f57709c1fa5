"""Admission: who may connect to the side channel. Answers ZMQ's own question (ZAP) before a peer can send a byte to us.

Without keys the address decides; with keys the peer must hold the cluster's client key, and the address decides too
where `peers` is set. Source: ZMQ RFC 27 (ZAP 1.0).
"""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils import z85

from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.runtime.address_policy import AddressPolicy
from vllm_mooncake_ascend.runtime.curve import CurveKeys

DOMAIN = b"vllm_mooncake_ascend"
_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_NUM_FIXED_FRAMES = 6


class Admission:
    """Answers the questions of one ZMQ context; made before its listening socket is bound, used by the thread that polls it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        policy: AddressPolicy,
        keys: CurveKeys | None,
        count: Callable[[str, str], None],
    ) -> None:
        self._policy = policy
        self._client_key = None if keys is None else z85.decode(keys.client.public)
        self._count = count
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ENDPOINT)

    def answer(self) -> None:
        """Answer the one question that is waiting."""
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        refusal = self._refusal(frames)
        if refusal:
            self._count(names.CONNECTIONS_REFUSED, refusal)
        status = [b"400", refusal.encode()] if refusal else [b"200", b""]
        self.socket.send_multipart([_VERSION, frames[1] if len(frames) > 1 else b"", *status, b"", b""])

    def close(self) -> None:
        self.socket.close()

    def _refusal(self, frames: list[bytes]) -> str:
        """Why the peer is refused; empty when it may come. libzmq asks, so the shape of the question is given."""
        assert len(frames) >= _NUM_FIXED_FRAMES, frames
        address, credentials = frames[3].decode(), frames[_NUM_FIXED_FRAMES:]
        if self._client_key is not None and credentials != [self._client_key]:
            return "key"
        return "" if self._policy.allows(address) else "address"
