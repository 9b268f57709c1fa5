"""Mooncake's environment: what we add, and what we object to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.environment import call_timeout_s, problems, safe_defaults, store_defaults
from vllm_mooncake_ascend.errors import ConfigError

HOST = "10.0.0.1"
NAMES = ["MC_TCP_ENABLE_CONNECTION_POOL", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TRANSFER_TIMEOUT", "MC_LOG_LEVEL"]


def test_an_empty_environment_gets_the_safe_values() -> None:
    """The four that every transport needs, and TCP by force where TCP was asked for."""
    expected = {
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TRANSFER_TIMEOUT": str(int(limits.ENGINE_CALL_S)),
        "MC_LOG_LEVEL": "ERROR",
        "MC_FORCE_TCP": "1",
    }
    assert expected == safe_defaults({}, protocol="tcp", host=HOST)


@given(
    environ=st.dictionaries(st.sampled_from(NAMES), st.text(max_size=5)), protocol=st.sampled_from(["tcp", "ascend", "rdma"])
)
def test_what_the_user_set_is_never_in_the_defaults(environ: dict[str, str], protocol: str) -> None:
    """Also an empty or senseless value is the user's."""
    assert not set(environ) & set(safe_defaults(environ, protocol=protocol, host=HOST))


@pytest.mark.parametrize("protocol", ["tcp", "ascend", "rdma"])
@pytest.mark.parametrize("host", [HOST, "fd00::1", "node-7"])
def test_the_defaults_are_free_of_problems(protocol: str, host: str) -> None:
    """What we set passes what we check."""
    assert problems(safe_defaults({}, protocol=protocol, host=host), protocol=protocol, host=host) == ()


@pytest.mark.parametrize("protocol", ["ascend", "rdma"])
def test_forced_tcp_contradicts_other_protocols(protocol: str) -> None:
    """Mooncake would silently use TCP."""
    found = problems({"MC_FORCE_TCP": "0"}, protocol=protocol, host=HOST)
    assert [True] == [problem.fatal for problem in found]
    assert "MC_FORCE_TCP" in found[0].text


def test_ipv6_mode_contradicts_an_ipv4_address() -> None:
    """An engine in IPv6 mode cannot reach IPv4 peers."""
    found = problems({"MC_USE_IPV6": "1"}, protocol="tcp", host=HOST)
    assert [True] == [problem.fatal for problem in found]


def test_a_queue_shorter_than_a_call_is_fatal() -> None:
    """It would overflow, which can leave the peer unreachable for ever."""
    environ = {"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(limits.MAX_CALL_DESCRIPTORS - 1)}
    assert [True] == [problem.fatal for problem in problems(environ, protocol="tcp", host=HOST)]


def test_a_pool_that_is_off_is_only_slow() -> None:
    """A warning, not a refusal."""
    found = problems({"MC_TCP_ENABLE_CONNECTION_POOL": "false"}, protocol="tcp", host=HOST)
    assert [False] == [problem.fatal for problem in found]


@given(call_s=st.integers(5, 100), progress_s=st.integers(1, 100))
def test_bytes_may_never_land_after_the_quarantine(call_s: int, progress_s: int) -> None:
    """Timeouts of the user that add up to the quarantine or more are refused, and only these."""
    environ = {
        "MC_TRANSFER_TIMEOUT": str(call_s),
        "MC_TCP_STATUS_TIMEOUT_SEC": "1",
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(progress_s),
    }
    is_fatal = any(problem.fatal for problem in problems(environ, protocol="tcp", host=HOST))
    assert (call_s + progress_s >= limits.QUARANTINE_S) == is_fatal


def test_ascend_attempts_longer_than_the_call_are_named() -> None:
    """Two attempts that outlast MC_TRANSFER_TIMEOUT go on writing after the read was given up."""
    found = problems({"ASCEND_TRANSFER_TIMEOUT": "33064"}, protocol="ascend", host=HOST)
    assert [False] == [problem.fatal for problem in found]
    assert "33064" in found[0].text


@pytest.mark.parametrize(("text", "expected_s"), [(None, limits.ENGINE_CALL_S), ("7", 7.0), ("1", 5.0)])
def test_the_bound_of_a_call_is_what_mooncake_makes_of_it(text: str | None, expected_s: float) -> None:
    """Unset: our default; below Mooncake's minimum: the minimum."""
    assert expected_s == call_timeout_s({} if text is None else {"MC_TRANSFER_TIMEOUT": text})


def test_a_timeout_that_is_no_number_is_named() -> None:
    """The variable and its value are in the message."""
    with pytest.raises(ConfigError, match=r"MC_TRANSFER_TIMEOUT.*'10s'"):
        call_timeout_s({"MC_TRANSFER_TIMEOUT": "10s"})


def test_a_store_client_gets_its_values_and_the_user_keeps_his() -> None:
    """One of the two is the user's."""
    expected = {"MC_STORE_CLIENT_SETUP_RETRIES": "1"}
    assert expected == store_defaults({"MC_RPC_TIMEOUT_MS": "9"})
