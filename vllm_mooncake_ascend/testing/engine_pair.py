"""EnginePair: one prefill engine, one decode engine and the plain engine whose answers theirs must equal.

Does by hand what a proxy or router does: the prefill leg (one token, `do_remote_decode`), then the decode leg with the
`kv_transfer_params` of prefill's response unchanged. And it knows how both engines must look when nothing is going on,
so that a test can end by showing that nothing was left behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from vllm_mooncake_ascend.runtime.clock import wall_s
from vllm_mooncake_ascend.runtime.release import send_release
from vllm_mooncake_ascend.testing import engine_messages as messages
from vllm_mooncake_ascend.testing.engine_answer import Answer, Text
from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_process import POLL_S, REQUEST_TIMEOUT_S, EngineProcess, Running
from vllm_mooncake_ascend.testing.engine_prompts import (
    GOLDEN_LENGTHS,
    SHORT_GOLDEN_LENGTHS,
    Prompt,
    Reference,
    golden_prompts,
    random_prompt,
)
from vllm_mooncake_ascend.testing.engine_rest import NUM_LANES, AtRest
from vllm_mooncake_ascend.types import TransferId
from vllm_mooncake_ascend.wire.params import foretell

__all__ = ["GOLDEN_LENGTHS", "PREFILL_SAMPLING", "SHORT_GOLDEN_LENGTHS", "EnginePair", "Prompt", "Reference", "random_prompt"]

PREFILL_SAMPLING = Sampling(max_tokens=1)
RELEASE_TIMEOUT_S = 10.0


class EnginePair:
    """Two engines and their reference; used by one thread."""

    def __init__(
        self,
        prefill: EngineProcess,
        decode: EngineProcess,
        reference: Reference,
        *,
        golden_lengths: tuple[int, ...] = GOLDEN_LENGTHS,
        num_spare_sockets: int = NUM_LANES,
    ) -> None:
        """`num_spare_sockets`: connections to peers that each engine may open later, and keeps."""
        self.prefill = prefill
        self.decode = decode
        self.reference = reference
        self._golden_lengths = golden_lengths
        self._num_checks = 0
        self._rest = AtRest(num_spare_sockets=num_spare_sockets)

    # --- what a proxy does ----------------------------------------------------------------------------------------

    def start_prefill(
        self, prompt: Prompt, *, transfer_id: str | None = None, sampling: Sampling = PREFILL_SAMPLING
    ) -> Running:
        """Give prefill its leg of a request."""
        params = {"do_remote_decode": True}
        wanted = {"transfer_id": transfer_id} if transfer_id is not None else {}
        return self.prefill.submit(prompt, sampling, params={**params, **wanted})

    def prefill_leg(self, prompt: Prompt, *, transfer_id: str | None = None) -> Any:
        """Run prefill's leg; returns the kv_transfer_params that decode must be given."""
        params = self.start_prefill(prompt, transfer_id=transfer_id).result().kv_transfer_params
        assert params is not None, "prefill offered no KV"
        return params

    def decode_leg(self, prompt: Prompt, params: object, sampling: Sampling | None = None) -> Answer:
        """Run decode's leg."""
        return self.decode.submit(prompt, sampling, params=params).result()

    def answer(self, prompt: Prompt, sampling: Sampling | None = None) -> Answer:
        """Both legs of one request."""
        return self.decode_leg(prompt, self.prefill_leg(prompt), sampling)

    def expected(self, prompt: Prompt, sampling: Sampling | None = None) -> Text:
        """What a plain engine answers."""
        return self.reference.text(prompt, sampling or Sampling())

    def early_params(self, transfer_id: str) -> dict[str, Any]:
        """What a proxy that sends both legs at once gives decode, knowing prefill from an earlier response."""
        known = self.prefill_leg(random_prompt("early", 8))
        self.release(known)
        told = foretell(known, TransferId(transfer_id), secret=None, now_s=wall_s())
        assert told is not None, "an engine of one rank without a secret can be foretold"
        return told

    def start_at_once(self, prompt: Prompt, transfer_id: str, sampling: Sampling | None = None) -> tuple[Running, Running]:
        """Give both engines their legs; prefill's and decode's request."""
        params = self.early_params(transfer_id)
        return self.start_prefill(prompt, transfer_id=transfer_id), self.decode.submit(prompt, sampling, params=params)

    def release(self, params: Any) -> None:
        """What a proxy does when decode will not come for a transfer: tell prefill over its side channel."""
        answered = send_release(params, secret=None, timeout_s=RELEASE_TIMEOUT_S)
        assert answered, "prefill did not answer the release"

    def wrong_answers(self, prompts: Iterable[Prompt], sampling: Sampling | None = None) -> dict[int, Text]:
        """Run prompts one after the other; by length the answers that the plain engine does not give."""
        wrong = {}
        for prompt in prompts:
            text = self.answer(prompt, sampling).text
            if text != self.expected(prompt, sampling):
                wrong[len(prompt)] = text
        return wrong

    def wrong_concurrent_answers(
        self, prompts: Sequence[Prompt], sampling: Sampling | None = None, *, concurrency: int
    ) -> dict[int, Text]:
        """As `wrong_answers`, with so many requests under way at once, each in one of its two legs."""
        waiting = list(reversed(prompts))
        prefilling: dict[Prompt, Running] = {}
        decoding: dict[Prompt, Running] = {}
        answers: dict[Prompt, Text] = {}
        deadline_s = time.monotonic() + REQUEST_TIMEOUT_S
        while len(answers) < len(prompts):
            assert time.monotonic() < deadline_s, f"{len(answers)} of {len(prompts)} requests ended in time"
            while waiting and len(prefilling) + len(decoding) < concurrency:
                prompt = waiting.pop()
                prefilling[prompt] = self.start_prefill(prompt)
            for prompt, running in _take_finished(self.prefill, prefilling):
                decoding[prompt] = self.decode.submit(prompt, sampling, params=running.answer.kv_transfer_params)
            for prompt, running in _take_finished(self.decode, decoding):
                answers[prompt] = running.answer.text
        return {len(prompt): text for prompt, text in answers.items() if text != self.expected(prompt, sampling)}

    # --- nothing left behind --------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """First transfers, connections and threads; remembers what the engines hold when idle."""
        self._wrong_golden_answers()
        for engine in (self.prefill, self.decode):
            self.remember(engine)

    def remember(self, engine: EngineProcess) -> None:
        """Take what an engine holds now for its start: the first time, and after a restart."""
        self._rest.remember(engine)

    def remains(self) -> dict[str, Any]:
        """What is not as it was at the start, golden answers included; {} when all is well.

        The answers come first: an idle engine carries out releases at its next request only.
        """
        engines = [engine for engine in (self.prefill, self.decode) if engine.is_alive]
        for engine in engines:
            engine.call(messages.Unpause())
            engine.release()
        found: dict[str, Any] = {}
        if len(engines) == 2 and (wrong := self._wrong_golden_answers()):
            found["wrong golden answers"] = wrong
        for engine in engines:
            if different := self._rest.changes(engine):
                found[engine.spec.name] = different
        return found

    def revive(self) -> None:
        """Start engines that an earlier test left dead."""
        dead = [engine for engine in (self.prefill, self.decode) if not engine.is_alive]
        for engine in dead:
            engine.restart()
            engine.wait_ready()
        if dead:
            self.warm_up()

    def flush(self, engine: EngineProcess) -> None:
        """One small request: an idle engine runs no hook, so releases that came in wait for the next request."""
        self._rest.flush(engine)

    def _wrong_golden_answers(self) -> dict[int, Text]:
        """Ten prompts, half of them seen before (local hits on both sides), half new."""
        self._num_checks += 1
        return self.wrong_answers(golden_prompts(self._golden_lengths, self._num_checks))


def _take_finished(engine: EngineProcess, requests: dict[Prompt, Running]) -> list[tuple[Prompt, Running]]:
    """Those of `requests` that have ended, taken out of it; waits a moment for news of the engine."""
    engine.take_arrived()
    finished = [(prompt, running) for prompt, running in requests.items() if running.is_finished]
    for prompt, _ in finished:
        del requests[prompt]
    if not finished:
        time.sleep(POLL_S)
    return finished
