"""CPU seconds of a server's processes, read from /proc. Linux only."""

from __future__ import annotations

import os
from pathlib import Path

ENGINE_CORE = "EngineCore"
WORKER = "Worker"
SERVER = "API server"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PARENT, _UTIME, _STIME, _ENDED_UTIME, _ENDED_STIME = 1, 11, 12, 13, 14
"""Fields of /proc/PID/stat, counted from the one behind the name in brackets."""


def cpu_seconds(root_pid: int) -> dict[str, float]:
    """CPU seconds so far of `root_pid` and its descendants, by what vLLM calls the process."""
    seconds: dict[str, float] = {}
    for pid, fields in _tree(root_pid).items():
        part = _part(pid, is_root=pid == root_pid)
        seconds[part] = seconds.get(part, 0.0) + (int(fields[_UTIME]) + int(fields[_STIME])) / _TICKS_PER_S
    return seconds


def total_cpu_seconds(root_pid: int) -> float:
    """CPU seconds so far of `root_pid` and its descendants, those that have ended and were collected included."""
    fields = (_UTIME, _STIME, _ENDED_UTIME, _ENDED_STIME)
    return sum(int(found[field]) for found in _tree(root_pid).values() for field in fields) / _TICKS_PER_S


def _tree(root_pid: int) -> dict[int, list[str]]:
    everybody = {int(entry.name): fields for entry in Path("/proc").iterdir() if (fields := _stat(entry))}
    found = {root_pid: everybody[root_pid]} if root_pid in everybody else {}
    for _ in range(len(everybody)):
        children = {pid: fields for pid, fields in everybody.items() if int(fields[_PARENT]) in found and pid not in found}
        if not children:
            break
        found.update(children)
    return found


def _stat(entry: Path) -> list[str]:
    if not entry.name.isdigit():
        return []
    try:
        return (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _part(pid: int, *, is_root: bool) -> str:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        title = ""
    for part in (ENGINE_CORE, WORKER):
        if part in title:
            return part
    return SERVER if is_root else "other"
