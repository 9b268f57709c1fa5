"""runtime.p2p_scheduler: whole conversations of a prefill and a decode scheduler, real machines over loopback sockets."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import zmq

from vllm_mooncake_ascend.config import parse_p2p
from vllm_mooncake_ascend.errors import LocalProtocolError, RemoteProtocolError
from vllm_mooncake_ascend.layout import compatibility
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.runtime.clock import boot_s, wall_s
from vllm_mooncake_ascend.runtime.p2p_scheduler import P2PScheduler
from vllm_mooncake_ascend.runtime.release import send_release
from vllm_mooncake_ascend.types import Incarnation, Outcome, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire import codec, messages, params
from vllm_mooncake_ascend.wire.steps import ReadEnded

WAIT_S = 30.0
DIGEST = b"d" * 32
P1, D1 = RequestId("prefill-1"), RequestId("decode-1")
NUM_TOKENS = 32


def layout() -> RankLayout:
    """One plane of eight blocks of 16 tokens."""
    plane = Plane(
        name="layers.0/k",
        group_index=0,
        base_address=1 << 20,
        num_blocks=8,
        tokens_per_block=16,
        first_head=0,
        num_heads=1,
        total_heads=1,
        bytes_per_token_head=64,
        block_stride_bytes=1024,
        token_stride_bytes=64,
        head_stride_bytes=64,
    )
    return RankLayout(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        session="127.0.0.1:9",
        groups=(GroupLayout(tokens_per_block=16, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False),),
        planes=(plane,),
        regions=(Region(base_address=1 << 20, length_bytes=8192),),
    )


@contextlib.contextmanager
def scheduler(role: str, *, model: str = "m", streams: bool = False, **extra: object) -> Iterator[P2PScheduler]:
    """A running scheduler shell of a strict engine on loopback."""
    config, _ = parse_p2p(
        {"side_channel_host": "127.0.0.1", **extra},
        {"VLLM_MOONCAKE_ASCEND_STRICT": "1"},
        device_type="cpu",
        default_host="127.0.0.1",
    )
    made = P2PScheduler(
        config=config,
        incarnation=Incarnation(f"{role}-{id(config)}"),
        produces=role in ("prefill", "both"),
        consumes=role in ("decode", "both"),
    )
    fingerprint = compatibility.fingerprint({"model": model}, (layout(),), protocol_version=1)
    made.start((layout(),), fingerprint, num_blocks=8, can_report_unknown_at_once=True, publishes=streams, reads_early=streams)
    try:
        yield made
    finally:
        made.close()


def taken(shell: P2PScheduler, *kinds: type) -> list[Any]:
    """Everything the scheduler thread is to do, until one action of each kind has come."""
    done: list[Any] = []
    deadline_s = boot_s() + WAIT_S
    while not set(kinds) <= set(map(type, done)):
        assert boot_s() < deadline_s, f"waited for {kinds}, got {done}"
        shell.wait(1.0)
        done += shell.drain()
    return done


def prefilled(prefill: P2PScheduler) -> dict[str, Any]:
    """Run a prompt of 32 tokens in blocks 5 and 6 through prefill; what its response carries."""
    arrived = events.PrefillArrived(
        request_id=P1, wanted_id=None, fresh_id=TransferId("t1"), prompt_digest=DIGEST, num_prompt_tokens=NUM_TOKENS
    )
    prefill.feed_producer(arrived)
    (named,) = taken(prefill, actions.NameTransfer)
    ended = events.PrefillEnded(request_id=P1, has_kv=True, num_tokens=NUM_TOKENS, block_ids=((5, 6),), reason="")
    prefill.feed_producer(ended)
    assert [actions.PinBlocks(transfer_id=named.transfer_id, block_ids=(5, 6))] == taken(prefill, actions.PinBlocks)
    assert prefill.address is not None
    transfer = params.RemotePrefill(
        transfer_id=named.transfer_id,
        incarnation=prefill.incarnation,
        address=prefill.address,
        num_tokens=NUM_TOKENS,
        prompt_digest=DIGEST,
    )
    return params.issue(transfer, secret=None, now_s=wall_s())


def arrive(decode: P2PScheduler, body: dict[str, Any]) -> None:
    """The decode request with prefill's kv_transfer_params."""
    transfer = params.parse(body, secret=None, now_s=wall_s())
    assert isinstance(transfer, params.RemotePrefill)
    arrived = events.RequestArrived(request_id=D1, transfer=transfer, prompt_digest=DIGEST, num_prompt_tokens=NUM_TOKENS)
    decode.feed_consumer(arrived)


def remote_tokens(decode: P2PScheduler) -> int:
    """Ask as vLLM does, step after step, until the answer is known."""
    deadline_s = boot_s() + WAIT_S
    while (num_tokens := decode.remote_tokens(D1, 0)) is None:
        assert boot_s() < deadline_s, "no answer"
        decode.wait(0.001)
    return num_tokens


def read(decode: P2PScheduler, outcome: Outcome) -> list[Any]:
    """Allocate blocks 2 and 3, let the workers' read end; what the scheduler thread was told to do from then on."""
    allocate(decode, NUM_TOKENS)
    order = next(action.order for action in taken(decode, actions.OrderRead) if isinstance(action, actions.OrderRead))
    decode.feed_consumer(events.RankReadEnded(ended=read_ended(order.transfer_id, outcome)))
    return taken(decode, actions.ReportReceive)


def allocate(decode: P2PScheduler, num_tokens: int) -> None:
    """vLLM gives blocks 2 and 3."""
    allocated = events.BlocksAllocated(
        request_id=D1,
        num_local_tokens=0,
        num_remote_tokens=num_tokens,
        block_ids=((2, 3),),
        loaded_block_ids=(2, 3),
    )
    decode.feed_consumer(allocated)


def read_ended(transfer_id: TransferId, outcome: Outcome) -> ReadEnded:
    return ReadEnded(
        transfer_id=transfer_id,
        request_id=D1,
        rank=0,
        outcome=outcome,
        reason="",
        num_bytes=2048,
        num_descriptors=2,
        seconds=0.01,
    )


def reports(done: list[Any]) -> list[bool]:
    """How receives were reported."""
    return [action.report.ok for action in done if isinstance(action, actions.ReportReceive)]


def test_a_transfer_from_arrival_to_release() -> None:
    """Goal: both shells carry a transfer through. Method: every step by hand; decode reports ok, prefill unpins."""
    with scheduler("prefill") as prefill, scheduler("decode") as decode:
        arrive(decode, prefilled(prefill))
        num_tokens = remote_tokens(decode)
        done = read(decode, Outcome.DONE)
        unpinned = taken(prefill, actions.UnpinBlocks)
    assert (NUM_TOKENS, [True], (5, 6)) == (num_tokens, reports(done), unpinned[0].block_ids)


def test_the_scheduler_thread_is_woken_by_a_message() -> None:
    """Goal: an engine that waits for KV sleeps until there is news. Method: one wait, far longer than an answer takes."""
    with scheduler("prefill") as prefill, scheduler("decode") as decode:
        arrive(decode, prefilled(prefill))
        remote_tokens(decode)
        allocated = events.BlocksAllocated(
            request_id=D1, num_local_tokens=NUM_TOKENS, num_remote_tokens=0, block_ids=((2, 3),), loaded_block_ids=()
        )
        decode.feed_consumer(allocated)  # vLLM has it all already: released
        assert prefill.wait(WAIT_S)


def test_a_failed_read_is_reported_and_released() -> None:
    """Goal: decode recomputes, prefill frees. Method: the worker's read fails."""
    with scheduler("prefill") as prefill, scheduler("decode") as decode:
        arrive(decode, prefilled(prefill))
        remote_tokens(decode)
        done = read(decode, Outcome.FAILED)
        taken(prefill, actions.UnpinBlocks)
    assert [False] == reports(done)


def test_a_prefill_engine_that_is_gone_fails_the_request_fast() -> None:
    """Goal: a dead prefill engine costs a second, not a timeout. Method: close it before decode asks."""
    with scheduler("decode") as decode:
        with scheduler("prefill") as prefill:
            body = prefilled(prefill)
        start_s = boot_s()
        arrive(decode, body)
        num_tokens = remote_tokens(decode)
    assert (0, True) == (num_tokens, boot_s() - start_s < 5.0)


def test_an_incompatible_prefill_engine_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: the operator reads what differs. Method: two models."""
    with scheduler("prefill", model="this") as prefill, scheduler("decode", model="that") as decode:
        arrive(decode, prefilled(prefill))
        num_tokens = remote_tokens(decode)
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert (0, True, True) == (num_tokens, "this" in told, "that" in told)


def test_a_lease_nobody_claims_ends_by_its_timer() -> None:
    """Goal: timers run while vLLM runs no step. Method: the shortest lease, and nobody reads."""
    with scheduler("prefill", lease_ttl_s=1, lease_max_s=1) as prefill:
        prefilled(prefill)
        assert (5, 6) == taken(prefill, actions.UnpinBlocks)[0].block_ids


def test_a_proxy_releases_a_transfer_nobody_will_read() -> None:
    """Goal: a client that left frees prefill's blocks. Method: the proxy's release, against the real machine."""
    with scheduler("prefill") as prefill:
        body = prefilled(prefill)
        answered = send_release(body, secret=None, timeout_s=WAIT_S)
        unpinned = taken(prefill, actions.UnpinBlocks)
    assert (True, (5, 6)) == (answered, unpinned[0].block_ids)


def test_an_engine_of_both_roles_plays_both() -> None:
    """Goal: kv_both works. Method: two such engines, one transfer."""
    with scheduler("both") as prefill, scheduler("both") as decode:
        arrive(decode, prefilled(prefill))
        remote_tokens(decode)
        assert [True] == reports(read(decode, Outcome.DONE))


def test_statistics_tell_both_sides() -> None:
    """Goal: what happened can be counted on either engine. Method: a whole transfer, then the figures of both."""
    with scheduler("prefill") as prefill, scheduler("decode") as decode:
        arrive(decode, prefilled(prefill))
        remote_tokens(decode)
        read(decode, Outcome.DONE)
        taken(prefill, actions.UnpinBlocks)
        of_prefill, of_decode = prefill.take_stats(), decode.take_stats()
        again = decode.take_stats()
    assert (1.0, 1.0, {"held": 1.0}, 2048.0) == (
        of_prefill["counters"]["leases_opened_total"][""],
        of_prefill["counters"]["leases_ended_total"]["released"],
        of_decode["counters"]["loads_done_total"],
        of_decode["counters"]["kv_read_bytes_total"][""],
    )
    assert ({}, {"leases_open": 0, "blocks_pinned": 0, "loads_in_flight": 0, "quarantined_blocks": 0}) == (
        again,
        decode.gauges(),
    )


def test_a_stranger_is_not_to_be_asked() -> None:
    """Goal: kv_transfer_params send us nowhere. Method: a host of another network."""
    with scheduler("decode") as decode, pytest.raises(RemoteProtocolError, match="listed in `peers`"):
        decode.check_peer_allowed(PeerAddress("192.0.2.1:4100"))


def test_only_producers_listen() -> None:
    """Goal: a decode engine opens no port. Method: its address."""
    with scheduler("decode") as decode, scheduler("prefill") as prefill:
        assert (None, True) == (decode.address, prefill.address is not None)


def test_a_failed_control_thread_ends_the_engine() -> None:
    """Goal: an engine that cannot transfer any more says so. Method: what the side channel tells when its thread died."""
    with scheduler("decode") as decode:
        decode.channel_failed(ZeroDivisionError("a bug"))
        with pytest.raises(LocalProtocolError, match="side channel of this engine has failed"):
            decode.drain()


def hostile(randomness: random.Random, expected: str) -> messages.FromReader | messages.FromProducer:
    """Any valid message, with ids and numbers from small sets, so that they often mean something."""
    tables: tuple[tuple[int, ...], ...] = randomness.choice(
        [(), ((5, 6),), ((0, 0),), ((7,),), ((1 << 30, 2),), ((1, 2), (3, 4))]
    )
    common: dict[str, Any] = {
        "incarnation": randomness.choice(["x1", "x2", expected]),
        "expected": randomness.choice([expected, expected, "other"]),
        "transfer_id": randomness.choice(["t1", "t2"]),
        "request_id": randomness.choice([D1, P1, ""]),
        "sequence": randomness.randrange(4),
        "ok": randomness.random() < 0.5,
        "held": randomness.random() < 0.5,
        "transfers": (("t1", str(D1)),) * randomness.randrange(3),
        "gone": (("t1", str(D1)),) * randomness.randrange(3),
        "reason": "hostile",
        "streams": randomness.random() < 0.5,
        "version": randomness.randrange(4),
        "fingerprint": {"model": "m"} if randomness.random() < 0.5 else {},
        "ranks": (layout(),) * randomness.randrange(3),
        "state": randomness.choice(["pending", "ready"]),
        "num_tokens": randomness.choice([0, 16, NUM_TOKENS, 1 << 30]),
        "generation": randomness.randrange(3),
        "block_ids": tables,
        "num_known_blocks": randomness.choice([(), tuple(randomness.randrange(3) for _ in tables)]),
        "prompt_digest": randomness.choice([DIGEST, b"", b"other"]),
        "lease_ttl_s": randomness.choice([1.0, 30.0, 3600.0]),
        "num_layers_ready": randomness.randrange(2),
    }
    kind = randomness.choice([*get_args(messages.FromReader), *get_args(messages.FromProducer)])
    message: messages.FromReader | messages.FromProducer = kind(**{name: common[name] for name in kind.__struct_fields__})
    return message


@pytest.mark.parametrize("seed", range(4))
def test_any_messages_of_readers_leave_a_prefill_engine_serving(seed: int) -> None:
    """Goal: a hostile reader costs nothing. Method: 2,000 random valid messages around a transfer; strict mode raises bugs."""
    randomness = random.Random(seed)
    is_streaming = bool(seed % 2)
    with (
        scheduler("prefill", streams=is_streaming) as prefill,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as reader,
    ):
        reader.linger = 0
        reader.connect(f"tcp://{prefill.address}")
        body = prefilled(prefill)
        for _ in range(2_000):
            reader.send(codec.encode(hostile(randomness, prefill.incarnation)))
        assert send_release(body, secret=None, timeout_s=WAIT_S)
        prefill.drain()


@pytest.mark.parametrize("seed", range(4))
def test_any_messages_of_a_producer_leave_a_decode_engine_serving(seed: int) -> None:
    """Goal: a hostile producer costs its own requests. Method: it answers with random valid messages; then a good one."""
    randomness = random.Random(seed)
    is_streaming = bool(seed % 2)
    with (
        scheduler("decode", streams=is_streaming) as decode,
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as producer,
    ):
        producer.linger = 0
        producer.rcvtimeo = int(WAIT_S * 1e3)
        port = producer.bind_to_random_port("tcp://127.0.0.1")
        with scheduler("prefill") as prefill:
            body = prefilled(prefill)
            transfer = {**body, "remote_port": port, "remote_incarnation": "hostile"}
            arrive(decode, transfer)
            peer, _ = producer.recv_multipart()
            is_allocated = False
            for _ in range(500):
                message = hostile(randomness, "hostile")
                if isinstance(message, get_args(messages.FromProducer)):
                    producer.send_multipart([peer, codec.encode(message)])
                if not is_allocated and (num_tokens := decode.remote_tokens(D1, 0)):
                    allocate(decode, num_tokens)
                    is_allocated = True
            decode.wait(0.2)
            decode.feed_consumer(events.RequestEnded(request_id=D1))
            if is_allocated:  # the ranks of a read that was stopped end it
                decode.feed_consumer(events.RankReadEnded(ended=read_ended(transfer["transfer_id"], Outcome.FAILED)))
            decode.drain()
            arrive(decode, body)
            assert remote_tokens(decode) == NUM_TOKENS


def test_closing_leaves_no_thread() -> None:
    """Goal: nothing of an engine survives it. Method: threads before and after, closed twice."""
    before = threading.active_count()
    with scheduler("both") as shell:
        during = threading.active_count()
        shell.close()
    assert (before, before + 1) == (threading.active_count(), during)
