"""`vllm-router` from PyPI, for `bench proxy`: in an environment of its own under build/, never a dependency of the product."""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_mooncake_ascend.cli import processes, servers
from vllm_mooncake_ascend.cli.bench.peers_install import PEERS, PeerMissing, run_step

VERSION = "0.1.17"
FOLDER = PEERS / f"vllm-router-{VERSION}"
NAME = "vllm-router"


def install(folder: Path = FOLDER) -> Path:
    """Its command; a second call finds it done.

    Raises:
        PeerMissing: there is no build for this machine, or nothing to install from.
    """
    command = folder / "bin" / NAME
    if not command.is_file():
        package = f"{NAME}=={VERSION}"
        python = str(folder / "bin" / "python")
        run_step([sys.executable, "-m", "venv", str(folder)], what=package)
        run_step([python, "-m", "pip", "install", "-q", "--only-binary", ":all:", package], what=package)
    if not command.is_file():
        raise PeerMissing(f"{NAME} {VERSION} has no command {command}")
    return command.absolute()


def server(command: Path, prefill_url: str, decode_url: str) -> servers.ServerSpec:
    """It before one engine of each role, as it is shipped but for its policy: its default one compares prompts."""
    words = (
        *(str(command), "--host", "127.0.0.1", "--port", servers.PORT, "--vllm-pd-disaggregation"),
        *("--prefill", prefill_url, "--decode", decode_url, "--policy", "round_robin"),
        *("--prometheus-port", str(processes.free_port())),
    )
    return servers.ServerSpec(name=NAME, role="router", command=words)
