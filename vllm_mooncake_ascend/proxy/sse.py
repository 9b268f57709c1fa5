"""Server-sent events: from bytes as they happen to be read to complete events.

An answer is passed on event by event, never read by read: when an instance dies in the middle of an event, what the
client has got so far still ends at an event, and an error event of ours may follow it.

An event ends with an empty line. Lines end with LF or CRLF; the bare CR that the standard also allows no server here
sends, and a stream of it would end as one event that is too large.
"""

from __future__ import annotations

import re

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import RemoteProtocolError

_EVENT_END = re.compile(rb"\n\r?\n")
_LONGEST_END_BYTES = 3
_DONE = b"[DONE]"


class EventSplitter:
    """Collects the reads of one stream and gives out its events, each once and complete.

    The events depend on the bytes alone, not on how the reads cut them.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """Events completed by `chunk`, as they came, their end included.

        Raises:
            RemoteProtocolError: an event is larger than `limits.MAX_EVENT_BYTES`.
        """
        search_from = max(0, len(self._buffer) - _LONGEST_END_BYTES + 1)
        self._buffer += chunk
        events: list[bytes] = []
        start = 0
        while (end := _EVENT_END.search(self._buffer, max(start, search_from))) is not None:
            events.append(bytes(self._buffer[start : end.end()]))
            start = end.end()
        del self._buffer[:start]
        if len(self._buffer) > limits.MAX_EVENT_BYTES:
            raise RemoteProtocolError(
                f"an event of the answer stream has more than {limits.MAX_EVENT_BYTES} bytes; is this a stream of events?"
            )
        return events


def data_of(event: bytes) -> bytes | None:
    """The data of an event, its lines joined; None for an event that is only a comment, as keep-alives are."""
    lines = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def is_done(event: bytes) -> bool:
    """Whether the event is the one that ends an OpenAI stream."""
    return _DONE in event and data_of(event) == _DONE


def event_of(data: bytes) -> bytes:
    """An event that carries `data`, which must be one line."""
    assert not re.search(rb"[\r\n]", data), "data of several lines would become several fields"
    return b"data: " + data + b"\n\n"
