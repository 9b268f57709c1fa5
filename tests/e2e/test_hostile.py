"""Clients and peers that send nonsense: no request of theirs harms an engine, none gets a wrong answer."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import pytest
import zmq

from vllm_mooncake_ascend.testing import hostile
from vllm_mooncake_ascend.testing.engine_answer import Text
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, random_prompt
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, RequestRefused, Running
from vllm_mooncake_ascend.types import Incarnation
from vllm_mooncake_ascend.wire import codec, messages

pytestmark = pytest.mark.engine

SEED = 20_261_129
NUM_FRAMES = 10_000
ANSWER_MS = 10_000
HOSTILE_TIMEOUT_S = 60.0
"""A transfer nobody announced is awaited for 30 s, then computed."""


def _used_params(pair: EnginePair) -> dict[str, Any]:
    """Genuine params of a transfer that is over."""
    prompt = random_prompt("hostile", 64)
    params = pair.prefill_leg(prompt)
    pair.decode_leg(prompt, params)
    return dict(params)


def _wrong_answers(pair: EnginePair, engine: EngineProcess) -> dict[str, Text]:
    """Every hostile body in a request of its own, all at once; by body the answers that are not the prompt's."""
    bodies = hostile.hostile_params(_used_params(pair))
    prompts = {name: random_prompt(name, 40 + index) for index, name in enumerate(bodies)}
    requests: dict[str, Running] = {}
    for name, body in bodies.items():
        with contextlib.suppress(RequestRefused):  # by vLLM: numbers beyond 64 bits
            requests[name] = engine.submit(prompts[name], params=body)
    assert len(requests) >= 50
    texts = {name: running.result(timeout_s=HOSTILE_TIMEOUT_S).text for name, running in requests.items()}
    return {name: text for name, text in texts.items() if text != pair.expected(prompts[name])}


def test_hostile_params_on_decode_are_answered_right(pair: EnginePair) -> None:
    """Goal: whatever a client sends as kv_transfer_params, it gets its own prompt's answer and the engine lives.

    Method: more than fifty bodies at once on the decode engine.
    """
    assert {} == _wrong_answers(pair, pair.decode)


def test_hostile_params_on_prefill_are_answered_right(pair: EnginePair) -> None:
    """Goal and method as above, on the prefill engine; leases that two bodies with a valid wish opened are reset."""
    assert {} == _wrong_answers(pair, pair.prefill)
    pair.prefill.reset_cache(reset_connector=True)


def test_random_frames_on_the_side_channel_harm_nobody(pair: EnginePair) -> None:
    """Goal: noise neither ends the side channel nor blocks it. Method: 10,000 hostile messages over a few sockets while a
    transfer goes on; then a Hello is answered."""
    params = _used_params(pair)
    address = f"tcp://{params['remote_host']}:{params['remote_port']}"
    prompts = [random_prompt(f"among noise {index}", 600) for index in range(4)]
    with zmq.Context() as context:
        strangers = [context.socket(zmq.DEALER) for _ in range(4)]
        for stranger in strangers:
            stranger.linger = 0
            stranger.sndhwm = 0
            stranger.connect(address)
        for index, frames in enumerate(hostile.hostile_frames(SEED, NUM_FRAMES)):
            strangers[index % len(strangers)].send_multipart(frames)

        wrong = pair.wrong_answers(prompts)
        strangers[0].send(codec.encode(_hello()))
        answered = strangers[0].poll(ANSWER_MS)
        for stranger in strangers:
            stranger.close()

    assert ({}, 1) == (wrong, answered)


def test_bytes_that_are_no_zmq_harm_nobody(pair: EnginePair) -> None:
    """Goal: a port scanner or a web client on the side channel's port does no harm. Method: raw bytes on twenty
    connections, some left open while transfers go on."""
    params = _used_params(pair)
    requests = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 64, b"\xff" + b"\x00" * 8 + b"\x7f", b"\x16\x03\x01"]
    connections = []
    for index in range(20):
        connection = socket.create_connection((params["remote_host"], params["remote_port"]), timeout=5)
        connection.sendall(requests[index % len(requests)])
        connections.append(connection)

    wrong = pair.wrong_answers([random_prompt("among scanners", 600)])
    for connection in connections:
        connection.close()

    assert {} == wrong


def _hello() -> messages.Hello:
    return messages.Hello(incarnation=Incarnation("a polite stranger"), version=messages.PROTOCOL_VERSION)
