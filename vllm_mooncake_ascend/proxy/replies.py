"""Errors of our own, in the shape of the OpenAI API: clients read every error of this proxy as they read vLLM's."""

from __future__ import annotations

import json


def error_body(message: str, *, kind: str, status: int) -> bytes:
    """The JSON body of an error."""
    error = {"message": message, "type": kind, "param": None, "code": status}
    return json.dumps({"error": error}).encode()


def error_status(data: bytes) -> int | None:
    """The status that an error carried in the data of a stream's event names; None when the event is no error.

    vLLM has sent its 200 before it can know, and tells what went wrong in the first event.
    """
    if not data.startswith(b'{"error"'):
        return None
    try:
        error = json.loads(data)["error"]
    except (ValueError, RecursionError):
        return None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code <= 599 else 500
