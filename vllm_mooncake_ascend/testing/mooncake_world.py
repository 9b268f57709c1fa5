"""The real world of the engine contract: the engine under test in this process, each peer in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from vllm_mooncake_ascend.engines import environment
from vllm_mooncake_ascend.engines.base import ReadResult, TransferEngine
from vllm_mooncake_ascend.engines.transfer import MooncakeTransferEngine
from vllm_mooncake_ascend.layout.plane import Region
from vllm_mooncake_ascend.planner.batch import CopyBatch
from vllm_mooncake_ascend.testing import engine_peer
from vllm_mooncake_ascend.testing.contract_world import Peer
from vllm_mooncake_ascend.testing.memory import Bytes
from vllm_mooncake_ascend.types import Outcome, Session

_RUN_BYTES = 64 << 10
_ROUNDS = 50
_ANSWER_S = 60.0
"""A peer process that says nothing for so long has failed the check."""


class ProcessPeer:
    """An `engine_peer` process."""

    def __init__(self, protocol: str, num_bytes: int, seed: int) -> None:
        self.num_bytes = num_bytes
        self.seed = seed
        self._protocol = protocol
        self._process, self._serving = self._start()

    @property
    def session(self) -> Session:
        return Session(self._serving.session)

    @property
    def base_address(self) -> int:
        return self._serving.base_address

    def stop(self) -> None:
        """Returns when it is stopped with all its threads, which is a moment after the signal."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(_ANSWER_S)

    def close_engine(self) -> None:
        self._ask(engine_peer.Close())
        msgspec.json.decode(self._line(self._process), type=engine_peer.Closed)

    def restart(self, seed: int) -> None:
        """Under another session: a port that Mooncake has answered on cannot be bound again for 60 s (TIME_WAIT)."""
        self.seed = seed
        self._close_pipes()
        self._process, self._serving = self._start()

    def start_reading(self, source: Region, session: Session, seed: int) -> Callable[[], list[str]]:
        self._ask(
            engine_peer.Read(
                session=session,
                remote_address=source.base_address,
                num_bytes=source.length_bytes,
                run_bytes=_RUN_BYTES,
                seed=seed,
                rounds=_ROUNDS,
            )
        )

        def wait() -> list[str]:
            answer = msgspec.json.decode(self._line(self._process), type=engine_peer.ReadAnswer)
            return answer.failures + ["wrong bytes"] * answer.num_wrong

        return wait

    def _start(self) -> tuple[subprocess.Popen[bytes], engine_peer.Serving]:
        command = [sys.executable, "-m", engine_peer.__name__, "--protocol", self._protocol]
        command += ["--num-bytes", str(self.num_bytes), "--seed", str(self.seed)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return process, msgspec.json.decode(self._line(process), type=engine_peer.Serving)

    def _ask(self, command: engine_peer.Command) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(command) + b"\n")
        self._process.stdin.flush()

    @staticmethod
    def _line(process: subprocess.Popen[bytes]) -> bytes:
        """Next line of the process; one that stays silent is killed, which ends the wait with an error."""
        assert process.stdout is not None
        watchdog = threading.Timer(_ANSWER_S, process.kill)
        watchdog.start()
        try:
            return process.stdout.readline()
        finally:
            watchdog.cancel()

    def end(self) -> None:
        """Leave nothing behind, in whatever state the process is."""
        self.kill()
        self._close_pipes()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class MooncakeWorld:
    """Real engines: the one under test in this process, each peer in one of its own."""

    def __init__(self, protocol: str, *, late_watch_s: float) -> None:
        self.late_watch_s = late_watch_s
        self.call_bound_s = environment.call_timeout_s(os.environ) + 3.0
        """The timeout, a second a GiB, and up to two engines to destroy."""
        self._protocol = protocol
        self._engines: list[MooncakeTransferEngine] = []
        self._peers: list[ProcessPeer] = []

    def engine(self) -> MooncakeTransferEngine:
        engine = MooncakeTransferEngine(host="127.0.0.1", protocol=self._protocol)
        self._engines.append(engine)
        return engine

    def peer(self, num_bytes: int, seed: int = 1) -> ProcessPeer:
        peer = ProcessPeer(self._protocol, num_bytes, seed)
        self._peers.append(peer)
        return peer

    def read_while_stopping(self, engine: TransferEngine, peer: Peer, batch: CopyBatch, first_byte: Bytes) -> ReadResult:
        """A read that beats the stop is repeated; the first byte to land triggers the stop."""
        for _ in range(20):
            results: list[ReadResult] = []
            reader = threading.Thread(target=lambda into=results: into.append(engine.read(peer.session, batch)))
            reader.start()
            while not first_byte.any() and not results:
                pass
            peer.stop()
            reader.join()
            if results[0].outcome is not Outcome.DONE:
                return results[0]
            peer.resume()
            first_byte[:] = 0
        raise AssertionError("no read could be interrupted in 20 attempts")

    def pass_time(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        for peer in self._peers:
            peer.end()
        for engine in self._engines:
            engine.close()
