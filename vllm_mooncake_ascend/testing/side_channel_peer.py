"""A prefill engine's side channel for an asyncio test: a real socket, the real codec, the real producer machine.

It stands for an engine without vLLM: a test lets a prefill end with KV and watches which blocks are let go.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

import zmq
import zmq.asyncio

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.settings import ProducerSettings
from vllm_mooncake_ascend.runtime.curve import CurveKeys
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire import codec, params
from vllm_mooncake_ascend.wire.messages import FromReader

_DIGEST = b"\x07" * 32


class SideChannelPeer:
    """One engine. Use as an async context manager; `address` is where its side channel listens."""

    def __init__(self, incarnation: str = "incarnation-1", keys: CurveKeys | None = None) -> None:
        self.incarnation = Incarnation(incarnation)
        self.is_mute = False
        """It hears, and answers nothing."""
        self.num_heard = 0
        self.heard = asyncio.Event()
        self.machine = Producer(
            self.incarnation,
            {},
            (),
            ProducerSettings(lease_ttl_s=limits.LEASE_TTL_S, lease_max_s=limits.LEASE_MAX_S, max_pinned_blocks=1_000),
        )
        self._keys = keys

    async def __aenter__(self) -> SideChannelPeer:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        if self._keys is not None:
            self._keys.apply_to_server(cast("zmq.Socket[bytes]", self._socket))
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = PeerAddress(f"127.0.0.1:{port}")
        self._server = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.cancel()
        await asyncio.gather(self._server, return_exceptions=True)
        self._context.destroy(linger=0)

    def end_prefill(self, transfer_id: str, *, num_blocks: int = 4) -> dict[str, object]:
        """Let a prefill end with its KV leased; returns its kv_transfer_params."""
        request_id = RequestId(f"request-of-{transfer_id}")
        wanted = TransferId(transfer_id)
        self._handle(
            events.PrefillArrived(
                request_id=request_id, wanted_id=wanted, fresh_id=wanted, prompt_digest=_DIGEST, num_prompt_tokens=num_blocks
            )
        )
        block_ids = (tuple(range(1, num_blocks + 1)),)
        self._handle(
            events.PrefillEnded(request_id=request_id, has_kv=True, num_tokens=num_blocks, block_ids=block_ids, reason="")
        )
        transfer = params.RemotePrefill(
            transfer_id=wanted,
            incarnation=self.incarnation,
            address=self.address,
            num_tokens=num_blocks,
            prompt_digest=_DIGEST,
        )
        return params.issue(transfer, secret=None, now_s=time.time())

    def hear(self, reader: bytes, message: FromReader) -> list[actions.SendToReader]:
        """Take a message as if it had come from the socket `reader`; returns the answers."""
        return self._handle(events.ReaderSpoke(peer=reader, message=message))

    async def _serve(self) -> None:
        while True:
            reader, frame = await self._socket.recv_multipart()
            self.num_heard += 1
            self.heard.set()
            if not self.is_mute:
                for answer in self.hear(reader, codec.decode_from_reader(frame)):
                    await self._socket.send_multipart([answer.peer, codec.encode(answer.message)])

    def _handle(self, event: events.ProducerEvent) -> list[actions.SendToReader]:
        done = self.machine.handle(event, time.monotonic())
        return [action for action in done if isinstance(action, actions.SendToReader)]
