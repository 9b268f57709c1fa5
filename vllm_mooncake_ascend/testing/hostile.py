"""What a hostile or broken client may send: kv_transfer_params that are not what they should be, and frames of noise.

Everything comes from a seed, so that a frame that does harm can be found again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import codec, messages

BEYOND_64_BITS = 1 << 70
_DEEP: Any = {}
for _ in range(200):
    _DEEP = {"deeper": _DEEP}


def hostile_params(genuine: dict[str, Any]) -> dict[str, Any]:
    """Bodies by name, each a JSON value that some client could send as kv_transfer_params.

    Args:
        genuine: params as a prefill engine issued them, of a transfer that is over; most bodies change one field.
    """
    undigested = {**genuine, "remote_prompt_digest": ""}
    unreachable = {
        "a transfer that is over": undigested,
        "a transfer of nobody": {**undigested, "transfer_id": "nobody's"},
        "an engine of nobody": {**undigested, "remote_incarnation": "nobody"},
        "a port of nobody": {**undigested, "remote_port": 1},
    }
    missing = {f"without {key}": {name: genuine[name] for name in genuine if name != key} for key in _NEEDED}
    changed = {f"{key}={_name(value)}": {**genuine, key: value} for key, values in _WRONG_VALUES.items() for value in values}
    return {**_WRONG_BODIES, **unreachable, **missing, **changed}


_NEEDED = ("transfer_id", "remote_incarnation", "remote_host", "remote_port", "remote_num_tokens")
_WRONG_BODIES: dict[str, Any] = {
    "empty": {},
    "only a flag": {"do_remote_prefill": True},
    "both flags": {"do_remote_prefill": True, "do_remote_decode": True},
    "a flag of text": {"do_remote_prefill": "true"},
    "a flag of a number": {"do_remote_decode": 1},
    "an id of a number": {"do_remote_decode": True, "transfer_id": 7},
    "an id without end": {"do_remote_decode": True, "transfer_id": "x" * 100_000},
    "an id of nothing": {"do_remote_decode": True, "transfer_id": ""},
    "an id of control characters": {"do_remote_decode": True, "transfer_id": "a\x00\n\x1b[31m"},
    "keys of another connector": {
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_block_ids": [1, 2, 3],
        "remote_bootstrap_addr": "http://127.0.0.1:1",
    },
    "deep": _DEEP,
    "wide": {f"key {index}": index for index in range(10_000)},
}
_WRONG_VALUES: dict[str, list[Any]] = {
    "transfer_id": [None, 7, "", "x" * 513, ["a"], {"a": 1}, "no such transfer", "\ud800", "a\x00b"],
    "remote_incarnation": [None, 1.5, "", "another engine"],
    "remote_host": [None, 127, "", "127.0.0.1:1/x", "tcp://127.0.0.1", "::ffff:192.0.2.1", "*", "a" * 300, "127.0.0.1\n"],
    "remote_port": [None, 0, -1, 65_536, BEYOND_64_BITS, "5000", 5000.5, True, 1],
    "remote_num_tokens": [None, -1, BEYOND_64_BITS, "many", 1.5, True, [1]],
    "remote_prompt_digest": [7, "not hexadecimal", "00", "0" * 64],
    "issued_at_s": [-1, "yesterday", BEYOND_64_BITS],
}


def hostile_frames(seed: int, num_frames: int) -> Iterator[list[bytes]]:
    """Multipart ZMQ messages for a side channel: noise, valid messages with bytes changed, and valid nonsense."""
    source = random.Random(seed)
    makers = (_noise, _changed, _cut, _valid, _many_parts)
    for _ in range(num_frames):
        yield source.choice(makers)(source)


def _noise(source: random.Random) -> list[bytes]:
    return [source.randbytes(source.choice((0, 1, 2, 17, 300, 70_000)))]


def _changed(source: random.Random) -> list[bytes]:
    frame = bytearray(_valid(source)[0])
    for _ in range(source.randint(1, 4)):
        frame[source.randrange(len(frame))] = source.randrange(256)
    return [bytes(frame)]


def _cut(source: random.Random) -> list[bytes]:
    (frame,) = _valid(source)
    return [frame[: source.randrange(len(frame))]]


def _many_parts(source: random.Random) -> list[bytes]:
    return [source.randbytes(source.randrange(5)) for _ in range(source.randint(2, 6))]


def _valid(source: random.Random) -> list[bytes]:
    """A well-formed message about transfers nobody announced, from an engine nobody knows, to one that may be another."""
    incarnation = Incarnation(f"stranger {source.randrange(50)}")
    expected = Incarnation(f"engine {source.randrange(3)}")
    transfer_id, request_id = TransferId(f"t{source.randrange(1000)}"), RequestId(f"r{source.randrange(1000)}")
    about: dict[str, Any] = {
        "incarnation": incarnation,
        "expected": expected,
        "transfer_id": transfer_id,
        "request_id": request_id,
    }
    message: messages.FromReader = source.choice(
        (
            messages.Hello(incarnation=incarnation, version=source.choice((0, 1, 2, 1 << 30))),
            messages.Subscribe(**about),
            messages.ReadDone(**about, ok=source.random() < 0.5),
            messages.Release(**about),
            messages.Renew(
                incarnation=incarnation,
                expected=expected,
                sequence=source.randrange(1 << 32),
                transfers=((transfer_id, request_id),) * source.randrange(20),
            ),
        )
    )
    return [codec.encode(message)]


def _name(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 30 else f"{shown[:27]}..."
