"""What contract tests share."""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend.engines import environment


@pytest.fixture
def mooncake_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own MC_* values for TCP, whatever this shell has, with the shortest timeout Mooncake takes: a stopped peer then
    costs 5 s. Skips where Mooncake is not installed; it reads MC_LOG_LEVEL when it is imported."""
    for name, value in environment.safe_defaults({}, protocol="tcp", host="127.0.0.1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", str(environment.MIN_TRANSFER_TIMEOUT_S))
    pytest.importorskip("mooncake.engine")
