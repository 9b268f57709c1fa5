"""Which HTTP headers pass the proxy, and which do not.

Towards an instance: everything of the client's (Authorization, X-Request-Id, tracing, X-Vllm-Priority...) except what
belongs to the one connection, what describes the body we write anew, and what would choose an engine behind our back.
Towards the client: everything of the instance's except what belongs to the one connection.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_mooncake_ascend import limits

REQUEST_ID = "X-Request-Id"
Headers = list[tuple[str, str]]

_ONE_CONNECTION = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-connection",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_OURS_TO_INSTANCE = frozenset(
    {
        "host",
        "content-length",
        "content-type",
        "content-encoding",
        "accept-encoding",
        "expect",
        "x-request-id",
        "x-data-parallel-rank",
    }
)
_OURS_TO_CLIENT = frozenset({"content-length", "content-encoding", "date", "server", "x-request-id"})


def to_instance(headers: Iterable[tuple[str, str]], request_id: str, content_type: str | None) -> Headers:
    """Headers of a leg. The answer must not be compressed: events are read from it."""
    passed = _without(list(headers), _OURS_TO_INSTANCE)
    own = [("Accept-Encoding", "identity"), (REQUEST_ID, request_id)]
    return passed + own + ([("Content-Type", content_type)] if content_type is not None else [])


def to_client(headers: Iterable[tuple[str, str]], request_id: str) -> Headers:
    """Headers of the answer."""
    return [*_without(list(headers), _OURS_TO_CLIENT), (REQUEST_ID, request_id)]


def usable_request_id(given: str | None, minted: str) -> str:
    """The client's request id where it can be one, else `minted`."""
    is_usable = given is not None and 0 < len(given) <= limits.MAX_ID_CHARS and given.isascii() and given.isprintable()
    return given if is_usable and given is not None else minted


def _without(headers: Headers, dropped: frozenset[str]) -> Headers:
    """`headers` less those of one connection (also the ones a Connection header names) and those in `dropped`."""
    named = {name.strip().lower() for key, value in headers if key.lower() == "connection" for name in value.split(",")}
    gone = _ONE_CONNECTION | dropped | named
    return [(key, value) for key, value in headers if key.lower() not in gone and _is_text(value)]


def _is_text(value: str) -> bool:
    """Whether the value can be written again; bytes that were no UTF-8 are kept as lone surrogates when read."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
