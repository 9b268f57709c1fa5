"""runtime.address_policy: without a secret only this host and the listed machines may come. Asks the real host."""

from __future__ import annotations

import logging
import socket

import pytest

from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.runtime.address_policy import address_policy


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_is_always_allowed(host: str) -> None:
    """Goal: two engines on one host need no setting. Method: loopback in every spelling."""
    assert address_policy((), has_secret=False).allows(host)


def test_this_hosts_own_address_is_allowed() -> None:
    """Goal: engines of one host meet at its primary address too. Method: the address a route to elsewhere starts from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this host has no address but loopback")
        own = probe.getsockname()[0]
    assert address_policy((), has_secret=False).allows(own)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1", "node-1", "", "not an address"])
def test_strangers_are_refused(host: str) -> None:
    """Goal: without a secret nobody else is spoken with. Method: addresses and names nothing allows."""
    assert not address_policy((), has_secret=False).allows(host)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("192.0.2.77", True),
        ("::ffff:192.0.2.77", True),
        ("192.0.3.1", False),
        ("2001:db8::5", True),
        ("2001:db8::6", False),
        ("198.51.100.7", True),
    ],
)
def test_listed_machines_are_allowed(host: str, allowed: bool) -> None:
    """Goal: `peers` means what it says. Method: networks, single addresses, and those just outside."""
    policy = address_policy(("192.0.2.0/24", "2001:db8::5", "198.51.100.7"), has_secret=False)
    assert allowed == policy.allows(host)


def test_a_listed_name_is_allowed_with_its_addresses(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: names work in both directions, and one that does not exist is told. Method: one of each."""
    with caplog.at_level(logging.WARNING):
        policy = address_policy(("localhost", "no-such-host.invalid"), has_secret=False)
    told = [record.getMessage() for record in caplog.records]
    assert (True, True, 1) == (policy.allows("127.0.0.1"), policy.allows("no-such-host.invalid"), len(told))


@pytest.mark.parametrize(("peers", "allowed"), [((), True), (("10.0.0.0/8",), False)])
def test_a_secret_opens_the_door_unless_peers_narrow_it(peers: tuple[str, ...], allowed: bool) -> None:
    """Goal: keys decide where there are keys, and a list still holds. Method: a stranger, without and with a list."""
    assert allowed == address_policy(peers, has_secret=True).allows("192.0.2.1")


def test_a_refusal_names_the_remedy() -> None:
    """Goal: the operator knows what to set. Method: check a stranger."""
    with pytest.raises(RemoteProtocolError, match=r"set a cluster secret .* or list it in `peers`"):
        address_policy((), has_secret=False).check("192.0.2.1")
