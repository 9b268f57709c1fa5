"""Client and proxy of one job: starts its legs, hands kv_transfer_params on, leaves when the plan says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_mooncake_ascend.testing.simulator.engine import address_of
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages
from vllm_mooncake_ascend.wire.params import RemotePrefill

if TYPE_CHECKING:
    from vllm_mooncake_ascend.testing.simulator.plan import Child, Job
    from vllm_mooncake_ascend.testing.simulator.world import World


class Client:
    """One job under way."""

    def __init__(self, world: World, job: Job, prompt: int) -> None:
        self.job = job
        self.prompt = prompt
        self._world = world
        self._prefill_id: RequestId | None = None
        self._transfer: RemotePrefill | None = None

    def start(self) -> None:
        """Send the prefill leg, and with the concurrent flow the decode legs beside it."""
        world, job = self._world, self.job
        if job.end != "never":
            world.at(world.now + job.admitted_after_s, None, self._send_prefill)
        engine = world.engines[job.prefill]
        if job.mode == "concurrent" and job.transfer_id is not None and engine is not None:
            self._transfer = RemotePrefill(
                transfer_id=TransferId(job.transfer_id),
                incarnation=engine.incarnation,
                address=address_of(job.prefill),
                num_tokens=0,
                prompt_digest=b"",
            )
            self._send_children()
        if job.proxy_leaves_at_s is not None:
            world.at(world.now + job.proxy_leaves_at_s, None, self._leave)

    def on_admitted(self, request_id: RequestId) -> None:
        self._prefill_id = request_id

    def on_finished(self, transfer_id: TransferId | None, *, has_kv: bool) -> None:
        """The prefill leg's response: with the sequential flow its params start the decode legs."""
        engine = self._world.engines[self.job.prefill]
        self._prefill_id = None
        if self._transfer is not None or transfer_id is None or not has_kv or engine is None:
            return
        self._transfer = RemotePrefill(
            transfer_id=transfer_id,
            incarnation=engine.incarnation,
            address=address_of(self.job.prefill),
            num_tokens=self.job.num_tokens,
            prompt_digest=self._world.digest(self.prompt, self.job.num_tokens),
        )
        self._send_children()

    def _send_prefill(self) -> None:
        engine = self._world.engines[self.job.prefill]
        if engine is not None and engine.alive:
            self._world.at(self._world.now, engine, engine.prefill.admit, self)

    def _send_children(self) -> None:
        for child in self.job.children:
            self._world.at(self._world.now + child.delay_s, None, self._send_child, child)

    def _send_child(self, child: Child) -> None:
        engine = self._world.engines[child.decode]
        assert self._transfer is not None
        if engine is not None and engine.alive:
            prompt = self._world.other_prompt(self.prompt) if child.is_other_prompt else self.prompt
            self._world.at(self._world.now, engine, engine.decode.admit, child, self._transfer, prompt, self.job.num_tokens)

    def _leave(self) -> None:
        """The proxy gives up: it aborts the prefill leg, and releases the transfer in its own name."""
        world = self._world
        engine = world.engines[self.job.prefill]
        if engine is None or not engine.alive:
            return
        if self._prefill_id is not None:
            world.at(world.now, engine, engine.prefill.abort, self._prefill_id)
        if self._transfer is not None:
            release = messages.Release(
                incarnation=Incarnation(f"proxy{world.number()}"),
                expected=self._transfer.incarnation,
                transfer_id=self._transfer.transfer_id,
                request_id=RequestId(""),
            )
            world.at(world.now + 0.002, engine, engine.prefill.hear_from, release.incarnation.encode(), release)
