"""EngineProcess: a real vLLM engine in a child process of a test, held by a handle that the test drives.

Prefill and decode need a process each, because the worker-role connector is a global of its process. The handle starts,
kills, stops, continues and restarts the process, gives it requests and lets it take any number of steps. Rules: every
wait has a bound and names what it waited for; an engine that dies is told at once, with the end of its log; a process is
ended by the handle that started it, and by the kernel when the test process itself dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_mooncake_ascend.errors import MooncakeAscendError
from vllm_mooncake_ascend.testing import engine_messages as messages
from vllm_mooncake_ascend.testing.engine_answer import Answer
from vllm_mooncake_ascend.testing.engine_messages import EngineSpec, EngineState, FrameSocket, Sampling

START_TIMEOUT_S = 240.0
"""An engine with a tiny model is ready after 15 s on two quiet cores; several at once on a busy host take minutes."""
ANSWER_TIMEOUT_S = 60.0
"""Commands are taken between two steps, and a step of a fat prefill on a busy host lasts seconds."""
REQUEST_TIMEOUT_S = 120.0
QUIT_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 6_000
POLL_S = 0.01

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""One process, one compute thread, no core of its own, no network."""

NOT_INHERITED = ("PYTHONHASHSEED",)
"""What decides whether engines share, and so is as in a user's shell, whatever this process set for itself."""


class EngineFailed(MooncakeAscendError):
    """The engine's process ended or did not answer in time; the message has the end of its log."""


class RequestRefused(MooncakeAscendError):
    """The engine refused a command in vLLM's own words, and lives on."""


class Running:
    """A request that was given to an engine."""

    def __init__(self, engine: EngineProcess, request_id: str, num_answers: int) -> None:
        self._engine = engine
        self._num_answers = num_answers
        self.answer = Answer(request_id)

    @property
    def request_id(self) -> str:
        return self.answer.request_id

    @property
    def is_finished(self) -> bool:
        return len(self.answer.finish_reasons) == self._num_answers

    def result(self, timeout_s: float = REQUEST_TIMEOUT_S) -> Answer:
        """Wait for the end of the request."""
        self._engine.wait_until(lambda: self.is_finished, f"the end of request {self.request_id}", timeout_s=timeout_s)
        return self.answer

    def wait_tokens(self, num_tokens: int, timeout_s: float = REQUEST_TIMEOUT_S) -> None:
        """Wait until so many tokens of the first answer have come."""
        self._engine.wait_until(
            lambda: len(self.answer.text.token_ids) >= num_tokens,
            f"{num_tokens} tokens of request {self.request_id}",
            timeout_s=timeout_s,
        )

    def abort(self) -> None:
        """The client goes."""
        self._engine.call(messages.Abort(request_id=self.request_id))
        self._engine.forget(self.request_id)


class EngineProcess:
    """One engine; used by one thread. Start it, wait for it, and close it whatever happens."""

    def __init__(self, spec: EngineSpec, *, log_folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.spec = spec
        self.log_path = log_folder / f"{spec.name}.log"
        self._environment = dict(environment or {})
        self._requests: dict[str, Running] = {}
        self._num_requests = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: FrameSocket | None = None
        self._inbox: queue.SimpleQueue[messages.Message | None] = queue.SimpleQueue()
        self._is_ready = False
        self._exit_code = 0

    # --- the process ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process; does not wait for the engine."""
        assert self._process is None, f"{self.spec.name} runs already"
        ours, theirs = socket.socketpair()
        scratch = self.log_path.parent / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        with theirs, self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "vllm_mooncake_ascend.testing.engine_child",
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                env={**inherited, **ENVIRONMENT, "TMPDIR": str(scratch), **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._frames = FrameSocket(ours)
        self._inbox = queue.SimpleQueue()
        self._is_ready = False
        threading.Thread(target=_collect, args=(self._frames, self._inbox), daemon=True).start()
        self._frames.send(self.spec)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the engine takes requests."""
        self.wait_until(lambda: self._is_ready, "the engine to start", timeout_s=timeout_s)

    @property
    def pid(self) -> int:
        """Process id of the running process."""
        assert self._process is not None, f"{self.spec.name} does not run"
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs (or is stopped)."""
        return self._process is not None and self._process.poll() is None

    def wait_ended(self, timeout_s: float) -> int:
        """Wait until the process has ended by itself; returns how.

        Raises:
            EngineFailed: not within `timeout_s`.
        """
        assert self._process is not None, f"{self.spec.name} does not run"
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise EngineFailed(self._story(f"did not end within {timeout_s:.0f} s")) from None
        self._drop_process()
        return self._exit_code

    def kill(self) -> None:
        """End the process without warning, as a crash would; its requests are lost."""
        if self._process is not None:
            self._process.kill()
            self._drop_process()

    def freeze(self) -> None:
        """Stop the whole process (SIGSTOP): to its peers it falls silent without closing anything."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a stopped process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """Kill the process and start it anew, on the same configuration; does not wait for the engine."""
        self.kill()
        self.start()

    def close(self) -> int:
        """End the process politely, which takes seconds; if it does not end, kill it. A second call does nothing.

        Returns:
            How the process ended: 0 when it did so by itself.
        """
        if self._process is None:
            return 0
        with contextlib.suppress(EngineFailed, subprocess.TimeoutExpired):
            self.call(messages.Quit(), timeout_s=QUIT_TIMEOUT_S)
            self._process.wait(timeout=QUIT_TIMEOUT_S)
        self.kill()
        return self._exit_code

    def _drop_process(self) -> None:
        assert self._process is not None
        assert self._frames is not None
        self._exit_code = self._process.wait()
        self._frames.close()
        self._process, self._frames = None, None
        self._requests.clear()

    # --- requests and commands ------------------------------------------------------------------------------------

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: Sampling | None = None,
        *,
        params: object = None,
        cache_salt: str = "",
        adapter: str = "",
        request_id: str = "",
    ) -> Running:
        """Give the engine a request.

        Args:
            params: kv_transfer_params, any JSON value.
            adapter: folder of a LoRA adapter.
            request_id: made up when empty.

        Raises:
            RequestRefused: vLLM did not accept it.
        """
        sampling = sampling or Sampling()
        self._num_requests += 1
        running = Running(self, request_id or f"{self.spec.name}-{self._num_requests}", sampling.n)
        self._requests[running.request_id] = running
        command = messages.Submit(
            request_id=running.request_id,
            prompt_token_ids=tuple(prompt_token_ids),
            sampling=sampling,
            params_json=json.dumps(params),
            cache_salt=cache_salt,
            adapter=adapter,
        )
        try:
            self.call(command)
        except RequestRefused:
            self.forget(running.request_id)
            raise
        return running

    def reject(self, params: object, *, request_id: str) -> None:
        """Do what the API server does when it refuses a request that carries `params` (vLLM 0.30+)."""
        self.call(messages.Reject(request_id=request_id, params_json=json.dumps(params)))

    def hold(self) -> None:
        """Take no further step until allowed; connector threads go on."""
        self.call(messages.Allow(num_steps=0))

    def step(self, num_steps: int = 1) -> None:
        """Let a held engine take `num_steps` steps and wait until it has taken them (it must have work for them)."""
        first = self.state().num_steps
        self.call(messages.Allow(num_steps=num_steps))
        self.wait_until(lambda: self.state().num_steps >= first + num_steps, f"{num_steps} steps")

    def release(self) -> None:
        """Let the engine step freely again."""
        self.call(messages.Allow(num_steps=None))

    def state(self) -> EngineState:
        """What the engine holds now."""
        return msgspec.convert(self.call(messages.Inspect()), EngineState)

    def metrics(self) -> dict[str, float]:
        """Prometheus samples of vLLM and of the connector, as of the last step."""
        return msgspec.convert(self.call(messages.ReadMetrics()), dict[str, float])

    def metric(self, name: str) -> float:
        """One sample, 0 where there is none yet; the connector's names without their prefix."""
        samples = self.metrics()
        return samples.get(name, samples.get(f"mooncake_ascend:{name}", 0.0))

    def poison(self, block_ids: Sequence[int]) -> None:
        """Overwrite the KV bytes of blocks."""
        self.call(messages.Poison(block_ids=tuple(block_ids)))

    def digests(self, block_ids: Sequence[int]) -> dict[int, str]:
        """Digests of the KV bytes of blocks."""
        return msgspec.convert(self.call(messages.Digest(block_ids=tuple(block_ids))), dict[int, str])

    def reset_cache(self, *, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """vLLM's reset_prefix_cache."""
        command = messages.ResetCache(reset_running_requests=reset_running_requests, reset_connector=reset_connector)
        return bool(self.call(command))

    def call(self, command: messages.Command, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """Send a command and wait for its answer.

        Raises:
            RequestRefused: vLLM raised; the engine lives on.
            EngineFailed: no answer in time, or the process ended.
        """
        if self._frames is None:
            raise EngineFailed(f"engine {self.spec.name} does not run")
        try:
            self._frames.send(command)
        except OSError as error:
            raise EngineFailed(self._story(f"is gone ({error})")) from error
        what = f"the answer to {type(command).__name__}"
        deadline_s = time.monotonic() + timeout_s
        while True:
            match self._next_message(what, deadline_s):
                case messages.Answered() as answered:
                    return answered.value
                case messages.Refused() as refused:
                    raise RequestRefused(f"engine {self.spec.name}: {refused.reason}")

    def forget(self, request_id: str) -> None:
        """Whatever still comes of this request is dropped."""
        self._requests.pop(request_id, None)

    def wait_until(self, reached: Callable[[], bool], what: str, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Take in what comes from the engine until `reached()`.

        Raises:
            EngineFailed: not within `timeout_s`, or the process ended.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.take_arrived()
            if reached():
                return
            with contextlib.suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=POLL_S))
            if time.monotonic() > deadline_s:
                raise EngineFailed(self._story(f"did not come within {timeout_s:.0f} s to {what}"))

    def take_arrived(self) -> None:
        """Take in what has come from the engine, without waiting."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._handle(self._inbox.get_nowait())

    # --- inside ---------------------------------------------------------------------------------------------------

    def _next_message(self, what: str, deadline_s: float) -> messages.Message | None:
        try:
            message = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise EngineFailed(self._story(f"did not give {what} in time")) from None
        self._handle(message)
        return message

    def _handle(self, message: messages.Message | None) -> None:
        match message:
            case None:
                raise EngineFailed(self._story("ended"))
            case messages.Output():
                running = self._requests.get(message.request_id)
                if running is not None:
                    running.answer.add(message)
                    if running.is_finished:
                        self.forget(message.request_id)
            case messages.Ready():
                self._is_ready = True

    def _story(self, what: str) -> str:
        """What happened, with the end of the log."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace")
        return f"engine {self.spec.name} {what}; the end of {self.log_path}:\n{tail}"


def wait_all_ready(engines: Sequence[EngineProcess]) -> None:
    """Wait for engines that were started together."""
    for engine in engines:
        engine.wait_ready()


def _collect(frames: FrameSocket, inbox: queue.SimpleQueue[messages.Message | None]) -> None:
    """Thread of one process: read on, so that the engine never waits for the test. None says that it has ended."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(msgspec.msgpack.decode(frames.receive(), type=messages.Message))
    inbox.put(None)
