"""Which Mooncake is installed, and whether it can serve the protocol asked for.

Mooncake's `initialize` ignores the protocol: the build for Ascend always uses Ascend, any other build takes RDMA where it
sees an adapter and TCP elsewhere (`mooncake-transfer-engine/src/transfer_engine_impl.cpp`, v0.3.13.post1). A wrong pairing
would show as a transfer that is slow, or fails, an hour later; so it is refused here, by name, before an engine exists.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import msgspec

PROTOCOLS = ("ascend", "rdma", "tcp")

_DISTRIBUTIONS = (
    "mooncake-transfer-engine-npu",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine",
)
_RDMA_DEVICES = Path("/sys/class/infiniband")


class Build(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed on this machine."""

    version: str
    """Of the Mooncake distribution; empty where none is found (a build from source has no metadata)."""
    is_importable: bool
    has_ascend: bool
    num_rdma_devices: int


def installed_build() -> Build:
    """Look at the installed files; imports nothing of Mooncake."""
    spec = importlib.util.find_spec("mooncake")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return Build(
        version=_version(),
        is_importable=any(list(Path(folder).glob("engine*.so")) for folder in folders),
        has_ascend=any((Path(folder) / "ascend_transport.so").exists() for folder in folders),
        num_rdma_devices=sum(1 for _ in _RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else 0,
    )


def objection(build: Build, *, protocol: str) -> str | None:
    """Why `build` cannot serve `protocol`, with what to do; None if nothing speaks against it."""
    if protocol not in PROTOCOLS:
        return f"protocol {protocol!r} is not one of {', '.join(PROTOCOLS)}"
    if not build.is_importable:
        return (
            "Mooncake Transfer Engine is not installed; install mooncake-transfer-engine-npu on Ascend, "
            "mooncake-transfer-engine-non-cuda on machines without an accelerator"
        )
    if protocol == "ascend" and not build.has_ascend:
        return (
            "protocol 'ascend' needs Mooncake's build for Ascend, but the installed package has no ascend_transport.so; "
            "install mooncake-transfer-engine-npu, or set protocol to tcp"
        )
    if protocol == "rdma" and build.has_ascend:
        return "Mooncake's build for Ascend cannot serve protocol 'rdma'; set protocol to ascend, or install another build"
    if protocol == "rdma" and build.num_rdma_devices == 0:
        return f"protocol 'rdma' needs an RDMA adapter, but {_RDMA_DEVICES} lists none; set protocol to tcp"
    return None


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""
