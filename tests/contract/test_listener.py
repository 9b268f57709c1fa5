"""Waking the listener of an engine."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from vllm_mooncake_ascend.engines.listener import ACCEPT_TIMEOUT_S, wake_often
from vllm_mooncake_ascend.engines.native import EngineSettings, NativeEngine


def test_the_socket_that_listens_on_the_port_gets_the_timeout_and_no_other() -> None:
    """Two sockets listen; one is meant. Its timeout is read back, and the other's is still 0."""
    with socket.create_server(("127.0.0.1", 0)) as meant, socket.create_server(("127.0.0.1", 0)) as other:
        assert wake_often(meant.getsockname()[1])
        raw = [each.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) for each in (meant, other)]
    expected_us = int(ACCEPT_TIMEOUT_S * 1e6)
    assert pytest.approx(expected_us, abs=10_000) == struct.unpack("ll", raw[0])[1]
    assert struct.unpack("ll", raw[1]) == (0, 0)


def test_a_port_nobody_listens_on_changes_nothing() -> None:
    """A client's socket of that port does not count."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2]) as client:
        assert not wake_often(client.getsockname()[1])


@pytest.mark.engine
def test_destroying_an_engine_takes_a_moment_only(mooncake_environment: None) -> None:
    """Mooncake alone needs up to 1 s, with the GIL held. A short visit ends the wait that began before the timeout was
    set; the fastest of five counts, as the machine may be busy."""
    settings = EngineSettings(host="127.0.0.1", protocol="tcp", device_name="", memory_location="*", call_timeout_s=10.0)
    destroying_s = []
    for _ in range(5):
        engine = NativeEngine(settings)
        host, _, port = engine.session.partition(":")
        socket.create_connection((host, int(port))).close()
        started_s = time.monotonic()
        assert engine.destroy()
        destroying_s.append(time.monotonic() - started_s)
    assert min(destroying_s) < 0.2
