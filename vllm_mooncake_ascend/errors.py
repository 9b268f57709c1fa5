"""Every error this package raises, by who is at fault.

    MooncakeAscendError
    ├── ConfigError            the operator: a setting is wrong, or what was asked for is not supported
    ├── LocalProtocolError     we: our own code broke a rule of the protocol (a bug)
    ├── RemoteProtocolError    a peer or client: it sent something that is not a valid message or parameter
    │   └── VersionMismatch    it speaks another version of the side channel
    ├── EngineError            the transfer engine or the store; carries an Outcome
    ├── DeviceError            the accelerator runtime
    └── PeerLost               a peer that does not answer, or is not the one we knew

Each message tells what was attempted, on what, with which limit, and what to do next.
This module is a leaf so that no import loop can form around it.
"""

from __future__ import annotations

from vllm_mooncake_ascend.types import Outcome


class MooncakeAscendError(Exception):
    """Root of the tree; never raised itself."""


class ConfigError(MooncakeAscendError):
    """A setting is unknown, out of range or asks for something not supported."""


class LocalProtocolError(MooncakeAscendError):
    """Our own side did what the protocol forbids."""


class RemoteProtocolError(MooncakeAscendError):
    """The other side sent bytes or values that the protocol forbids."""


class VersionMismatch(RemoteProtocolError):
    """The other side speaks another version of the side channel."""


class EngineError(MooncakeAscendError):
    """A Mooncake call failed; `outcome` says what may be assumed about its target."""

    def __init__(self, message: str, *, outcome: Outcome) -> None:
        super().__init__(message)
        self.outcome = outcome


class DeviceError(MooncakeAscendError):
    """A call of the device runtime failed."""


class PeerLost(MooncakeAscendError):
    """A peer did not answer within its bound, or answered as another incarnation."""
