"""A blocking client of OpenAI-style servers for tests: ask, and leave in the middle of an answer."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

TIMEOUT_S = 120.0


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer."""

    status: int
    body: Any
    """The JSON value; the text where it is no JSON."""

    def token_ids(self) -> list[list[int]]:
        """Tokens of each choice, for requests with `return_token_ids`."""
        return [choice["token_ids"] for choice in sorted(self.body["choices"], key=lambda choice: int(choice["index"]))]


def post(url: str, path: str, body: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> Reply:
    """Send `body` and wait for the whole answer."""
    connection = _send(url, path, body, timeout_s)
    try:
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    try:
        return Reply(status=response.status, body=json.loads(text))
    except ValueError:
        return Reply(status=response.status, body=text)


def leave(url: str, path: str, body: Mapping[str, Any], *, after_s: float | None) -> None:
    """Send `body` and close the connection: after so many seconds, or at the first event of the answer for None."""
    connection = _send(url, path, body, TIMEOUT_S if after_s is None else after_s)
    try:
        response = connection.getresponse()
        if after_s is None:
            response.readline()
    except TimeoutError:
        pass
    finally:
        connection.close()


def _send(url: str, path: str, body: Mapping[str, Any], timeout_s: float) -> http.client.HTTPConnection:
    address = urlsplit(url)
    assert address.hostname is not None, url
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection
