"""wire.params: kv_transfer_params are what any API client sent; every value ends in a meaning or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, TransferId
from vllm_mooncake_ascend.wire import params

SECRET = b"s" * 32
NOW_S = 1_700_000_000.0
_transfer = params.RemotePrefill(
    transfer_id=TransferId("t1"),
    incarnation=Incarnation("p1"),
    address=PeerAddress("10.0.0.7:4100"),
    num_tokens=96,
    prompt_digest=b"d" * 32,
)


def issued(**changes: object) -> dict[str, Any]:
    """Unsigned params as prefill returns them, with some fields replaced."""
    return {**params.issue(_transfer, secret=None, now_s=NOW_S), **changes}


def nested(depth: int) -> list[Any]:
    """A list in a list in a list: deeper than Python may recurse."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
_keys = [*issued(), "signature", "do_remote_decode"]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_prefill_issues_is_what_decode_parses(secret: bytes | None) -> None:
    """Goal: the round trip through the router changes nothing. Method: issue, then parse, signed and not."""
    assert _transfer == params.parse(params.issue(_transfer, secret=secret, now_s=NOW_S), secret=secret, now_s=NOW_S + 5)


def test_fields_that_others_add_change_nothing() -> None:
    """Goal: vLLM's own additions neither break parsing nor the signature. Method: add a known and an unknown key."""
    given_params = params.issue(_transfer, secret=SECRET, now_s=NOW_S)
    given_params |= {"remote_prefill_cached_tokens": 64, "x": [1]}
    assert _transfer == params.parse(given_params, secret=SECRET, now_s=NOW_S)


@given(st.dictionaries(st.sampled_from(_keys), _json), st.sampled_from([None, SECRET]))
@example({"transfer_id": "x" * 1_000_000}, None)
@example({"signature": "\ud800"}, SECRET)
@example({"issued_at_s": 10**400}, SECRET)
def test_hostile_values_give_a_meaning_or_a_refusal(changes: dict[str, Any], secret: bytes | None) -> None:
    """Goal: no body of an API client raises anything foreign. Method: any JSON value in any field of valid params."""
    hostile = {**params.issue(_transfer, secret=secret, now_s=NOW_S), **changes}
    try:
        meaning = params.parse(hostile, secret=secret, now_s=NOW_S)
    except RemoteProtocolError:
        return
    assert meaning is None or isinstance(meaning, (params.RemoteDecode, params.RemotePrefill))


@pytest.mark.parametrize("key", [key for key in _keys if key != "do_remote_decode"])
@pytest.mark.parametrize("value", [nested(100_000), "x" * 1_000_000], ids=["deep", "long"])
def test_the_refusal_of_a_monstrous_value_is_short(key: str, value: object) -> None:
    """Goal: a refusal costs neither the stack nor the log. Method: a deep list and a long text in each field."""
    with pytest.raises(RemoteProtocolError) as caught:
        params.parse(issued(**{key: value}), secret=SECRET, now_s=NOW_S)
    assert len(str(caught.value)) < 400


@given(_json)
def test_a_body_of_any_shape_gives_a_meaning_or_a_refusal(body: object) -> None:
    """Goal: the whole value may be anything. Method: any JSON value instead of the object."""
    try:
        meaning = params.parse(body, secret=None, now_s=NOW_S)
    except RemoteProtocolError:
        return
    assert meaning is None or isinstance(meaning, (params.RemoteDecode, params.RemotePrefill))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"do_remote_prefill": 1}, "'do_remote_prefill'] must be true or false"),
        ({"transfer_id": None}, "'transfer_id'] must be printable text"),
        ({"transfer_id": ""}, "'transfer_id'] must be printable text"),
        ({"transfer_id": "a\nb"}, "'transfer_id'] must be printable text"),
        ({"transfer_id": "t" * 513}, "'transfer_id'] must be printable text"),
        ({"remote_incarnation": 7}, "'remote_incarnation'] must be printable text"),
        ({"remote_host": "tcp://10.0.0.1"}, "'remote_host'] must be an IP address or a host name"),
        ({"remote_host": "10.0.0.1;10.0.0.2"}, "'remote_host'] must be an IP address or a host name"),
        ({"remote_host": "[::1]"}, "'remote_host'] must be an IP address or a host name"),
        ({"remote_host": "::1%a b"}, "'remote_host'] must be an IP address or a host name"),
        ({"remote_host": "fe80::1%eth0/x"}, "'remote_host'] must be an IP address or a host name"),
        ({"remote_port": 0}, "'remote_port'] must be 1 to 65535"),
        ({"remote_port": 65_536}, "'remote_port'] must be 1 to 65535"),
        ({"remote_port": True}, "'remote_port'] must be 1 to 65535"),
        ({"remote_port": 4100.0}, "'remote_port'] must be 1 to 65535"),
        ({"remote_num_tokens": -1}, "'remote_num_tokens'] must be 0 to"),
        ({"remote_prompt_digest": "ab"}, "'remote_prompt_digest'] must be 64 hex digits"),
        ({"remote_prompt_digest": "ab " * 21 + "a"}, "'remote_prompt_digest'] must be 64 hex digits"),
        ({"remote_prompt_digest": None}, "'remote_prompt_digest'] must be 64 hex digits"),
    ],
)
def test_a_bad_field_is_refused_by_name(changes: dict[str, Any], complaint: str) -> None:
    """Goal: the operator reads which field was wrong. Method: one bad field at a time."""
    with pytest.raises(RemoteProtocolError) as caught:
        params.parse(issued(**changes), secret=None, now_s=NOW_S)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("key", [key for key in issued() if not key.startswith("do_")])
def test_a_changed_signed_field_is_refused(key: str) -> None:
    """Goal: a client cannot redirect a transfer. Method: change each signed field to another valid value."""
    other: dict[str, Any] = {
        "transfer_id": "t2",
        "remote_incarnation": "p2",
        "remote_host": "10.0.0.8",
        "remote_port": 4101,
        "remote_num_tokens": 95,
        "remote_prompt_digest": "ee" * 32,
        "issued_at_s": int(NOW_S) + 1,
    }
    forged = {**params.issue(_transfer, secret=SECRET, now_s=NOW_S), key: other[key]}
    with pytest.raises(RemoteProtocolError, match="no valid signature"):
        params.parse(forged, secret=SECRET, now_s=NOW_S)


@pytest.mark.parametrize("signature", [None, 7, "", "00" * 32, "\u00e9" * 64])
def test_params_without_a_valid_signature_are_refused_where_there_is_a_secret(signature: object) -> None:
    """Goal: only engines and proxies of the cluster issue params. Method: absent, foreign and malformed signatures."""
    with pytest.raises(RemoteProtocolError, match="no valid signature"):
        params.parse(issued(signature=signature), secret=SECRET, now_s=NOW_S)


@pytest.mark.parametrize("age_s", [limits.PARAMS_MAX_AGE_S + 1, -limits.PARAMS_MAX_AGE_S - 1])
def test_signed_params_age(age_s: float) -> None:
    """Goal: a recorded response cannot be replayed later. Method: parse just past the limit, on both sides of now."""
    signed = params.issue(_transfer, secret=SECRET, now_s=NOW_S)
    with pytest.raises(RemoteProtocolError, match="were issued"):
        params.parse(signed, secret=SECRET, now_s=NOW_S + age_s)


@pytest.mark.parametrize(
    ("body", "meaning"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_prefill": False, "do_remote_decode": None}, None),
        ({"do_remote_decode": True}, params.RemoteDecode(transfer_id=None)),
        ({"do_remote_decode": True, "transfer_id": "t9"}, params.RemoteDecode(transfer_id=TransferId("t9"))),
        (
            {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None, "remote_block_ids": None},
            params.RemoteDecode(transfer_id=None),
        ),
    ],
)
def test_what_routers_send_to_prefill(body: object, meaning: object) -> None:
    """Goal: routers that know only the sequential flow work. Method: the bodies they send, None fields included."""
    assert meaning == params.parse(body, secret=SECRET, now_s=NOW_S)


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [("10.0.0.1", 80, "10.0.0.1:80"), ("fe80::1%eth0", 80, "[fe80::1%eth0]:80"), ("node-1.example", 1, "node-1.example:1")],
)
def test_an_address_survives_splitting_and_joining(host: str, port: int, address: str) -> None:
    """Goal: IPv6 hosts are not torn apart. Method: format and split."""
    assert (address, (host, port)) == (params.format_address(host, port), params.split_address(PeerAddress(address)))
