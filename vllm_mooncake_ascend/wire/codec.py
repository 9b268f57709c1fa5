"""Side-channel messages as bytes: one version byte, then msgpack.

Decoding answers any byte string with a message or a RemoteProtocolError, in time and memory bounded by
`limits.MAX_MESSAGE_BYTES`: the size is checked first, msgspec never allocates by an announced length, and
`wire.checks` looks at every value before anyone sees it.

The version byte stands outside the msgpack so that another version is recognised whatever its messages look like.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import LocalProtocolError, RemoteProtocolError, VersionMismatch
from vllm_mooncake_ascend.wire import checks
from vllm_mooncake_ascend.wire.messages import PROTOCOL_VERSION, FromProducer, FromReader

_VERSION_BYTE = bytes([PROTOCOL_VERSION])
_encoder = msgspec.msgpack.Encoder()
_reader_decoder: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)
_producer_decoder: msgspec.msgpack.Decoder[FromProducer] = msgspec.msgpack.Decoder(FromProducer)

_Message = TypeVar("_Message", bound=Any)


def encode(message: FromReader | FromProducer) -> bytes:
    """The frame of a message.

    Raises:
        LocalProtocolError: our own message holds a value that the other side would refuse, or is too large.
    """
    try:
        checks.check(message)
        frame = _VERSION_BYTE + _encoder.encode(message)
    except (RemoteProtocolError, ValueError, OverflowError) as error:  # lone surrogates, integers beyond 64 bits
        raise LocalProtocolError(f"cannot send {type(message).__name__}: {error}") from error
    if len(frame) > limits.MAX_MESSAGE_BYTES:
        raise LocalProtocolError(
            f"cannot send {type(message).__name__} of {len(frame)} bytes, the limit is {limits.MAX_MESSAGE_BYTES}"
        )
    return frame


def decode_from_reader(frame: bytes) -> FromReader:
    """What a decode engine said.

    Raises:
        VersionMismatch: the frame is of another protocol version.
        RemoteProtocolError: it is no valid message.
    """
    return _decode(frame, _reader_decoder)


def decode_from_producer(frame: bytes) -> FromProducer:
    """What a prefill engine said; raises as `decode_from_reader`."""
    return _decode(frame, _producer_decoder)


def _decode(frame: bytes, decoder: msgspec.msgpack.Decoder[_Message]) -> _Message:
    if not 0 < len(frame) <= limits.MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message must have 1 to {limits.MAX_MESSAGE_BYTES} bytes, got {len(frame)}")
    if frame[0] != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the peer speaks side-channel version {frame[0]}, this engine version {PROTOCOL_VERSION}; "
            "run the same release of vllm-mooncake-ascend on both"
        )
    try:
        message = decoder.decode(memoryview(frame)[1:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"not a side-channel message: {error}") from error
    checks.check(message)
    return message
