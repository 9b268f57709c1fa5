"""Installs what ours is compared with into folders of its own under build/, never into the product's environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from vllm_mooncake_ascend.errors import MooncakeAscendError

PEERS = Path("build/peers")
NIXL_VERSION = "1.5.1"
NIXL_PACKAGES = (f"nixl=={NIXL_VERSION}", f"nixl-cu12=={NIXL_VERSION}")
INSTALL_S = 300.0
_DONE = "installed"
"""A file that says that a folder is whole."""


class PeerMissing(MooncakeAscendError):
    """A peer could not be installed."""


def install_nixl() -> Path:
    """The folder with NIXL in it; a second call finds it done.

    Raises:
        PeerMissing: pip failed.
    """
    return installed(PEERS / f"nixl-{NIXL_VERSION}", NIXL_PACKAGES)


def installed(folder: Path, packages: tuple[str, ...]) -> Path:
    """`folder` with these packages in it, without what they depend on: vLLM has what it needs, none of it may be replaced.

    Raises:
        PeerMissing: pip failed.
    """
    marker = folder / _DONE
    if marker.is_file():
        return folder
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(folder), *packages]
    run_step(command, what=" ".join(packages))
    marker.touch()
    return folder


def run_step(command: list[str], *, what: str) -> None:
    """One command of the installation of `what`.

    Raises:
        PeerMissing: it failed, or took too long.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(f"{what} could not be installed: {error}") from error
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PeerMissing(f"{what} could not be installed: {reason}")
