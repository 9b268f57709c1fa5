"""Ways to bring bytes from the source process into this one, each as one function that returns when they are here."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence

from vllm_mooncake_ascend.cli.bench.transfer_memory import Bytes, layout_of, region_of
from vllm_mooncake_ascend.cli.bench.transfer_source import SIZE_BYTES, Serving
from vllm_mooncake_ascend.devices.cpu import CpuDevice
from vllm_mooncake_ascend.engines.transfer import MooncakeTransferEngine
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.planner.plan import PeerPlan
from vllm_mooncake_ascend.runtime.p2p_worker import P2PWorker
from vllm_mooncake_ascend.types import Incarnation, Outcome, RequestId, TransferId
from vllm_mooncake_ascend.wire.steps import PeerRanks, ReadOrder, WorkerStep

READ_S = 60.0
SOURCE = Incarnation("bench-source")


class ReadFailed(RuntimeError):
    """Bytes did not come: there is nothing to measure."""


class OurReader:
    """A worker as in a decode engine: orders go in, ends come out, its own thread plans and reads."""

    def __init__(self, memory: Bytes, serving: Serving) -> None:
        engine = MooncakeTransferEngine(host="127.0.0.1", protocol="tcp")
        engine.register([region_of(memory)])
        self._local = layout_of(region_of(memory), engine.session)
        self._remote = layout_of(Region(base_address=serving.base_address, length_bytes=serving.num_bytes), serving.session)
        self._worker = P2PWorker(engine=engine, device=CpuDevice(), layout=self._local, read_wait_s=READ_S, is_strict=True)
        self._worker.submit(WorkerStep(peers=(PeerRanks(incarnation=SOURCE, ranks=(self._remote,)),)))
        self._num_orders = 0

    def batches(self, order: ReadOrder) -> list[CopyBatch]:
        """The calls in which the worker will carry the order out."""
        plan = PeerPlan.build(self._local, [self._remote])
        calls = plan.calls(order.first_token, order.end_token, order.local_block_ids, order.remote_block_ids)
        return [batch for _, batch in calls]

    def order(self, local: tuple[int, ...], remote: tuple[int, ...]) -> ReadOrder:
        """Read whole blocks."""
        self._num_orders += 1
        return ReadOrder(
            transfer_id=TransferId(f"t{self._num_orders}"),
            request_id=RequestId(f"r{self._num_orders}"),
            incarnation=SOURCE,
            first_token=0,
            end_token=len(local) * self._local.groups[0].tokens_per_block,
            remote_block_ids=(remote,),
            local_block_ids=(local,),
        )

    def read(self, local: tuple[int, ...], remote: tuple[int, ...]) -> None:
        """Returns when the end is told.

        Raises:
            ReadFailed: it did not end well.
        """
        self._worker.submit(WorkerStep(reads=(self.order(local, remote),)))
        if not self._worker.wait(READ_S):
            raise ReadFailed(f"no answer within {READ_S:.0f} s")
        (ended,) = self._worker.take_ended()
        if ended.outcome is not Outcome.DONE:
            raise ReadFailed(f"{ended.outcome.value}: {ended.reason}")

    def close(self) -> None:
        self._worker.close()


class SocketReader:
    """One TCP connection."""

    def __init__(self, memory: Bytes, serving: Serving) -> None:
        self._memory = memory
        self._connection = socket.create_connection(("127.0.0.1", serving.socket_port))

    def read(self, num_bytes: int) -> None:
        """Into the beginning of the memory."""
        self._connection.sendall(num_bytes.to_bytes(SIZE_BYTES, "little"))
        if self._connection.recv_into(self._memory.data[:num_bytes], num_bytes, socket.MSG_WAITALL) != num_bytes:
            raise ReadFailed("the connection ended")

    def close(self) -> None:
        self._connection.close()


def copy(batches: Sequence[CopyBatch], *, shift_bytes: int) -> None:
    """The same bytes by memcpy, from `shift_bytes` behind where a remote address would be: other memory of this process."""
    for batch in batches:
        local, remote, lengths = batch.local_addresses.tolist(), batch.remote_addresses.tolist(), batch.lengths_bytes.tolist()
        for target, source, length_bytes in zip(local, remote, lengths, strict=True):
            ctypes.memmove(target, source + shift_bytes, length_bytes)
