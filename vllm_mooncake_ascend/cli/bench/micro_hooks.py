"""Scheduler hooks, measured by a process of its own (`hooks_process`) beside a master of a pool."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm_mooncake_ascend.cli import processes, servers
from vllm_mooncake_ascend.cli.bench import hooks_process
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.samples import Sample
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster
from vllm_mooncake_ascend.errors import MooncakeAscendError

MAX_S = 3_600.0
LOGS = Path("build/bench/logs")


class HooksFailed(MooncakeAscendError):
    """The process that measures ended without a result."""


def hook_samples(nums_running: Sequence[int], *, num_rounds: int, seed: int) -> dict[Measure, list[Sample]]:
    """Raises HooksFailed, or ServerFailed when there is no master."""
    log_path = LOGS / "hooks.log"
    with processes.termination_as_interrupt(), LocalCluster(LOGS) as cluster:
        master = cluster.start(servers.master())
        cluster.wait_ready()
        order = hooks_process.Order(
            nums_running=tuple(nums_running), num_rounds=num_rounds, seed=seed, master_address=master.rpc_address
        )
        command = [sys.executable, "-m", hooks_process.__name__, msgspec.json.encode(order).decode()]
        with log_path.open("wb") as log:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, timeout=MAX_S, check=False)
    if done.returncode != 0:
        end = "\n".join(log_path.read_text(errors="replace").splitlines()[-20:])
        raise HooksFailed(f"measuring hooks ended with {done.returncode}; the end of {log_path}:\n{end}")
    last_line = done.stdout.rstrip().rpartition(b"\n")[2]
    return dict(msgspec.json.decode(last_line, type=hooks_process.Found))


def hook_comparisons(samples: dict[Measure, list[Sample]]) -> list[Comparison]:
    """The pool's connector over vLLM's, for each number of running requests."""
    by_case = {(one.name, one.case, one.subject): one for one in samples}
    return [
        Comparison(above=one, below=by_case[name, case, hooks_process.PEER])
        for (name, case, subject), one in by_case.items()
        if subject == hooks_process.POOL and (name, case, hooks_process.PEER) in by_case
    ]
