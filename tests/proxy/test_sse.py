"""Events from bytes, whatever the reads look like."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.proxy import sse


def split(chunks: list[bytes]) -> list[bytes]:
    """All events of the reads `chunks`."""
    splitter = sse.EventSplitter()
    return [event for chunk in chunks for event in splitter.feed(chunk)]


@given(stream=st.binary() | st.text(alphabet="a:\r\n ").map(str.encode), cuts=st.lists(st.integers(0, 60)))
def test_any_cutting_gives_the_same_events(stream: bytes, cuts: list[int]) -> None:
    """Goal: reads do not matter. Method: compare a stream in one piece, in random pieces, and byte by byte."""
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(edges)]

    assert split([stream]) == split(pieces) == split([bytes([byte]) for byte in stream])


@given(stream=st.text(alphabet="a:\r\n ").map(str.encode))
def test_events_are_the_stream_up_to_its_last_end(stream: bytes) -> None:
    """Goal: nothing is lost, added or changed. Method: the events, joined, are the beginning of the stream."""
    events = split([stream])

    assert b"".join(events) == stream[: len(b"".join(events))]
    assert all(event.endswith((b"\n\n", b"\n\r\n")) for event in events)


def test_an_unfinished_event_is_kept_back() -> None:
    """Goal: a cut stream never shows half an event. Method: the end of an event is missing."""
    assert [b"data: 1\n\n"] == split([b"data: 1\n\ndata: 2\n"])


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: memory is bounded. Method: more bytes than an event may have, no end among them."""
    monkeypatch.setattr(limits, "MAX_EVENT_BYTES", 100)
    with pytest.raises(RemoteProtocolError, match="100"):
        split([b"x" * 60, b"x" * 60])


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\r\n\r\n", b"x"),
        (b"event: e\ndata: a\ndata: b\n\n", b"a\nb"),
        (b": keep-alive\n\n", None),
        (b"\n\n", None),
    ],
)
def test_data_is_read_as_the_standard_says(event: bytes, data: bytes | None) -> None:
    """Goal: fields, comments and line ends. Method: one event of each kind."""
    assert data == sse.data_of(event)


@pytest.mark.parametrize(("event", "is_done"), [(b"data: [DONE]\n\n", True), (b'data: {"text":"[DONE]"}\n\n', False)])
def test_only_the_last_event_is_the_end(event: bytes, is_done: bool) -> None:
    """Goal: a model that writes [DONE] does not end its stream. Method: the word as an event and inside one."""
    assert is_done == sse.is_done(event)


def test_an_event_of_ours_is_read_back() -> None:
    """Goal: written and read alike. Method: round trip."""
    assert ([sse.event_of(b"{}")], b"{}") == (split([sse.event_of(b"{}")]), sse.data_of(sse.event_of(b"{}")))
