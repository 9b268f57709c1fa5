"""What a test and an engine process of its own say to each other, and how it travels over their socket pair.

Every frame is a length (4 bytes, big-endian) and one msgpack message. The test sends commands; the engine answers each
of them once and in order, and sends the events `Ready` and `Output` unasked. `kv_transfer_params` travel as JSON text,
because that is what an API body can hold: numbers of any size, but no bytes.
"""

from __future__ import annotations

import socket
from typing import Any, Union

import msgspec

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 64 << 20


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a test: everything it is started with."""

    name: str
    """Also the name of its log file."""
    model: str
    """Folder of the model."""
    kv_role: str = ""
    """kv_producer, kv_consumer or kv_both; empty: a plain engine without connector."""
    connector: str = "MooncakeConnectorV1"
    """One of ours, or vLLM's MultiConnector, whose parts stand in `extra_config`."""
    engine_args: dict[str, Any] = {}
    """vLLM's `EngineArgs`, beyond the model and the connector."""
    extra_config: dict[str, Any] = {}
    """`kv_connector_extra_config`."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What a test asks of the sampler; greedy, so that answers can be compared token by token."""

    max_tokens: int = 8
    min_tokens: int = 0
    n: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = True
    logprobs: int | None = 0
    """0: those of the answer's own tokens, without which a wrong KV block can go unnoticed."""
    prompt_logprobs: int | None = None


# --- commands -------------------------------------------------------------------------------------------------------------


class _Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Submit(_Command, frozen=True, kw_only=True):
    """Give the engine a request; answered by None, or a refusal with vLLM's own words."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    params_json: str
    """kv_transfer_params; `null` for none."""
    cache_salt: str = ""
    adapter: str = ""
    """Folder of a LoRA adapter; its name is that of the folder."""


class Abort(_Command, frozen=True, kw_only=True):
    """The client of a request has gone."""

    request_id: str


class Reject(_Command, frozen=True, kw_only=True):
    """What vLLM's API server does when it refuses a request that carries kv_transfer_params (0.30+)."""

    request_id: str
    params_json: str


class Allow(_Command, frozen=True, kw_only=True):
    """How many more steps the engine may take: None for as many as it likes (the start), 0 to hold it where it is."""

    num_steps: int | None


class Inspect(_Command, frozen=True, kw_only=True):
    """Answered by EngineState."""


class ReadMetrics(_Command, frozen=True, kw_only=True):
    """Answered by `dict[str, float]`: the process's Prometheus samples, `name` or `name{label=value}`."""


class Poison(_Command, frozen=True, kw_only=True):
    """Overwrite the KV bytes of blocks in all layers; answered by the number of blocks."""

    block_ids: tuple[int, ...]


class Digest(_Command, frozen=True, kw_only=True):
    """Answered by `dict[int, str]`: a digest of each block's KV bytes over all layers."""

    block_ids: tuple[int, ...]


class ResetCache(_Command, frozen=True, kw_only=True):
    """vLLM's reset_prefix_cache; answered by what it returns."""

    reset_running_requests: bool
    reset_connector: bool


class Pause(_Command, frozen=True, kw_only=True):
    """vLLM's pause of generation, as a weight update makes it."""

    mode: str
    clear_cache: bool


class Unpause(_Command, frozen=True, kw_only=True):
    pass


class Quit(_Command, frozen=True, kw_only=True):
    """Shut down politely; answered before the process ends."""


Command = Union[Submit, Abort, Reject, Allow, Inspect, ReadMetrics, Poison, Digest, ResetCache, Pause, Unpause, Quit]


# --- answers and events ---------------------------------------------------------------------------------------------------


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine holds right now, read from vLLM's own accounts and the kernel's, not from ours."""

    num_requests: int
    """Requests that the scheduler knows, whatever their state."""
    num_running: int
    num_waiting: int
    num_steps: int
    num_blocks: int
    num_free_blocks: int
    held_block_ids: tuple[int, ...]
    """Blocks with a reference of a request or of the connector; never the null block."""
    cached_block_ids: tuple[int, ...]
    """Blocks that a prefix lookup can hit."""
    block_tables: dict[str, tuple[int, ...]]
    """Block ids of each request that has some (first KV cache group)."""
    num_threads: int
    num_sockets: int


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    pass


class Ready(_Message, frozen=True, kw_only=True):
    """The engine was built and takes requests."""

    seconds: float


class Answered(_Message, frozen=True, kw_only=True):
    """The answer to the oldest unanswered command."""

    value: Any


class Refused(_Message, frozen=True, kw_only=True):
    """The oldest unanswered command failed; the engine lives on."""

    reason: str


class Output(_Message, frozen=True, kw_only=True):
    """News of a request: new tokens of one of its n answers, or its end."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the new tokens; empty unless asked for."""
    num_prompt_logprobs: int
    finish_reason: str
    """Empty while it goes on."""
    num_cached_tokens: int
    params_json: str
    """kv_transfer_params of the response; `null` unless it has some."""


Message = Union[Ready, Answered, Refused, Output]


class FrameSocket:
    """Whole messages over one end of a socket pair. Not locked: one thread sends and one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: object) -> None:
        encoded = msgspec.msgpack.encode(message)
        assert len(encoded) <= MAX_FRAME_BYTES, "no test needs a message of this size"
        self._connection.sendall(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)

    def receive(self) -> bytes:
        """The next frame's content; waits for it.

        Raises:
            EOFError: the other end has closed.
        """
        while (frame := self._take()) is None:
            received = self._connection.recv(1 << 20)
            if not received:
                raise EOFError("the other end of the socket pair has closed")
            self._received += received
        return frame

    def has_frame(self) -> bool:
        """Whether a whole frame is here already, so that nothing in the kernel needs to be waited for."""
        return len(self._received) >= LENGTH_BYTES + self._length()

    def close(self) -> None:
        self._connection.close()

    def _length(self) -> int:
        return int.from_bytes(self._received[:LENGTH_BYTES], "big")

    def _take(self) -> bytes | None:
        if not self.has_frame():
            return None
        end = LENGTH_BYTES + self._length()
        frame = bytes(self._received[LENGTH_BYTES:end])
        del self._received[:end]
        return frame
