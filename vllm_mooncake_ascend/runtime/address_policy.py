"""AddressPolicy: which machines this engine speaks with when no cluster secret proves who they are.

This host's own addresses always; others where `peers` names them. With a cluster secret and no `peers` everybody may
come: the side channel's keys decide. Incoming connections are judged by the address they come from, outgoing ones by the
host name or address that kv_transfer_params gave.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Iterable

import msgspec

from vllm_mooncake_ascend.errors import RemoteProtocolError

logger = logging.getLogger(__name__)

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AddressPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Made by `address_policy`."""

    allows_all: bool
    networks: tuple[_Network, ...]
    names: frozenset[str]

    def allows(self, host: str) -> bool:
        """Whether a peer at this address, or of this name, may be spoken with."""
        if self.allows_all:
            return True
        address = _address(host)
        if address is None:
            return host == "localhost" or host in self.names
        return (
            address.is_loopback
            or any(address.version == network.version and address in network for network in self.networks)
            or _is_own(address)
        )

    def check(self, host: str) -> None:
        """Accept a peer by returning.

        Raises:
            RemoteProtocolError: it may not be spoken with; says how to allow it.
        """
        if not self.allows(host):
            raise RemoteProtocolError(
                f"{host!r} is neither this host nor listed in `peers`; set a cluster secret "
                "(VLLM_MOONCAKE_ASCEND_SECRET) on all engines, or list it in `peers`"
            )


def address_policy(peers: Iterable[str], *, has_secret: bool) -> AddressPolicy:
    """The policy of a configuration. Host names are resolved here, once; one that has no address is logged."""
    networks: list[_Network] = []
    names = set()
    for peer in peers:
        try:
            networks.append(ipaddress.ip_network(peer, strict=False))
        except ValueError:
            names.add(peer)
            networks += [ipaddress.ip_network(address) for address in resolve(peer)]
    return AddressPolicy(allows_all=has_secret and not networks and not names, networks=tuple(networks), names=frozenset(names))


def resolve(host: str) -> list[str]:
    """Addresses of a host name, or the address itself; empty, and logged, if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        logger.warning("host name has no address: host=%s error=%s", host, error)
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _address(host: str) -> _Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_own(address: _Address) -> bool:
    """Whether this machine has the address: only then may a socket be bound to it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True
