"""The process of a test's engine: a real vLLM engine in one process, driven by commands that come over a socket.

Run as `python -m vllm_mooncake_ascend.testing.engine_child FD` by `engine_process`. The loop is the one of vLLM's own
engine core: take what has come, step while there are requests, otherwise wait and run no hook at all. What a real engine
lacks is `Allow`: a test may hold the engine between two steps, which makes every moment of a request reachable without
sleeping. The process dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from vllm_mooncake_ascend.testing import engine_inside as inside
from vllm_mooncake_ascend.testing import engine_messages as messages
from vllm_mooncake_ascend.testing.engine_messages import EngineSpec, FrameSocket, Sampling

CONNECTOR_PACKAGE = "vllm_mooncake_ascend"
VLLMS_OWN = ("MultiConnector",)
"""Connectors that vLLM has itself."""
EMPTY_STEP_PAUSE_S = 0.001
"""vLLM's engine core sleeps this long after a step that ran nothing."""
PR_SET_PDEATHSIG = 1


class EngineChild:
    """One vLLM engine and the loop that drives it."""

    def __init__(self, spec: EngineSpec, frames: FrameSocket) -> None:
        self._frames = frames
        self._engine = build_engine(spec)
        self._core = self._engine.engine_core.engine_core
        self._steps_allowed: int | None = None
        self._num_steps = 0
        self._quits = False
        self._actions: dict[type, Callable[[Any], object]] = {
            messages.Submit: self._submit,
            messages.Abort: lambda command: self._engine.abort_request([command.request_id]),
            messages.Reject: self._reject,
            messages.Allow: self._allow,
            messages.Inspect: lambda _: inside.state(self._core, num_steps=self._num_steps),
            messages.ReadMetrics: lambda _: inside.metric_samples(),
            messages.Poison: lambda command: inside.poison(self._core, command.block_ids),
            messages.Digest: lambda command: inside.digests(self._core, command.block_ids),
            messages.ResetCache: lambda command: self._engine.reset_prefix_cache(
                command.reset_running_requests, command.reset_connector
            ),
            messages.Pause: lambda command: self._core.pause_scheduler(command.mode, command.clear_cache),
            messages.Unpause: lambda _: self._core.resume_scheduler(),
            messages.Quit: self._quit,
        }

    def run(self) -> None:
        """Until told to quit; leaves by EOFError when the test's end of the socket closes."""
        while not self._quits:
            while self._has_command(wait=not self._may_step()):
                self._obey(msgspec.msgpack.decode(self._frames.receive(), type=messages.Command))
            if self._may_step():
                self._step()
        self._engine.engine_core.shutdown()

    def _may_step(self) -> bool:
        return not self._quits and self._steps_allowed != 0 and self._core.scheduler.has_requests()

    def _has_command(self, *, wait: bool) -> bool:
        if self._quits:
            return False
        if self._frames.has_frame():
            return True
        readable, _, _ = select.select([self._frames], [], [], None if wait else 0)
        return bool(readable)

    def _obey(self, command: messages.Command) -> None:
        """Carry out one command. What vLLM only refuses is told; what would kill its engine core kills this process."""
        try:
            value = self._actions[type(command)](command)
        except _survivable(command) as error:
            self._frames.send(messages.Refused(reason=f"{type(error).__name__}: {error}"))
        else:
            self._frames.send(messages.Answered(value=value))

    def _step(self) -> None:
        self._num_steps += 1
        if self._steps_allowed is not None:
            self._steps_allowed -= 1
        outputs = self._engine.step()
        for output in outputs:
            for answer in output.outputs:
                self._frames.send(_output(output, answer))
        if not outputs and self._core.scheduler.has_requests():
            time.sleep(EMPTY_STEP_PAUSE_S)

    def _submit(self, command: messages.Submit) -> None:
        prompt: dict[str, Any] = {"prompt_token_ids": list(command.prompt_token_ids)}
        if command.cache_salt:
            prompt["cache_salt"] = command.cache_salt
        params = sampling_params(command.sampling, json.loads(command.params_json))
        self._engine.add_request(command.request_id, prompt, params, lora_request=_lora_request(command.adapter))

    def _reject(self, command: messages.Reject) -> None:
        """The request vLLM's `AsyncLLM.notify_kv_transfer_request_rejected` makes (0.30+)."""
        from vllm.v1.engine import EngineCoreRequest

        request = EngineCoreRequest(
            request_id=command.request_id,
            prompt_token_ids=[0],
            mm_features=None,
            sampling_params=sampling_params(Sampling(max_tokens=1), json.loads(command.params_json)),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            abort_immediately=True,
        )
        self._engine.engine_core.add_request(request)

    def _allow(self, command: messages.Allow) -> None:
        self._steps_allowed = command.num_steps

    def _quit(self, _command: messages.Quit) -> None:
        self._quits = True


def build_engine(spec: EngineSpec) -> Any:
    """The engine of `spec`, scheduler and worker in this process; without tokenizer, as tests speak in tokens."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = dict(spec.engine_args)
    if spec.kv_role:
        arguments["kv_transfer_config"] = KVTransferConfig(
            kv_connector=spec.connector,
            kv_connector_module_path=None if spec.connector in VLLMS_OWN else CONNECTOR_PACKAGE,
            kv_role=spec.kv_role,
            kv_connector_extra_config=dict(spec.extra_config),
        )
    return LLMEngine.from_engine_args(EngineArgs(model=spec.model, skip_tokenizer_init=True, **arguments))


def sampling_params(sampling: Sampling, kv_transfer_params: object) -> Any:
    """vLLM's own, as its API server builds them; top_k 1 is greedy too where vLLM allows no temperature of 0 (n > 1)."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0 if sampling.n == 1 else 1.0,
        top_k=1,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        n=sampling.n,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=None if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params},
    )


def _lora_request(folder: str) -> Any:
    if not folder:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=Path(folder).name, lora_int_id=1 + zlib.crc32(folder.encode()), lora_path=folder)


def _survivable(command: messages.Command) -> tuple[type[Exception], ...]:
    """Errors of a command that leave a served engine alive: a request refused by the API server, a utility call failed."""
    from vllm.exceptions import VLLMError

    match command:
        case messages.Submit():
            return (VLLMError,)
        case messages.ResetCache() | messages.Pause():
            return (RuntimeError,)
        case _:
            return ()


def _output(output: Any, answer: Any) -> messages.Output:
    logprobs = answer.logprobs or ()
    return messages.Output(
        request_id=output.request_id,
        index=answer.index,
        token_ids=tuple(answer.token_ids),
        logprobs=tuple(found[token_id].logprob for found, token_id in zip(logprobs, answer.token_ids, strict=False)),
        num_prompt_logprobs=len(output.prompt_logprobs or ()),
        finish_reason=answer.finish_reason or "",
        num_cached_tokens=output.num_cached_tokens or 0,
        params_json=json.dumps(output.kv_transfer_params),
    )


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends, and end now if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the test that started this engine has gone")


def main() -> None:
    """Arguments: file descriptor of the socket, process id of the parent."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    _die_with_parent(parent_pid)
    started_s = time.monotonic()
    frames = FrameSocket(socket.socket(fileno=descriptor))
    spec = msgspec.msgpack.decode(frames.receive(), type=EngineSpec)
    child = EngineChild(spec, frames)
    frames.send(messages.Ready(seconds=time.monotonic() - started_s))
    with contextlib.suppress(EOFError):
        child.run()


if __name__ == "__main__":
    main()
