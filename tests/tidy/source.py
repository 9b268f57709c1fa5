"""Reads this repository's own Python files for the tidy tests."""

from __future__ import annotations

import ast
import subprocess
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@lru_cache
def tracked(*patterns: str) -> tuple[Path, ...]:
    """Files of the repository that match git path patterns, new ones that are not ignored included."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return tuple(ROOT / name for name in sorted(set(names)) if name and (ROOT / name).is_file())


@lru_cache
def package_modules() -> tuple[tuple[Path, ast.Module], ...]:
    """Every module of the package with its syntax tree."""
    return tuple((path, ast.parse(path.read_text())) for path in tracked("vllm_mooncake_ascend/*.py"))


def place(path: Path, node: ast.AST | None = None) -> str:
    """`file:line` for a message."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
