"""runtime.side_channel over real sockets on loopback: nothing a peer sends or leaves out stops it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator

import pytest
import zmq

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.p2p import actions
from vllm_mooncake_ascend.runtime.address_policy import AddressPolicy, address_policy
from vllm_mooncake_ascend.runtime.curve import curve_keys
from vllm_mooncake_ascend.runtime.listener import Listening
from vllm_mooncake_ascend.runtime.side_channel import SideChannel
from vllm_mooncake_ascend.testing.channel_owner import WAIT_S, RecordingOwner
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire import codec, messages

SECRET = b"a cluster secret of a test"
DROPPED = "side_channel_messages_dropped_total"
RECEIVED = "side_channel_messages_total"
OURS, ANOTHER = bytes([messages.PROTOCOL_VERSION]), bytes([messages.PROTOCOL_VERSION + 1])
"""The first byte of every message."""
HELLO = messages.Hello(incarnation=Incarnation("d1"), version=1)
NOBODY = AddressPolicy(allows_all=False, networks=(), names=frozenset())


@contextlib.contextmanager
def channel(
    owner: RecordingOwner,
    *,
    host: str | None = "127.0.0.1",
    port: int = 0,
    secret: bytes | None = None,
    policy: AddressPolicy | None = None,
) -> Iterator[SideChannel]:
    """A running side channel; `host` None: it only connects."""
    made = SideChannel(
        owner,
        Incarnation("p1"),
        listening=None if host is None else Listening(host=host, port=port),
        policy=policy or address_policy((), has_secret=secret is not None),
        keys=curve_keys(secret),
    )
    made.start()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def raw_dealer(address: PeerAddress | None) -> Iterator[zmq.Socket[bytes]]:
    """A client that may send anything."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = int(WAIT_S * 1e3)
        dealer.sndtimeo = int(WAIT_S * 1e3)
        dealer.connect(f"tcp://{address}")
        yield dealer


def to_producer(address: PeerAddress | None, message: messages.FromReader = HELLO) -> actions.SendToProducer:
    """The action that sends a message to a listening channel."""
    assert address is not None
    return actions.SendToProducer(peer=address, message=message)


def verdict() -> messages.Verdict:
    """Something a producer may answer."""
    return messages.Verdict(incarnation=Incarnation("p1"), transfer_id=TransferId("t1"), request_id=RequestId("r1"), held=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
@pytest.mark.parametrize("secret", [None, SECRET], ids=["open", "curve"])
def test_messages_travel_both_ways(host: str, secret: bytes | None) -> None:
    """Goal: a question reaches the producer, its answer the reader. Method: two channels, IPv4, IPv6 and a name, with and
    without encryption."""
    producer, reader = RecordingOwner(), RecordingOwner()
    with channel(producer, host=host, secret=secret) as listening, channel(reader, host=None, secret=secret) as asking:
        asking.submit(to_producer(listening.address))
        peer, question = producer.from_readers.get(timeout=WAIT_S)
        listening.submit(actions.SendToReader(peer=peer, message=verdict()))
        answer = reader.from_producers.get(timeout=WAIT_S)
    assert (HELLO, (listening.address, verdict())) == (question, answer)


def test_two_channels_start_on_one_configuration() -> None:
    """Goal: two engines on one host need no port numbers. Method: both with port 0."""
    with channel(RecordingOwner()) as first, channel(RecordingOwner()) as second:
        assert first.address != second.address


def test_a_fixed_port_that_is_taken_is_named() -> None:
    """Goal: the operator reads which setting clashes. Method: a second channel on the first one's port."""
    with channel(RecordingOwner()) as first:
        port = int(str(first.address).rpartition(":")[2])
        with (
            pytest.raises(ConfigError, match=f"side_channel_port={port} on 127.0.0.1 is taken"),
            channel(RecordingOwner(), port=port),
        ):
            pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_named(host: str) -> None:
    """Goal: the operator reads which setting is wrong. Method: a documentation address, a name that does not exist."""
    with pytest.raises(ConfigError, match=f"side_channel_host='{host}'"), channel(RecordingOwner(), host=host):
        pass


def test_ten_thousand_random_frames_leave_it_serving() -> None:
    """Goal: garbage costs a count and nothing else. Method: random frames of random number and size, then a Hello."""
    owner = RecordingOwner()
    randomness = random.Random(1)
    with channel(owner) as listening, raw_dealer(listening.address) as dealer:
        for _ in range(10_000):
            num_frames = randomness.choice((1, 1, 1, 2, 5))
            dealer.send_multipart([randomness.randbytes(randomness.randrange(64)) for _ in range(num_frames)])
        dealer.send(codec.encode(HELLO))
        _, heard = owner.from_readers.get(timeout=WAIT_S)
    assert (HELLO, True) == (heard, owner.failures.empty())


@pytest.mark.parametrize(
    ("frames", "label"),
    [
        ([b""], "malformed"),
        ([OURS + b"garbage"], "malformed"),
        ([b"", OURS], "frames"),
        ([ANOTHER + codec.encode(HELLO)[1:]], "version"),
        ([codec.encode(verdict())], "malformed"),
    ],
)
def test_what_is_no_message_is_counted_by_reason(frames: list[bytes], label: str) -> None:
    """Goal: the operator sees what is wrong with a peer. Method: one bad frame of each kind."""
    owner = RecordingOwner()
    with channel(owner) as listening, raw_dealer(listening.address) as dealer:
        dealer.send_multipart(frames)
        assert owner.wait_for_counts(DROPPED, label, 1) == 1


def test_a_huge_frame_ends_its_connection_only() -> None:
    """Goal: nobody can fill our memory. Method: a frame above the limit from one client, then a Hello of another."""
    owner = RecordingOwner()
    with channel(owner) as listening, raw_dealer(listening.address) as huge, raw_dealer(listening.address) as other:
        huge.send(bytes(limits.MAX_MESSAGE_BYTES + 1))
        other.send(codec.encode(HELLO))
        assert HELLO == owner.from_readers.get(timeout=WAIT_S)[1]


def test_a_reader_of_another_version_is_told_so() -> None:
    """Goal: a half-done upgrade explains itself. Method: a frame of the next version and the answer to it."""
    with channel(RecordingOwner()) as listening, raw_dealer(listening.address) as dealer:
        dealer.send(ANOTHER)
        answer = codec.decode_from_producer(dealer.recv())
    assert isinstance(answer, messages.Goodbye)
    assert f"speaks side-channel version {ANOTHER[0]}" in answer.reason


def test_a_crowded_owner_is_spared() -> None:
    """Goal: overload drops what comes again, and says so. Method: a Hello while crowded, one after."""
    owner = RecordingOwner()
    owner.crowded = True
    with channel(owner) as listening, raw_dealer(listening.address) as dealer:
        dealer.send(codec.encode(HELLO))
        owner.wait_for_counts(DROPPED, "crowded", 1)
        owner.crowded = False
        dealer.send(codec.encode(HELLO))
        owner.from_readers.get(timeout=WAIT_S)
        assert owner.from_readers.empty()


def test_a_producer_that_is_not_there_is_told_as_lost() -> None:
    """Goal: a dead producer is noticed in a second. Method: send to a port where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = PeerAddress(f"127.0.0.1:{unused.getsockname()[1]}")
    owner = RecordingOwner()
    with channel(owner, host=None) as asking:
        asking.submit(to_producer(address))
        assert (address, "no connection to it could be made") == owner.lost.get(timeout=WAIT_S)


def test_a_producer_that_goes_is_told_as_lost() -> None:
    """Goal: a broken connection is noticed, once. Method: close the listening channel after an exchange."""
    producer, reader = RecordingOwner(), RecordingOwner()
    with channel(reader, host=None) as asking:
        with channel(producer) as listening:
            asking.submit(to_producer(listening.address))
            producer.from_readers.get(timeout=WAIT_S)
        farewell = reader.from_producers.get(timeout=WAIT_S)[1]
        lost = reader.lost.get(timeout=WAIT_S)
    assert isinstance(farewell, messages.Goodbye)
    assert (listening.address, "it closed the connection") == lost


def test_a_lost_producer_can_be_asked_again() -> None:
    """Goal: a restarted producer is reached without our restart. Method: the same port, before and after it listens."""
    reader, producer = RecordingOwner(), RecordingOwner()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with channel(reader, host=None) as asking:
        asking.submit(to_producer(PeerAddress(f"127.0.0.1:{port}")))
        reader.lost.get(timeout=WAIT_S)
        with channel(producer, port=port) as listening:
            asking.submit(to_producer(listening.address))
            assert HELLO == producer.from_readers.get(timeout=WAIT_S)[1]


def test_a_peer_that_is_no_side_channel_is_told_as_lost_with_the_reason() -> None:
    """Goal: a wrong address explains itself. Method: a ROUTER that answers with something else."""
    owner = RecordingOwner()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as stranger, channel(owner, host=None) as asking:
        stranger.linger = 0
        port = stranger.bind_to_random_port("tcp://127.0.0.1")
        asking.submit(to_producer(PeerAddress(f"127.0.0.1:{port}")))
        peer, _ = stranger.recv_multipart()
        stranger.send_multipart([peer, OURS + b"what?"])
        _, reason = owner.lost.get(timeout=WAIT_S)
    assert reason.startswith("not a side-channel message")


@pytest.mark.parametrize(
    ("server_secret", "client_secret"), [(SECRET, b"another secret of a test"), (SECRET, None), (None, SECRET)]
)
def test_peers_with_different_secrets_do_not_speak(server_secret: bytes | None, client_secret: bytes | None) -> None:
    """Goal: without the secret nobody is heard. Method: three ways to be wrong; the reason says it may be the secret."""
    producer, reader = RecordingOwner(), RecordingOwner()
    with channel(producer, secret=server_secret) as listening, channel(reader, host=None, secret=client_secret) as asking:
        asking.submit(to_producer(listening.address))
        _, reason = reader.lost.get(timeout=WAIT_S)
    assert (True, True) == ("the cluster secrets differ" in reason, producer.from_readers.empty())


def test_a_reader_from_an_address_that_is_not_allowed_is_refused() -> None:
    """Goal: without a secret, strangers never reach the machines. Method: a policy that allows nobody, not even this host."""

    class Nobody(AddressPolicy, frozen=True, kw_only=True):
        def allows(self, host: str) -> bool:
            return False

    producer, reader = RecordingOwner(), RecordingOwner()
    nobody = Nobody(allows_all=False, networks=(), names=frozenset())
    with channel(producer, policy=nobody) as listening, channel(reader, host=None) as asking:
        asking.submit(to_producer(listening.address))
        _, reason = reader.lost.get(timeout=WAIT_S)
        refused = producer.wait_for_counts("connections_refused_total", "address", 1)
    assert (1, True, True) == (refused, producer.from_readers.empty(), "not in its `peers`" in reason)


def test_a_producer_that_is_not_allowed_is_never_connected_to() -> None:
    """Goal: kv_transfer_params cannot send us anywhere. Method: an address outside, without secret and peers."""
    owner = RecordingOwner()
    with channel(owner, host=None, policy=NOBODY) as asking:
        asking.submit(to_producer(PeerAddress("192.0.2.1:4100")))
        _, reason = owner.lost.get(timeout=WAIT_S)
    assert "listed in `peers`" in reason


def test_an_address_zmq_does_not_take_costs_only_that_peer() -> None:
    """Goal: no peer's address ends the thread, or keeps it from ending. Method: an odd zone, then a good producer."""
    producer, owner = RecordingOwner(), RecordingOwner()
    with channel(producer) as listening, channel(owner, host=None) as asking:
        asking.submit(to_producer(PeerAddress("[::1%a b]:4100")))
        _, reason = owner.lost.get(timeout=WAIT_S)
        asking.submit(to_producer(listening.address))
        assert HELLO == producer.from_readers.get(timeout=WAIT_S)[1]
    assert "no socket to it could be made" == reason
    assert not asking._thread.is_alive()


def test_a_timer_is_asked_for_again_when_woken() -> None:
    """Goal: an earlier timer is not slept over. Method: no timer at all, then a wake."""
    owner = RecordingOwner()
    with channel(owner) as listening:
        owner.timers_asked.get(timeout=WAIT_S)
        listening.wake()
        assert owner.timers_asked.get(timeout=WAIT_S) is None


def test_a_failing_owner_ends_the_thread_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: a bug is heard, not swallowed. Method: an owner that raises at a message."""
    owner = RecordingOwner()
    owner.failure = ZeroDivisionError("a bug")
    with channel(owner) as listening, raw_dealer(listening.address) as dealer:
        dealer.send(codec.encode(HELLO))
        failure = owner.failures.get(timeout=WAIT_S)
    assert (owner.failure, 1) == (failure, sum("the side channel has failed" in record.message for record in caplog.records))


def test_closing_leaves_neither_thread_nor_descriptor() -> None:
    """Goal: nothing leaks. Method: count threads and open files before and after twenty lives with an exchange each."""

    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def live() -> None:
        producer, reader = RecordingOwner(), RecordingOwner()
        with channel(producer) as listening, channel(reader, host=None) as asking:
            asking.submit(to_producer(listening.address))
            producer.from_readers.get(timeout=WAIT_S)

    live()
    before = held()
    for _ in range(20):
        live()
    assert before == held()


def test_what_was_said_last_still_gets_out() -> None:
    """Goal: a Release on the way out frees prefill's blocks. Method: submit and close at once, before any connection."""
    producer = RecordingOwner()
    with channel(producer) as listening:
        with channel(RecordingOwner(), host=None) as asking:
            asking.submit(to_producer(listening.address))
        assert HELLO == producer.from_readers.get(timeout=WAIT_S)[1]


def test_closing_twice_and_before_the_start_does_nothing() -> None:
    """Goal: every way out may close. Method: a channel that never ran, closed twice, then used."""
    owner = RecordingOwner()
    made = SideChannel(owner, Incarnation("p1"), listening=Listening(host="127.0.0.1", port=0), policy=NOBODY, keys=None)
    made.close()
    made.close()
    made.submit(to_producer(PeerAddress("127.0.0.1:1")))
    assert owner.lost.empty()
