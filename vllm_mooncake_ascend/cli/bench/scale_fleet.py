"""Prefill and decode engines without vLLM, network or faults: the product's own machines of a transfer, and its codec.

    Prefill  Producer machine
    Decode   Consumer machine, and the Reader machine of its one worker

A message travels as the bytes it has on the side channel; one that was sent arrives after all that was sent before. Time is
handed in. No byte of KV is moved: every engine call ends well at once. What runs between two events here is what `bench scale`
measures, and its own share, a queue and a look at each action, is small and grows with nothing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import MooncakeAscendError
from vllm_mooncake_ascend.layout import compatibility
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.consumer import Consumer
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.reader import Reader
from vllm_mooncake_ascend.p2p.settings import ConsumerSettings, ProducerSettings, ReaderSettings
from vllm_mooncake_ascend.types import Incarnation, Outcome, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire import codec
from vllm_mooncake_ascend.wire.messages import PROTOCOL_VERSION, FromProducer, FromReader
from vllm_mooncake_ascend.wire.params import RemotePrefill
from vllm_mooncake_ascend.wire.steps import ReadOrder

NUM_HEADS, HEAD_BYTES = 8, 256
TOKEN_BYTES = 2 * NUM_HEADS * HEAD_BYTES
"""Of one layer: a key and a value of 128 numbers of two bytes in each head."""
DIGEST = bytes(32)


class ScaleFailed(MooncakeAscendError):
    """A request was not served, so there is nothing to measure."""


@dataclasses.dataclass(slots=True)
class Counts:
    """What went over the driver since it was made."""

    messages: int = 0
    message_bytes: int = 0
    actions: int = 0
    """Of all machines, their own counting left out."""
    orders: int = 0
    order_blocks: int = 0
    """Block ids in the orders that a scheduler sends to its worker."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in the blocks of both engines, whose numbers are the same here."""

    num_tokens: int
    written: tuple[events.BlockTable, ...]
    """What is written after each step of the prefill but the last, whole blocks."""
    block_ids: events.BlockTable
    block_tokens: int

    @staticmethod
    def made(num_tokens: int, *, block_tokens: int, chunk_tokens: int, first_block: int = 1) -> Prompt:
        """With blocks of its own from `first_block` on."""
        table = tuple(range(first_block, first_block - (-num_tokens // block_tokens)))
        ends = (end // block_tokens for end in range(chunk_tokens, num_tokens, chunk_tokens))
        written = tuple((table[:end],) for end in ends)
        return Prompt(num_tokens=num_tokens, written=written, block_ids=(table,), block_tokens=block_tokens)


@dataclasses.dataclass(slots=True)
class Prefill:
    incarnation: Incarnation
    address: PeerAddress
    machine: Producer


@dataclasses.dataclass(slots=True)
class Decode:
    incarnation: Incarnation
    consumer: Consumer
    reader: Reader


@dataclasses.dataclass(slots=True)
class Job:
    """One request of a client."""

    prefill: Prefill
    decode: Decode
    prompt: Prompt
    request_id: RequestId
    is_allocated: bool = False

    @property
    def transfer_id(self) -> TransferId:
        return TransferId(self.request_id)


class Fleet:
    """Engines of one mode, and the road between them.

    Args:
        streams: decode reads while prefill computes; else when it has ended.
        num_layers: of every engine, for the handshake.
    """

    def __init__(self, *, num_prefills: int, num_decodes: int, streams: bool, block_tokens: int, num_layers: int) -> None:
        self.now = 0.0
        self.counts = Counts()
        self.on_order: Callable[[ReadOrder], None] = lambda _: None
        self._streams = streams
        self._token_bytes = TOKEN_BYTES * num_layers
        self._queue: deque[Callable[[], None]] = deque()
        self._reported: dict[RequestId, bool] = {}
        self._num_requests = 0
        rank = layout(block_tokens=block_tokens, num_layers=num_layers)
        fingerprint = compatibility.fingerprint({"model": "one"}, [rank], protocol_version=PROTOCOL_VERSION)
        self.prefills = [self._prefill(number, rank, fingerprint) for number in range(num_prefills)]
        self.decodes = [self._decode(number, rank, fingerprint) for number in range(num_decodes)]
        self._at = {prefill.address: prefill for prefill in self.prefills}
        self._named = {decode.incarnation.encode(): decode for decode in self.decodes}

    def _prefill(self, number: int, rank: RankLayout, fingerprint: dict[str, str]) -> Prefill:
        incarnation = Incarnation(f"{number:032x}")
        settings = ProducerSettings(
            lease_ttl_s=limits.LEASE_TTL_S,
            lease_max_s=limits.LEASE_MAX_S,
            max_pinned_blocks=limits.MAX_BLOCKS_PER_TRANSFER,
            streams=self._streams,
        )
        machine = Producer(incarnation, fingerprint, (rank,), settings)
        return Prefill(incarnation, PeerAddress(f"198.51.{number // 256}.{number % 256}:5555"), machine)

    def _decode(self, number: int, rank: RankLayout, fingerprint: dict[str, str]) -> Decode:
        incarnation = Incarnation(f"d{number:031x}")
        settings = ConsumerSettings(
            num_ranks=1, fail_on_load_error=False, can_report_unknown_at_once=True, streams=self._streams
        )
        return Decode(incarnation, Consumer(incarnation, fingerprint, (rank,), settings), Reader(0, ReaderSettings()))

    # --- requests -----------------------------------------------------------------------------------------------------

    def serve(self, pairs: Sequence[tuple[Prefill, Decode, Prompt]]) -> None:
        """Serve one request for each, all at once: each stage of all of them before the next. Chunks of prefills come in turns,
        each when all that the last one led to is done.

        Raises:
            ScaleFailed: KV of one of them did not come, or something of it is left.
        """
        jobs = self.begin(pairs)
        if self._streams:
            for step in range(max(len(job.prompt.written) for job in jobs)):
                for job in jobs:
                    self._progress(job, step)
        self._stage(jobs, self._end_prefill)
        if not self._streams:
            self._stage(jobs, self._arrive)
        self._allocate(jobs)
        self._stage(jobs, self._end_request)
        for job in jobs:
            if not self._reported.pop(job.request_id, False) or job.prefill.machine.num_leases or job.decode.consumer.num_loads:
                raise ScaleFailed(f"request {job.request_id} was not served as it is in production")

    def begin(self, pairs: Sequence[tuple[Prefill, Decode, Prompt]]) -> list[Job]:
        """Prefill has them; where decode streams, it too."""
        jobs = [Job(*pair, self._request_id()) for pair in pairs]
        self._stage(jobs, self._announce)
        if self._streams:
            self._stage(jobs, self._arrive)
        return jobs

    def finish_prefills(self, jobs: Sequence[Job]) -> None:
        """They end with KV, and decode hears of it: all are ready, and wait for blocks."""
        self._stage(jobs, self._end_prefill)
        if not self._streams:
            self._stage(jobs, self._arrive)

    def wait(self, seconds: float, decodes: Sequence[Decode]) -> None:
        """Let time pass, for these engines."""
        self.now += seconds
        for decode in decodes:
            self._at_consumer(decode, events.TimerFired())
        self._run()

    def _request_id(self) -> RequestId:
        self._num_requests += 1
        return RequestId(f"cmpl-{self._num_requests:032x}")

    def _stage(self, jobs: Sequence[Job], do: Callable[[Job], None]) -> None:
        for job in jobs:
            do(job)
        self._run()

    def _announce(self, job: Job) -> None:
        arrived = events.PrefillArrived(
            request_id=job.request_id,
            wanted_id=job.transfer_id,
            fresh_id=TransferId("not needed"),
            prompt_digest=DIGEST,
            num_prompt_tokens=job.prompt.num_tokens,
        )
        self._at_producer(job.prefill, arrived)

    def _progress(self, job: Job, step: int) -> None:
        if step >= len(job.prompt.written):
            return
        table = job.prompt.written[step]
        num_tokens = len(table[0]) * job.prompt.block_tokens
        self._at_producer(
            job.prefill, events.PrefillProgressed(request_id=job.request_id, num_tokens=num_tokens, block_ids=table)
        )
        self._run()
        self._allocate((job,))

    def _end_prefill(self, job: Job) -> None:
        ended = events.PrefillEnded(
            request_id=job.request_id,
            has_kv=True,
            num_tokens=job.prompt.num_tokens,
            block_ids=job.prompt.block_ids,
            reason="",
        )
        self._at_producer(job.prefill, ended)

    def _arrive(self, job: Job) -> None:
        transfer = RemotePrefill(
            transfer_id=job.transfer_id,
            incarnation=job.prefill.incarnation,
            address=job.prefill.address,
            num_tokens=0,
            prompt_digest=b"",
        )
        arrived = events.RequestArrived(
            request_id=job.request_id, transfer=transfer, prompt_digest=DIGEST, num_prompt_tokens=job.prompt.num_tokens
        )
        self._at_consumer(job.decode, arrived)

    def _allocate(self, jobs: Sequence[Job]) -> None:
        """As vLLM does in each step for requests that wait."""
        for job in jobs:
            num_tokens = None if job.is_allocated else job.decode.consumer.remote_tokens(job.request_id, 0)
            if num_tokens is None:
                continue
            job.is_allocated = True
            allocated = events.BlocksAllocated(
                request_id=job.request_id,
                num_local_tokens=0,
                num_remote_tokens=num_tokens,
                block_ids=job.prompt.block_ids,
                loaded_block_ids=job.prompt.block_ids[0],
            )
            self._at_consumer(job.decode, allocated)
        self._run()

    def _end_request(self, job: Job) -> None:
        self._at_consumer(job.decode, events.RequestEnded(request_id=job.request_id))

    # --- the road -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _at_producer(self, prefill: Prefill, event: events.ProducerEvent) -> None:
        for action in prefill.machine.handle(event, self.now):
            if isinstance(action, actions.Count):
                continue
            self.counts.actions += 1
            if isinstance(action, actions.SendToReader):
                self._send_to_reader(prefill, self._named[action.peer], action.message)

    def _at_consumer(self, decode: Decode, event: events.ConsumerEvent) -> None:
        for action in decode.consumer.handle(event, self.now):
            match action:
                case actions.Count():
                    continue
                case actions.SendToProducer():
                    self._send_to_producer(decode, self._at[action.peer], action.message)
                case actions.OrderRead():
                    self._order(decode, action.order)
                case actions.ReportReceive():
                    self._reported[action.report.request_id] = action.report.ok
            self.counts.actions += 1

    def _at_reader(self, decode: Decode, event: events.ReaderEvent) -> None:
        for action in decode.reader.handle(event, self.now):
            if isinstance(action, actions.Count):
                continue
            self.counts.actions += 1
            if isinstance(action, actions.StartCall):
                ended = _call_ended(action)
                self._queue.append(lambda ended=ended: self._at_reader(decode, ended))  # type: ignore[misc]
            elif isinstance(action, actions.EndRead):
                read_ended = events.RankReadEnded(ended=action.ended)
                self._queue.append(lambda read_ended=read_ended: self._at_consumer(decode, read_ended))  # type: ignore[misc]

    def _send_to_producer(self, decode: Decode, prefill: Prefill, message: FromReader) -> None:
        frame = self._framed(message)
        peer = decode.incarnation.encode()
        self._queue.append(
            lambda: self._at_producer(prefill, events.ReaderSpoke(peer=peer, message=codec.decode_from_reader(frame)))
        )

    def _send_to_reader(self, prefill: Prefill, decode: Decode, message: FromProducer) -> None:
        frame = self._framed(message)
        self._queue.append(
            lambda: self._at_consumer(
                decode, events.ProducerSpoke(peer=prefill.address, message=codec.decode_from_producer(frame))
            )
        )

    def _framed(self, message: FromReader | FromProducer) -> bytes:
        frame = codec.encode(message)
        self.counts.messages += 1
        self.counts.message_bytes += len(frame)
        return frame

    def _order(self, decode: Decode, order: ReadOrder) -> None:
        self.counts.orders += 1
        self.counts.order_blocks += sum(map(len, (*order.remote_block_ids, *order.local_block_ids)))
        self.on_order(order)
        num_bytes = (order.end_token - order.first_token) * self._token_bytes
        planned = events.ReadPlanned(
            transfer_id=order.transfer_id,
            request_id=order.request_id,
            session="",
            num_calls=-(-num_bytes // limits.MAX_CALL_BYTES),
            part=order.part,
            generation=order.generation,
            is_last=order.is_last,
        )
        self._queue.append(lambda: self._at_reader(decode, planned))


def _call_ended(call: actions.StartCall) -> events.CallEnded:
    return events.CallEnded(
        request_id=call.request_id,
        call_index=call.call_index,
        outcome=Outcome.DONE,
        reason="",
        num_bytes=0,
        num_descriptors=0,
    )


def layout(*, block_tokens: int, num_layers: int, num_blocks: int = 1 << 14) -> RankLayout:
    """One rank: in each layer keys in one tensor, values in another, both in one region. Memory is imagined."""
    plane_bytes = TOKEN_BYTES // 2 * block_tokens * num_blocks
    base_address = 1 << 44
    planes = tuple(
        Plane(
            name=f"layers.{layer}/{part}",
            group_index=0,
            base_address=base_address + (2 * layer + index) * plane_bytes,
            num_blocks=num_blocks,
            tokens_per_block=block_tokens,
            first_head=0,
            num_heads=NUM_HEADS,
            total_heads=NUM_HEADS,
            bytes_per_token_head=HEAD_BYTES,
            block_stride_bytes=TOKEN_BYTES // 2 * block_tokens,
            token_stride_bytes=TOKEN_BYTES // 2,
            head_stride_bytes=HEAD_BYTES,
        )
        for layer in range(num_layers)
        for index, part in enumerate("kv")
    )
    group = GroupLayout(tokens_per_block=block_tokens, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
    return RankLayout(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        session="192.0.2.1:12345",
        groups=(group,),
        planes=planes,
        regions=(Region(base_address=base_address, length_bytes=2 * num_layers * plane_bytes),),
    )
