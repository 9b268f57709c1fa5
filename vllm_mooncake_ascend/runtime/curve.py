"""Keys of the encrypted side channel, derived from the cluster secret.

Every engine and proxy derives the same two key pairs, one for the listening side and one for the connecting side, so
that no key is ever sent or stored. ZMQ CURVE proves to each side that the other holds the secret, and encrypts.
"""

from __future__ import annotations

import msgspec
import zmq
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from vllm_mooncake_ascend.errors import ConfigError

_SALT = b"vllm_mooncake_ascend side channel 1"


class KeyPair(msgspec.Struct, frozen=True, kw_only=True):
    """One side's CURVE keys, in ZMQ's text form."""

    public: bytes
    private: bytes


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides' keys: whoever holds the cluster secret has them all."""

    server: KeyPair
    client: KeyPair

    def apply_to_server(self, server: zmq.Socket[bytes]) -> None:
        """Before bind."""
        server.curve_server = True
        server.curve_publickey = self.server.public
        server.curve_secretkey = self.server.private

    def apply_to_client(self, client: zmq.Socket[bytes]) -> None:
        """Before connect."""
        client.curve_serverkey = self.server.public
        client.curve_publickey = self.client.public
        client.curve_secretkey = self.client.private


def curve_keys(secret: bytes | None) -> CurveKeys | None:
    """The keys of a cluster, None without a secret.

    Raises:
        ConfigError: the installed ZMQ cannot encrypt.
    """
    if secret is None:
        return None
    if not zmq.has("curve"):
        raise ConfigError(
            f"a cluster secret is set, but this pyzmq {zmq.pyzmq_version()} was built without CURVE; install the pyzmq "
            "wheel from PyPI, or remove the secret and list the other machines in `peers`"
        )
    return CurveKeys(server=_pair(secret, b"server"), client=_pair(secret, b"client"))


def _pair(secret: bytes, side: bytes) -> KeyPair:
    private = z85.encode(HKDF(algorithm=hashes.SHA256(), length=32, salt=_SALT, info=side).derive(secret))
    return KeyPair(public=zmq.curve_public(private), private=private)
