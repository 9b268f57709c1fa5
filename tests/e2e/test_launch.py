"""`launch` as a user meets it: a command that starts a set, says where it is, and ends all of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from vllm_mooncake_ascend.cli import processes

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "build/models/tiny-gqa"
STOP_TIMEOUT_S = 60


@pytest.mark.e2e
def test_launch_serves_and_leaves_nothing(tmp_path: Path) -> None:
    """Launches one prefill and one decode engine, asks the proxy once, sends SIGTERM: exit 0 and no process of the set."""
    options = ("--served-model-name", "test", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
    command = (sys.executable, "-m", "vllm_mooncake_ascend.cli.main", "launch", str(MODEL), "--json", "--logs", str(tmp_path))
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with subprocess.Popen((*command, *options), stdout=subprocess.PIPE, text=True, env=environment) as launched:
        try:
            assert launched.stdout is not None
            servers = json.loads(launched.stdout.readline())["servers"]
            answer = ask(next(server["url"] for server in servers if server["role"] == "proxy"))
            launched.send_signal(signal.SIGTERM)
            code = launched.wait(timeout=STOP_TIMEOUT_S)
        finally:
            if launched.poll() is None:
                launched.terminate()
    alive = [pid for server in servers for pid in processes.live_group(server["pid"])]
    assert (8, 0, []) == (answer["usage"]["completion_tokens"], code, alive)


def ask(url: str) -> dict[str, dict[str, int]]:
    body = {"model": "test", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)
