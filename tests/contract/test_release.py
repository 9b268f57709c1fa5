"""runtime.release: a proxy tells a prefill engine that nobody will read, within its bound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.p2p import actions
from vllm_mooncake_ascend.runtime.address_policy import address_policy
from vllm_mooncake_ascend.runtime.clock import wall_s
from vllm_mooncake_ascend.runtime.curve import curve_keys
from vllm_mooncake_ascend.runtime.listener import Listening
from vllm_mooncake_ascend.runtime.release import send_release
from vllm_mooncake_ascend.runtime.side_channel import SideChannel
from vllm_mooncake_ascend.testing.channel_owner import WAIT_S, RecordingOwner
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, TransferId
from vllm_mooncake_ascend.wire import messages, params

SECRET = b"a cluster secret of a test"
P1, T1 = Incarnation("p1"), TransferId("t1")


def issued(address: str, secret: bytes | None = None) -> dict[str, Any]:
    """What prefill at `address` returned for T1."""
    transfer = params.RemotePrefill(
        transfer_id=T1, incarnation=P1, address=PeerAddress(address), num_tokens=16, prompt_digest=b"d" * 32
    )
    return params.issue(transfer, secret=secret, now_s=wall_s())


def verdict(release: messages.FromReader) -> messages.FromProducer:
    """The answer of a producer that knows the transfer."""
    assert isinstance(release, messages.Release)
    return messages.Verdict(incarnation=P1, transfer_id=T1, request_id=release.request_id, held=False)


def welcome(release: messages.FromReader) -> messages.FromProducer:
    """The answer of a restarted producer."""
    return messages.Welcome(incarnation=Incarnation("p2"), version=1, fingerprint={}, ranks=())


def exchange(answer: Callable[[messages.FromReader], messages.FromProducer], secret: bytes | None) -> tuple[bool, Any]:
    """A release to a producer that answers; what was returned and what the producer heard."""
    owner = RecordingOwner()
    producer = SideChannel(
        owner,
        P1,
        listening=Listening(host="127.0.0.1", port=0),
        policy=address_policy((), has_secret=secret is not None),
        keys=curve_keys(secret),
    )
    producer.start()
    heard: list[messages.FromReader] = []

    def reply() -> None:
        peer, message = owner.from_readers.get(timeout=WAIT_S)
        heard.append(message)
        producer.submit(actions.SendToReader(peer=peer, message=answer(message)))

    replying = threading.Thread(target=reply)
    replying.start()
    try:
        done = send_release(issued(str(producer.address), secret), secret=secret, timeout_s=WAIT_S)
    finally:
        replying.join()
        producer.close()
    return done, heard[0]


@pytest.mark.parametrize("answer", [verdict, welcome])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "curve"])
def test_a_release_is_delivered_and_answered(
    answer: Callable[[messages.FromReader], messages.FromProducer], secret: bytes | None
) -> None:
    """Goal: the proxy knows that the blocks are free. Method: a known transfer, a restarted engine, open and encrypted."""
    done, heard = exchange(answer, secret)
    assert isinstance(heard, messages.Release)
    assert (True, P1, T1, "") == (done, heard.expected, heard.transfer_id, heard.request_id)


def test_an_engine_that_is_gone_is_no_error() -> None:
    """Goal: a dead prefill engine holds nobody up. Method: a port where nobody listens any more."""
    gone = SideChannel(
        RecordingOwner(),
        P1,
        listening=Listening(host="127.0.0.1", port=0),
        policy=address_policy((), has_secret=False),
        keys=None,
    )
    address = str(gone.address)
    gone.close()
    assert not send_release(issued(address), secret=None, timeout_s=WAIT_S)


def test_a_silent_engine_is_given_up_in_time() -> None:
    """Goal: the caller's bound holds. Method: an engine that hears and says nothing, a bound of 50 ms."""
    owner = RecordingOwner()
    silent = SideChannel(
        owner, P1, listening=Listening(host="127.0.0.1", port=0), policy=address_policy((), has_secret=False), keys=None
    )
    silent.start()
    try:
        assert not send_release(issued(str(silent.address)), secret=None, timeout_s=0.05)
    finally:
        silent.close()


@pytest.mark.parametrize(
    ("body", "secret", "complaint"),
    [
        ({"do_remote_decode": True}, None, "nothing to release"),
        (issued("192.0.2.1:4100"), None, "neither this host nor listed in `peers`"),
        (issued("127.0.0.1:4100"), SECRET, "no valid signature"),
        ({**issued("127.0.0.1:4100"), "remote_port": "x"}, None, "'remote_port'"),
    ],
)
def test_params_that_must_not_be_followed_are_refused(body: dict[str, Any], secret: bytes | None, complaint: str) -> None:
    """Goal: nobody steers the proxy to other hosts. Method: params without transfer, of a stranger, unsigned, damaged."""
    with pytest.raises(RemoteProtocolError, match=complaint):
        send_release(body, secret=secret, timeout_s=1.0)
