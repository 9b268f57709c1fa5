"""vLLM's message queue, tamed: its readers find what they were not woken for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

shm_broadcast = pytest.importorskip("vllm.distributed.device_communicators.shm_broadcast")

from vllm_mooncake_ascend.connectors import queue_spin  # noqa: E402

FAR_BELOW_VLLMS_OWN_S = 1.0
"""vLLM's reader looks again after 5 s (0.32), or never (0.27)."""


@pytest.fixture
def queue() -> Iterator[tuple[object, object]]:
    """Both ends of one queue of vLLM, in this process."""
    writer = shm_broadcast.MessageQueue(n_reader=1, n_local_reader=1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), 0)
    ready = threading.Thread(target=writer.wait_until_ready)
    ready.start()
    reader.wait_until_ready()
    ready.join()
    yield writer, reader
    for end in (reader, writer):
        end.shutdown()
        close_sockets(end)


def close_sockets(end: Any) -> None:
    """vLLM leaves its sockets to the garbage collector, whose moment is some other test's."""
    held = [value for holder in (end, end._spin_condition) for value in vars(holder).values()]
    sockets = [value for value in held if isinstance(value, zmq.Socket)]
    contexts = {id(socket.context): socket.context for socket in sockets}
    for socket in sockets:
        socket.close(linger=0)
    for context in contexts.values():
        if context is not zmq.Context.instance():
            context.destroy(linger=0)


@pytest.mark.parametrize("silence_s", [0.0, 60.0])
def test_a_reader_finds_what_it_was_not_woken_for(
    silence_s: float, queue: tuple[object, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader naps, or has gone to poll, when a message comes whose notification is lost."""
    writer, reader = queue
    assert queue_spin.tame() >= 1
    reader._spin_condition.last_read = time.monotonic() - silence_s
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    began_s = time.monotonic()
    late = threading.Timer(0.05, writer.enqueue, ("news",))
    late.start()
    assert "news" == reader.dequeue(timeout=30)
    assert time.monotonic() - began_s < FAR_BELOW_VLLMS_OWN_S
    late.join()


def test_a_tamed_reader_still_times_out(queue: tuple[object, object]) -> None:
    """Nothing comes: the reader's own deadline counts, not the short poll. Taming twice changes nothing."""
    _, reader = queue
    queue_spin.tame()
    kind = type(reader._spin_condition)
    queue_spin.tame()
    assert kind is type(reader._spin_condition)
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.2)
    # vLLM rounds what is left down to whole milliseconds.
    assert 0.19 < time.monotonic() - began_s < FAR_BELOW_VLLMS_OWN_S
