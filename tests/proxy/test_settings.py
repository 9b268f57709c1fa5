"""Settings, headers and error bodies: small values, checked alone."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.proxy import headers, replies
from vllm_mooncake_ascend.proxy.settings import ProxySettings, checked

GOOD = ProxySettings(prefill_urls=("http://p:1",), decode_urls=("http://d:1",), host="127.0.0.1", port=0)


def test_urls_get_one_form() -> None:
    """Goal: a slash makes no second instance. Method: URLs in several forms."""
    settings = checked(msgspec.structs.replace(GOOD, decode_urls=("http://d:1/", "https://d/v/", "http://[::1]:8000")))

    assert ("http://d:1", "https://d/v", "http://[::1]:8000") == settings.decode_urls


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefill_urls", ()),
        ("decode_urls", ("d:1",)),
        ("decode_urls", ("ftp://d:1",)),
        ("decode_urls", ("http://::1:8000",)),
        ("decode_urls", ("http://d:99999",)),
        ("decode_urls", ("http://d:1?x=1",)),
        ("decode_urls", ("http://d:1", "http://d:1/")),
        ("port", 70_000),
        ("silence_s", 0.0),
        ("drain_s", float("nan")),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: Any) -> None:
    """Goal: the start fails with a remedy. Method: one wrong value each."""
    with pytest.raises(ConfigError):
        checked(msgspec.structs.replace(GOOD, **{name: value}))


def test_one_instance_may_have_both_roles() -> None:
    """Goal: kv_both engines. Method: one URL as prefill and decode."""
    assert checked(msgspec.structs.replace(GOOD, decode_urls=GOOD.prefill_urls)).decode_urls == GOOD.prefill_urls


def test_headers_of_one_connection_do_not_pass() -> None:
    """Goal: RFC 9110: hop-by-hop headers and those Connection names. Method: what is left of a list."""
    given = [("Connection", "close, X-Hop"), ("X-Hop", "1"), ("Keep-Alive", "5"), ("TE", "x"), ("X-End", "2")]

    assert [("X-End", "2"), ("X-Request-Id", "id")] == headers.to_client(given, "id")


def test_what_is_no_text_does_not_pass() -> None:
    """Goal: a header that cannot be written again breaks nothing. Method: a lone surrogate, as odd bytes are read."""
    sent = headers.to_instance([("X-Odd", "\udcff"), ("X-Good", "ä")], "id", None)

    assert [("X-Good", "ä"), ("Accept-Encoding", "identity"), ("X-Request-Id", "id")] == sent


@pytest.mark.parametrize(("given", "is_used"), [("abc", True), (None, False), ("", False), ("x" * 513, False), ("a\tb", False)])
def test_a_request_id_is_used_when_it_can_be_one(given: str | None, is_used: bool) -> None:
    """Goal: logs and engines are safe from it. Method: good and bad ones."""
    assert (given if is_used else "minted") == headers.usable_request_id(given, "minted")


def test_errors_have_the_shape_of_the_api() -> None:
    """Goal: clients find what they look for. Method: the keys."""
    body = json.loads(replies.error_body("m", kind="k", status=503))

    assert {"error": {"message": "m", "type": "k", "param": None, "code": 503}} == body


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"error":{"message":"x","code":400}}', 400),
        (b'{"error":{"message":"x","code":"odd"}}', 500),
        (b'{"error":"text"}', 500),
        (b'{"error":', None),
        (b'{"choices":[]}', None),
    ],
)
def test_an_error_in_an_event_is_recognised(data: bytes, status: int | None) -> None:
    """Goal: the status vLLM could no longer send. Method: a table of data."""
    assert status == replies.error_status(data)
