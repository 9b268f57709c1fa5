"""FlightRecorder: the last things that happened to each transfer, for the moment when one goes wrong.

Every event and action of a machine is noted under its transfer. Nothing is logged while all is well; a warning or a broken
invariant carries the transfer's story. Bounded three ways: transfers, lines of one transfer, characters of one line.

Events that know only the request are filed under the transfer the request was last seen with.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator

import msgspec

MAX_TRANSFERS = 1_024
MAX_LINES = 48
MAX_LINE_CHARS = 240
_MAX_FIELD_CHARS = 64
_NESTED = ("message", "transfer", "ended", "order", "report")
"""Fields that hold the value which names the transfer or the request."""


class FlightRecorder:
    """Notes from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stories: collections.OrderedDict[str, collections.deque[tuple[float, str]]] = collections.OrderedDict()
        self._transfer_of: collections.OrderedDict[str, str] = collections.OrderedDict()

    def note(self, value: msgspec.Struct, now_s: float) -> None:
        """Note an event or action, if it is about one transfer."""
        transfer_id, request_id = _about(value)
        with self._lock:
            if transfer_id and request_id:
                self._remember(request_id, transfer_id)
            key = transfer_id or self._transfer_of.get(request_id) or request_id
            if key:
                self._lines(key).append((now_s, line(value)))

    def transfer_of(self, value: msgspec.Struct) -> str:
        """The transfer an event or action is about; the request where none is known, else empty."""
        transfer_id, request_id = _about(value)
        with self._lock:
            return transfer_id or self._transfer_of.get(request_id) or request_id

    def story(self, transfer_id: str) -> str:
        """What happened to a transfer, one line each with seconds since the first line; empty if nothing is known."""
        with self._lock:
            lines = list(self._stories.get(transfer_id, ()))
        if not lines:
            return ""
        start_s = lines[0][0]
        return "\n".join(f"  +{at_s - start_s:.3f} s {text}" for at_s, text in lines)

    def _remember(self, request_id: str, transfer_id: str) -> None:
        self._transfer_of[request_id] = transfer_id
        self._transfer_of.move_to_end(request_id)
        if len(self._transfer_of) > MAX_TRANSFERS:
            self._transfer_of.popitem(last=False)

    def _lines(self, key: str) -> collections.deque[tuple[float, str]]:
        lines = self._stories.get(key)
        if lines is None:
            lines = self._stories[key] = collections.deque(maxlen=MAX_LINES)
            if len(self._stories) > MAX_TRANSFERS:
                self._stories.popitem(last=False)
        self._stories.move_to_end(key)
        return lines


def _about(value: msgspec.Struct) -> tuple[str, str]:
    """Transfer id and *local* request id of a value; empty where it has none.

    A message's request id is the reader's: at a producer it belongs to another engine and is not filed.
    """
    nested = next((found for name in _NESTED if (found := getattr(value, name, None)) is not None), None)
    transfer_id = getattr(value, "transfer_id", "") or getattr(nested, "transfer_id", "")
    request_id = getattr(value, "request_id", "") or ("" if hasattr(value, "message") else getattr(nested, "request_id", ""))
    return transfer_id, request_id


def line(value: msgspec.Struct) -> str:
    """A value in one line of bounded length, however much it holds."""
    return f"{type(value).__name__}({', '.join(_fields(value))})"[:MAX_LINE_CHARS]


def _fields(value: msgspec.Struct) -> Iterator[str]:
    for name in value.__struct_fields__:
        yield f"{name}={_short(getattr(value, name))}"


def _short(value: object) -> str:
    """A field in few characters, however much it holds: block tables are counted, not printed."""
    match value:
        case msgspec.Struct():
            return line(value)
        case tuple() if value and isinstance(value[0], tuple):
            return f"<{sum(map(len, value))} in {len(value)}>"
        case tuple() | list() | dict():
            return f"<{len(value)}>"
        case bytes():
            return value[:8].hex()
        case str() if len(value) > _MAX_FIELD_CHARS:
            return repr(value[:_MAX_FIELD_CHARS]) + "..."
        case _:
            return repr(value)
