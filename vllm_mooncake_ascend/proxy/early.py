"""Decode legs that are sent beside prefill's instead of after it, so that decode may read while prefill computes.

What decode is told then is foretold: the producer of the prefill instance's last answer, under the transfer id prefill is
given. When prefill answers with just that, the leg under way is decode's leg; if not (the engine was restarted, or gave the
transfer another id) the leg is dropped and sent anew with what prefill said. So nothing but time depends on the foretelling.
An instance whose last two answers named different producers foretells nothing: several engines may stand behind its URL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from vllm_mooncake_ascend.proxy.exchange import Event
from vllm_mooncake_ascend.proxy.rewrite import JsonObject
from vllm_mooncake_ascend.proxy.upstream import Answer
from vllm_mooncake_ascend.types import TransferId
from vllm_mooncake_ascend.wire import params as wire_params

Asked = tuple[Event, Answer | None]
"""What became of a leg, and the answer if there is one."""

_TRANSFER = ("transfer_id", "remote_incarnation", "remote_host", "remote_port")
_PRODUCER = _TRANSFER[1:]


class Producers:
    """By prefill instance the kv_transfer_params of its latest answer: they say where its producer is reached."""

    def __init__(self, *, foretells: bool, secret: bytes | None) -> None:
        self._foretells = foretells
        self._secret = secret
        self._last: dict[str, JsonObject] = {}
        self._unsteady: set[str] = set()

    def learn(self, instance: str, params: JsonObject) -> None:
        """An instance has answered with these."""
        before = self._last.get(instance)
        if before is None or _names(before, _PRODUCER) == _names(params, _PRODUCER):
            self._unsteady.discard(instance)
        else:
            self._unsteady.add(instance)
        self._last[instance] = params

    def last(self, instance: str) -> JsonObject | None:
        """Of its latest answer; None: it has not given one."""
        return self._last.get(instance)

    def foretell(self, instance: str, transfer_id: TransferId, now_s: float) -> JsonObject | None:
        """What the instance will very likely answer; None: who knows."""
        params = self._last.get(instance)
        if not self._foretells or params is None or instance in self._unsteady:
            return None
        return wire_params.foretell(params, transfer_id, secret=self._secret, now_s=now_s)


class EarlyLeg:
    """A decode leg under way while prefill computes. Either `take` it or `drop` it."""

    def __init__(
        self, params: JsonObject, instance: str, ask: Coroutine[None, None, Asked], on_drop: Callable[[], None]
    ) -> None:
        self.instance = instance
        self._params = params
        self._on_drop = on_drop
        self._task = asyncio.create_task(ask)

    def serves(self, params: JsonObject) -> bool:
        """Whether it reads the transfer that these name."""
        return _names(params, _TRANSFER) == _names(self._params, _TRANSFER)

    async def take(self) -> Asked:
        """Wait for its answer. Who is cancelled meanwhile has dropped it."""
        return await self._task

    def drop(self) -> None:
        """Nobody wants its answer: close the connection, so that decode aborts the request. Twice is as good as once."""
        self._on_drop()
        self._task.cancel()
        self._task.add_done_callback(_close_answer)


def _close_answer(task: asyncio.Task[Asked]) -> None:
    if task.cancelled() or task.exception() is not None:
        return
    answer = task.result()[1]
    if answer is not None:
        answer.close()


def _names(params: JsonObject, names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(params.get(name) for name in names)
