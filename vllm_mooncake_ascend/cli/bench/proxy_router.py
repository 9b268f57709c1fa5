"""`vllm-router` from PyPI, for `bench proxy`: in an environment of its own under build/, never a dependency of the product."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from vllm_mooncake_ascend.cli import processes, servers
from vllm_mooncake_ascend.errors import MooncakeAscendError

VERSION = "0.1.17"
FOLDER = Path("build/peers") / f"vllm-router-{VERSION}"
INSTALL_S = 300.0
NAME = "vllm-router"


class RouterMissing(MooncakeAscendError):
    """It could not be installed."""


def install(folder: Path = FOLDER) -> Path:
    """Its command; a second call finds it done.

    Raises:
        RouterMissing: there is no build for this machine, or nothing to install from.
    """
    command = folder / "bin" / NAME
    if not command.is_file():
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--only-binary", ":all:", f"{NAME}=={VERSION}"])
    if not command.is_file():
        raise RouterMissing(f"{NAME} {VERSION} has no command {command}")
    return command.absolute()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RouterMissing(f"{NAME} {VERSION} could not be installed: {error}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RouterMissing(f"{NAME} {VERSION} could not be installed: {reason}")


def server(command: Path, prefill_url: str, decode_url: str) -> servers.ServerSpec:
    """It before one engine of each role, as it is shipped but for its policy: its default one compares prompts."""
    words = (
        *(str(command), "--host", "127.0.0.1", "--port", servers.PORT, "--vllm-pd-disaggregation"),
        *("--prefill", prefill_url, "--decode", decode_url, "--policy", "round_robin"),
        *("--prometheus-port", str(processes.free_port())),
    )
    return servers.ServerSpec(name=NAME, role="router", command=words)
