"""Release: what a proxy tells a prefill engine when no decode engine will read a transfer.

One short-lived connection per release; it blocks, so an asyncio caller runs it in a thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping

import zmq

from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.runtime.address_policy import address_policy
from vllm_mooncake_ascend.runtime.clock import boot_s, wall_s
from vllm_mooncake_ascend.runtime.connections import Connections
from vllm_mooncake_ascend.runtime.curve import curve_keys
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, RequestId
from vllm_mooncake_ascend.wire import codec, messages, params

_NO_REQUEST = RequestId("")


def send_release(
    kv_transfer_params: Mapping[str, object], *, secret: bytes | None, timeout_s: float, peers: tuple[str, ...] = ()
) -> bool:
    """Tell the prefill engine that issued `kv_transfer_params` that nobody will read the transfer.

    Args:
        kv_transfer_params: as in prefill's response.
        secret: the cluster secret; None where there is none.
        timeout_s: how long the engine may take to answer.
        peers: the allow-list of other machines, as in the engines' configuration.

    Returns:
        Whether the engine answered; if not, its send lease ends by itself.

    Raises:
        RemoteProtocolError: the params name no transfer, or an engine that may not be spoken with.
    """
    transfer = params.parse(kv_transfer_params, secret=secret, now_s=wall_s())
    if not isinstance(transfer, params.RemotePrefill):
        raise RemoteProtocolError("kv_transfer_params name no remote prefill, so there is nothing to release")
    policy = address_policy(peers, has_secret=secret is not None)
    policy.check(params.split_address(transfer.address)[0])
    release = messages.Release(
        incarnation=Incarnation(uuid.uuid4().hex),
        expected=transfer.incarnation,
        transfer_id=transfer.transfer_id,
        request_id=_NO_REQUEST,
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    poller = zmq.Poller()
    connections = Connections(context, poller, policy, curve_keys(secret))
    try:
        end_s = boot_s() + timeout_s
        if connections.send(transfer.address, codec.encode(release), boot_s()):
            return False
        return _is_answered(connections, poller, end_s)
    finally:
        connections.close_all()
        context.term()


def _is_answered(connections: Connections, poller: zmq.Poller, end_s: float) -> bool:
    """Whether an answer came before the connection was lost or the time was over."""
    while (now_s := boot_s()) < end_s:
        if any(connections.take_lost(now_s)):
            return False
        check_s = connections.next_check_s()
        wait_s = min(end_s, end_s if check_s is None else check_s) - now_s
        for ready, _ in poller.poll(max(1, round(wait_s * 1e3))):
            peer: PeerAddress | None = connections.owner_of(ready)
            if peer is None:
                connections.watch(ready, now_s)
            elif _is_answer(ready.recv_multipart()):
                return True
    return False


def _is_answer(frames: list[bytes]) -> bool:
    """A Verdict or Gone; Welcome and Goodbye too: the engine that held the blocks is no more, or is about to go."""
    try:
        message = codec.decode_from_producer(b"".join(frames))
    except RemoteProtocolError:
        return False
    return isinstance(message, (messages.Verdict, messages.Gone, messages.Welcome, messages.Goodbye))
