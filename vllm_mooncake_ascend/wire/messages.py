"""Side channel: what a decode engine (reader) and a prefill engine (producer) say to each other.

A producer's scheduler-role connector listens on one ZMQ ROUTER socket; every reader engine connects one DEALER to it.
Each frame is one message of the tables below, encoded by `wire.codec`. Every message is idempotent: a reader repeats it
until it is answered, and an answer that comes twice changes nothing. Answers carry what they answer, never an order.

reader -> producer
    Hello        who are you?                                               answered by Welcome, or Goodbye
    Subscribe    I will read this transfer: keep its blocks, tell me        answered by Offer or Gone
    Renew        I still will                                               answered by Renewed (listing those that are gone)
    ReadDone     I have read all (ok) or given up (not ok)                  answered by Verdict
    Release      I need nothing of it (any more)                            answered by Verdict

producer -> reader
    Welcome      incarnation, fingerprint and layout of all ranks
    Offer        state of a transfer: pending, or ready with its blocks; also sent unasked when the state changes, and then
                 of what is new if a running prefill goes on: who cannot join that with what it knows subscribes again
    Gone         there is no such transfer (any more), and why
    Renewed      the renewal numbered `sequence` counts for the listed transfers; `gone` are not held
    Verdict      held: the blocks were ours to read until now; lost: they may have been overwritten
    Goodbye      this engine shuts down or does not speak with you, and why

`incarnation` in a message is the sender's, `expected` is the one the sender thinks it speaks to: an engine answers a
message meant for another incarnation with Welcome of its own, and the reader drops all it knew of the other one.
"""

from __future__ import annotations

from typing import Literal, Union

import msgspec

from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId

PROTOCOL_VERSION = 3
"""Changes with every change of a message; both sides must have the same (the fingerprint carries it)."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True):
    """Common ground of all messages: positional on the wire, tagged with the class name."""


class Hello(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    version: int


class Subscribe(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    expected: Incarnation
    transfer_id: TransferId
    request_id: RequestId
    """The reader's own request: with its incarnation the key of the reader."""
    streams: bool = False
    """It reads blocks while the prefill still runs: pending offers to it carry those that are written."""


class Renew(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    expected: Incarnation
    sequence: int
    """Counts up per reader engine: an acknowledgement is of exactly this renewal."""
    transfers: tuple[tuple[TransferId, RequestId], ...]


class ReadDone(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    expected: Incarnation
    transfer_id: TransferId
    request_id: RequestId
    ok: bool


class Release(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    expected: Incarnation
    transfer_id: TransferId
    request_id: RequestId


class Welcome(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    version: int
    fingerprint: dict[str, str]
    """`layout.fingerprint`: what two peers must agree on, by name."""
    ranks: tuple[RankLayout, ...]


class Offer(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    transfer_id: TransferId
    request_id: RequestId
    state: Literal["pending", "ready"]
    num_tokens: int
    """Tokens whose KV is written and published; with "ready" this is final."""
    generation: int
    """Counts preemptions of the prefill: what was read of blocks of another generation has to be read again."""
    block_ids: tuple[tuple[int, ...], ...]
    """Per KV cache group the producer's block ids from token 0 on, less the `num_known_blocks`, covering `num_tokens`; 0 is
    the null block. Empty while nothing may be read: pending, and the reader does not stream or nothing is published."""
    prompt_digest: bytes
    lease_ttl_s: float
    num_layers_ready: int
    """Reserved for layer-wise progress; all layers of the published tokens are ready while it is 0."""
    num_known_blocks: tuple[int, ...] = ()
    """Per KV cache group, how many blocks this reader was told of before, in this generation: `block_ids` goes on from there,
    so that streaming a prompt costs what its blocks cost and not their square. Empty: all are here, as in any answer."""


class Gone(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    transfer_id: TransferId
    request_id: RequestId
    reason: str


class Renewed(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    sequence: int
    gone: tuple[tuple[TransferId, RequestId], ...]


class Verdict(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    transfer_id: TransferId
    request_id: RequestId
    held: bool


class Goodbye(_Message, frozen=True, kw_only=True):
    incarnation: Incarnation
    reason: str


FromReader = Union[Hello, Subscribe, Renew, ReadDone, Release]
FromProducer = Union[Welcome, Offer, Gone, Renewed, Verdict, Goodbye]
