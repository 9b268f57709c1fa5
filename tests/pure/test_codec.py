"""wire.codec and wire.checks: every message survives the round trip, every byte string ends in a value or a refusal."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region
from vllm_mooncake_ascend.wire import codec, messages

_ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
_text = st.text(st.characters(codec="utf-8"), max_size=40)
_counts = st.integers(1, 1 << 20)
_readers = st.lists(st.tuples(_ids, _ids), max_size=4).map(tuple)

_groups = st.builds(
    GroupLayout,
    tokens_per_block=st.integers(16, 1 << 12),
    kernel_blocks_per_block=st.integers(1, 16),
    window_tokens=st.integers(0, 1 << 20),
    has_recurrent_state=st.booleans(),
)
_planes = st.builds(
    Plane,
    name=_ids,
    group_index=st.just(0),
    base_address=st.integers(0, 1 << 47),
    num_blocks=_counts,
    tokens_per_block=_counts,
    first_head=st.integers(0, 64),
    num_heads=st.integers(1, 64),
    total_heads=st.integers(128, 256),
    bytes_per_token_head=_counts,
    block_stride_bytes=_counts,
    token_stride_bytes=_counts,
    head_stride_bytes=_counts,
)
_regions = st.builds(Region, base_address=st.integers(0, 1 << 47), length_bytes=st.integers(1, 1 << 40))
_ranks = st.builds(
    RankLayout,
    tp_rank=st.integers(0, 3),
    tp_size=st.integers(4, 8),
    pp_rank=st.just(0),
    pp_size=st.integers(1, 4),
    session=_ids,
    groups=st.lists(_groups, min_size=1, max_size=2).map(tuple),
    planes=st.lists(_planes, max_size=2).map(tuple),
    regions=st.lists(_regions, max_size=2).map(tuple),
)
_known_blocks = st.integers(0, 1 << 10)


def _with_known_blocks(offer: messages.Offer) -> st.SearchStrategy[messages.Offer]:
    """The offer with or without something left out of each of its tables."""
    num_groups = len(offer.block_ids)
    numbers = st.lists(_known_blocks, min_size=num_groups, max_size=num_groups).map(tuple)
    return st.one_of(st.just(()), numbers).map(lambda known: msgspec.structs.replace(offer, num_known_blocks=known))


_offers = st.builds(
    messages.Offer,
    incarnation=_ids,
    transfer_id=_ids,
    request_id=_ids,
    state=st.sampled_from(["pending", "ready"]),
    num_tokens=st.integers(0, 1 << 20),
    generation=st.integers(0, 1 << 40),
    block_ids=st.lists(st.lists(st.integers(0, 1 << 30), max_size=9).map(tuple), max_size=3).map(tuple),
    prompt_digest=st.binary(max_size=64),
    lease_ttl_s=st.floats(limits.LEASE_TTL_MIN_S, limits.LEASE_CEILING_S),
    num_layers_ready=st.integers(0, 256),
).flatmap(_with_known_blocks)
_about = {"incarnation": _ids, "expected": _ids, "transfer_id": _ids, "request_id": _text}
_answer = {"incarnation": _ids, "transfer_id": _ids, "request_id": _text}
_from_reader = st.one_of(
    st.builds(messages.Hello, incarnation=_ids, version=st.integers(0, 99)),
    st.builds(messages.Subscribe, **_about),
    st.builds(messages.Renew, incarnation=_ids, expected=_ids, sequence=st.integers(0, 1 << 60), transfers=_readers),
    st.builds(messages.ReadDone, ok=st.booleans(), **_about),
    st.builds(messages.Release, **_about),
)
_from_producer = st.one_of(
    st.builds(
        messages.Welcome,
        incarnation=_ids,
        version=st.integers(0, 99),
        fingerprint=st.dictionaries(_ids, _text, max_size=4),
        ranks=st.lists(_ranks, max_size=2).map(tuple),
    ),
    _offers,
    st.builds(messages.Gone, reason=_text, **_answer),
    st.builds(messages.Renewed, incarnation=_ids, sequence=st.integers(0, 1 << 60), gone=_readers),
    st.builds(messages.Verdict, held=st.booleans(), **_answer),
    st.builds(messages.Goodbye, incarnation=_ids, reason=_text),
)


def offer(**changes: object) -> messages.Offer:
    """A valid Offer with some fields replaced."""
    fields: dict[str, object] = {
        "incarnation": "p1",
        "transfer_id": "t1",
        "request_id": "r1",
        "state": "ready",
        "num_tokens": 32,
        "generation": 0,
        "block_ids": ((3, 4),),
        "prompt_digest": b"d" * 32,
        "lease_ttl_s": 30.0,
        "num_layers_ready": 0,
    }
    return messages.Offer(**{**fields, **changes})  # type: ignore[arg-type]


def rank(**changes: object) -> RankLayout:
    """A valid RankLayout of one plane, with some fields of the plane replaced."""
    plane: dict[str, object] = {
        "name": "layers.0/k",
        "group_index": 0,
        "base_address": 4096,
        "num_blocks": 8,
        "tokens_per_block": 16,
        "first_head": 0,
        "num_heads": 2,
        "total_heads": 2,
        "bytes_per_token_head": 128,
        "block_stride_bytes": 4096,
        "token_stride_bytes": 256,
        "head_stride_bytes": 128,
    }
    group = GroupLayout(tokens_per_block=16, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
    return RankLayout(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        session="127.0.0.1:5000",
        groups=(group,),
        planes=(Plane(**{**plane, **changes}),),  # type: ignore[arg-type]
        regions=(Region(base_address=4096, length_bytes=32768),),
    )


def unchecked_frame(message: object) -> bytes:
    """What a peer without our checks would send for `message`."""
    return bytes([messages.PROTOCOL_VERSION]) + msgspec.msgpack.encode(message)


@given(_from_reader)
def test_a_reader_message_survives_the_round_trip(message: messages.FromReader) -> None:
    """Goal: nothing is lost on the wire. Method: encode and decode every kind with random fields."""
    assert message == codec.decode_from_reader(codec.encode(message))


@given(_from_producer)
def test_a_producer_message_survives_the_round_trip(message: messages.FromProducer) -> None:
    """Goal: nothing is lost on the wire. Method: encode and decode every kind with random fields."""
    assert message == codec.decode_from_producer(codec.encode(message))


@given(st.binary(max_size=200))
@example(b"")
@example(b"\x01\xdd\xff\xff\xff\xff")
@example(b"\x01\x94\xa5Hello\xa1a\x01" + b"\x91" * 100_000)
@example(b"\x01\x92\xa5Hello\xdb\xff\xff\xff\xff")
def test_random_bytes_are_refused_by_name(frame: bytes) -> None:
    """Goal: no frame raises anything but RemoteProtocolError. Method: random bytes and known traps (announced lengths
    of 4 GiB, deep nesting), with the right version byte and without."""
    for candidate in (frame, bytes([messages.PROTOCOL_VERSION]) + frame):
        for decode in (codec.decode_from_reader, codec.decode_from_producer):
            try:
                decode(candidate)
            except RemoteProtocolError:
                continue


@given(_from_producer, st.data())
def test_a_truncated_frame_is_refused(message: messages.FromProducer, data: st.DataObject) -> None:
    """Goal: half a message never passes for a message. Method: cut valid frames at every kind of place."""
    frame = codec.encode(message)
    end = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(RemoteProtocolError):
        codec.decode_from_producer(frame[:end])


@given(_from_producer, st.data())
def test_a_frame_with_flipped_bytes_is_a_value_or_refused(message: messages.FromProducer, data: st.DataObject) -> None:
    """Goal: damage inside a frame raises nothing foreign. Method: overwrite some bytes of valid frames."""
    frame = bytearray(codec.encode(message))
    for position in data.draw(st.lists(st.integers(0, len(frame) - 1), min_size=1, max_size=4)):
        frame[position] = data.draw(st.integers(0, 255))
    try:
        codec.decode_from_producer(bytes(frame))
    except RemoteProtocolError:
        return


def test_a_frame_above_the_size_limit_is_refused_before_it_is_read() -> None:
    """Goal: the size is checked first. Method: one byte more than the limit."""
    with pytest.raises(RemoteProtocolError, match="16777216 bytes, got 16777217"):
        codec.decode_from_reader(bytes(limits.MAX_MESSAGE_BYTES + 1))


def test_another_version_is_named_as_such() -> None:
    """Goal: an upgrade half done is told apart from garbage. Method: a frame whose version byte is higher."""
    frame = codec.encode(messages.Hello(incarnation="a", version=1))  # type: ignore[arg-type]
    with pytest.raises(VersionMismatch, match="speaks side-channel version 4, this engine version 3"):
        codec.decode_from_reader(b"\x04" + frame[1:])


def test_a_message_of_the_other_direction_is_refused() -> None:
    """Goal: a producer acts only on reader messages. Method: send it an Offer."""
    with pytest.raises(RemoteProtocolError, match="Invalid value 'Offer'"):
        codec.decode_from_reader(codec.encode(offer()))


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (offer(lease_ttl_s=float("nan")), "lease_ttl_s"),
        (offer(lease_ttl_s=float("inf")), "lease_ttl_s"),
        (offer(lease_ttl_s=-1.0), "lease_ttl_s"),
        (offer(num_tokens=-1), "num_tokens"),
        (offer(num_tokens=1 << 63), "num_tokens"),
        (offer(generation=-1), "generation"),
        (offer(block_ids=((3, -4),)), "lowest block id"),
        (offer(block_ids=((3, 1 << 40),)), "highest block id"),
        (offer(block_ids=((),) * 65), "groups of block_ids"),
        (offer(block_ids=((1,) * (limits.MAX_BLOCKS_PER_TRANSFER + 1),)), "block_ids may have"),
        (offer(num_known_blocks=(1, 2)), "num_known_blocks must have 1 entries"),
        (offer(num_known_blocks=(-1,)), "num_known_blocks must be 0"),
        (offer(num_known_blocks=(limits.MAX_BLOCKS_PER_TRANSFER - 1,)), "block_ids may have"),
        (offer(prompt_digest=b"d" * 65), "prompt_digest"),
        (offer(transfer_id=""), "transfer_id"),
        (offer(transfer_id="t" * 513), "transfer_id"),
        (offer(request_id="r" * 513), "request_id"),
        (offer(incarnation=""), "incarnation"),
    ],
)
def test_an_offer_with_a_value_out_of_range_is_refused_by_name(message: messages.Offer, complaint: str) -> None:
    """Goal: no hostile value passes the door. Method: one bad field at a time, encoded without our checks."""
    with pytest.raises(RemoteProtocolError, match=complaint):
        codec.decode_from_producer(unchecked_frame(message))


def test_a_flawed_layout_passes_for_others_to_name() -> None:
    """Goal: a bad layout ends as a named difference, not as silence. Method: numbers no layout can have."""
    layout = rank(base_address=-1, group_index=7, num_blocks=0)
    welcome = messages.Welcome(incarnation="p1", version=1, fingerprint={}, ranks=(layout,))  # type: ignore[arg-type]
    assert welcome == codec.decode_from_producer(unchecked_frame(welcome))


def test_a_renewal_of_more_transfers_than_an_engine_can_wait_for_is_refused() -> None:
    """Goal: one message costs bounded work. Method: one entry above the limit."""
    pairs = (("t", "r"),) * (limits.MAX_WAITING_REQUESTS + 1)
    renewal = messages.Renew(incarnation="d", expected="p", sequence=1, transfers=pairs)  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="transfers may have 8192 entries"):
        codec.decode_from_reader(unchecked_frame(renewal))


def test_more_ranks_than_an_engine_can_have_are_refused() -> None:
    """Goal: a handshake costs bounded work. Method: one rank above the limit, each of them tiny."""
    layout = msgspec.structs.replace(rank(), planes=(), regions=())
    welcome = messages.Welcome(incarnation="p", version=1, fingerprint={}, ranks=(layout,) * 1_025)  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match="ranks may have 1024 entries"):
        codec.decode_from_producer(unchecked_frame(welcome))


@pytest.mark.parametrize("transfer_id", ["", "t" * 513, "\ud800"])
def test_our_own_bad_message_is_our_own_error(transfer_id: str) -> None:
    """Goal: what the other side would refuse is never sent. Method: ids that no peer accepts or no UTF-8 can carry."""
    with pytest.raises(LocalProtocolError, match="cannot send Offer"):
        codec.encode(offer(transfer_id=transfer_id))
