"""On what a run was made: versions and machine, as texts. Imports nothing that it names."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from vllm_mooncake_ascend._version import __version__
from vllm_mooncake_ascend.cli import versions


def versions_here() -> dict[str, str]:
    return {
        "vllm-mooncake-ascend": __version__,
        "vllm": versions.version_of(versions.VLLM),
        "mooncake": versions.version_of(versions.MOONCAKE),
        "torch": versions.version_of(versions.TORCH),
        "numpy": versions.version_of(("numpy",)),
        "python": platform.python_version(),
    }


def machine_here() -> dict[str, str]:
    load = ", ".join(f"{found:.1f}" for found in os.getloadavg())
    return {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "load at the start (1, 5, 15 min)": load,
    }


def _first_value(path: str, name: str) -> str:
    """Of the first line `name : value` of a file; empty without one."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
