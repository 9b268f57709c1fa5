"""Side-channel messages to bytes and back: the largest that are sent, and the ones sent most."""

from __future__ import annotations

import functools
from collections.abc import Callable

from vllm_mooncake_ascend.cli.bench import micro_planner
from vllm_mooncake_ascend.cli.bench.report import Measure
from vllm_mooncake_ascend.cli.bench.rounds import Probe, cpu_s_per_call
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import codec
from vllm_mooncake_ascend.wire.messages import PROTOCOL_VERSION, FromProducer, FromReader, Offer, ReadDone, Renew, Welcome

PREFILL, DECODE = Incarnation("p" * 32), Incarnation("d" * 32)
NUM_RANKS = 8


def codec_probes(*, num_blocks: int, num_layers: int, num_requests: int) -> list[Probe]:
    """Each message encoded, and decoded with all its checks.

    Args:
        num_blocks: of an offer.
        num_layers: of the layout in a welcome, of 8 ranks.
        num_requests: of a renewal.
    """
    transfers = tuple((_transfer(number), _request(number)) for number in range(num_requests))
    from_reader: dict[str, FromReader] = {
        "ReadDone": ReadDone(incarnation=DECODE, expected=PREFILL, transfer_id=_transfer(0), request_id=_request(0), ok=True),
        f"Renew, {num_requests:,} transfers": Renew(incarnation=DECODE, expected=PREFILL, sequence=7, transfers=transfers),
    }
    from_producer: dict[str, FromProducer] = {
        f"Offer, {num_blocks:,} blocks": _offer(num_blocks),
        f"Welcome, {NUM_RANKS} ranks x {num_layers} layers": _welcome(num_layers),
    }
    probes = [probe for name, said in from_reader.items() for probe in _both_ways(name, said, codec.decode_from_reader)]
    probes += [probe for name, said in from_producer.items() for probe in _both_ways(name, said, codec.decode_from_producer)]
    return probes


def _both_ways(name: str, message: FromReader | FromProducer, decode: Callable[[bytes], object]) -> list[Probe]:
    frame = codec.encode(message)
    assert decode(frame) == message
    calls: dict[str, Callable[[], object]] = {
        "encode": functools.partial(codec.encode, message),
        "decode": functools.partial(decode, frame),
    }
    return [
        Probe(
            measure=Measure(name=f"{what} a message", case=name, subject="ours", unit="us", clock="cpu"),
            take=functools.partial(_us_per_call, call),
        )
        for what, call in calls.items()
    ]


def _us_per_call(call: Callable[[], object]) -> float:
    return 1e6 * cpu_s_per_call(call)


def _offer(num_blocks: int) -> Offer:
    return Offer(
        incarnation=PREFILL,
        transfer_id=_transfer(0),
        request_id=_request(0),
        state="ready",
        num_tokens=num_blocks * micro_planner.BLOCK_TOKENS,
        generation=0,
        block_ids=(tuple(range(1, num_blocks + 1)),),
        prompt_digest=bytes(32),
        lease_ttl_s=30.0,
        num_layers_ready=0,
    )


def _welcome(num_layers: int) -> Welcome:
    rank = micro_planner.imagined_rank(num_layers, 8, micro_planner.APART, base_address=1 << 44, session="192.0.2.1:12345")
    fingerprint = {f"fact {number}": "a value of some length" for number in range(20)}
    return Welcome(incarnation=PREFILL, version=PROTOCOL_VERSION, fingerprint=fingerprint, ranks=(rank,) * NUM_RANKS)


def _transfer(number: int) -> TransferId:
    return TransferId(f"{number:032x}")


def _request(number: int) -> RequestId:
    return RequestId(f"cmpl-{number:032x}-0")
