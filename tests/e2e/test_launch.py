"""`launch` as a user meets it: a command that starts a set, says where it is, and ends all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from vllm_mooncake_ascend.cli import processes

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "build/models/tiny-gqa"
STOP_TIMEOUT_S = 60
SAVED_S = 20.0
ROLES = ("proxy", "decode", "master")


@pytest.mark.e2e
def test_launch_serves_and_leaves_nothing(tmp_path: Path) -> None:
    """Launches one prefill and one decode engine that stream, with a pool between them, asks the proxy twice, the second time
    both engines at once, and decode alone; looks into the pool, sends SIGTERM: equal answers, the first prompt's whole block
    is in the pool, exit 0 and no process of the set."""
    engines = ("--served-model-name", "test", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
    options = (
        "--transfer-mode",
        "stream",
        "--max-num-batched-tokens",
        "256",
        "--prefix-pooling",
        "--pool-segment",
        "64MB",
        "--block-size",
        "128",
        *engines,
    )
    command = (sys.executable, "-m", "vllm_mooncake_ascend.cli.main", "launch", str(MODEL), "--json", "--logs", str(tmp_path))
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with subprocess.Popen((*command, *options), stdout=subprocess.PIPE, text=True, env=environment) as launched:
        try:
            assert launched.stdout is not None
            servers = json.loads(launched.stdout.readline())["servers"]
            (proxy,), (decode,), (master,) = ([one for one in servers if one["role"] == role] for role in ROLES)
            answer = ask(proxy["url"], range(100, 300))
            num_saved = saved_objects(master["rpc_address"], master["url"].removeprefix("http://"))
            streamed, alone = ask(proxy["url"], range(900)), ask(decode["url"], range(900), cache_salt="alone")
            num_early = metric(proxy["url"], 'mooncake_ascend_proxy_early_decode_legs_total{result="used"}')
            launched.send_signal(signal.SIGTERM)
            code = launched.wait(timeout=STOP_TIMEOUT_S)
        finally:
            if launched.poll() is None:
                launched.terminate()
    alive = [pid for server in servers for pid in processes.live_group(server["pid"])]
    assert (8, 1, 0, []) == (answer["usage"]["completion_tokens"], num_saved, code, alive)
    assert (1.0, alone["choices"][0]["text"]) == (num_early, streamed["choices"][0]["text"])


def saved_objects(master: str, metrics: str) -> int:
    """What `pool stat` counts once something is there; saves run behind the answer."""
    deadline_s = time.monotonic() + SAVED_S
    while True:
        command = (
            sys.executable,
            "-m",
            "vllm_mooncake_ascend.cli.main",
            "pool",
            "stat",
            "--master",
            master,
            "--metrics",
            metrics,
        )
        done = subprocess.run((*command, "--json"), stdout=subprocess.PIPE, text=True, check=True)
        num_objects = json.loads(done.stdout)["num_objects"]
        if num_objects or time.monotonic() > deadline_s:
            return num_objects


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def ask(url: str, prompt: range, **options: str) -> dict[str, Any]:
    body = {"model": "test", "prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True, **options}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)
