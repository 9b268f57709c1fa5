"""Who may import what, and that the package works where nothing heavy is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tidy.source import ROOT

HEAVY = ("vllm", "torch", "torch_npu", "mooncake", "transformers")
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (blocked by the test)", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter in which nothing heavy can be imported."""
    return subprocess.run([sys.executable, "-c", BLOCKER + code], capture_output=True, text=True, cwd=ROOT, check=False)


def test_import_rules_hold() -> None:
    """Runs import-linter with the contracts of .importlinter."""
    linter = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert 0 == result.returncode, result.stdout[-3000:]


@pytest.mark.parametrize(
    "module",
    ["vllm_mooncake_ascend", "vllm_mooncake_ascend.cli.main", "vllm_mooncake_ascend.config", "vllm_mooncake_ascend.proxy"],
)
def test_light_modules_import_without_anything_heavy(module: str) -> None:
    """The doctor must run on a machine where vLLM, torch or Mooncake is missing or broken."""
    result = run_blocked(f"import {module}")
    assert (0, "") == (result.returncode, result.stderr)


def test_the_help_works_without_anything_heavy() -> None:
    """Shows the help of every command with all heavy packages blocked; none may be missing."""
    code = """
from vllm_mooncake_ascend.cli.main import COMMANDS, build_app
from typer.testing import CliRunner
app = build_app()
for name in COMMANDS:
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0 and "not available here" not in result.output, (name, result.output)
"""
    result = run_blocked(code)
    assert (0, "") == (result.returncode, result.stderr)


def test_the_package_imports_nothing_heavy() -> None:
    """Imports the package and the command line and looks at what came along."""
    code = f"""
import sys
import vllm_mooncake_ascend.cli.main
vllm_mooncake_ascend.cli.main.build_app()
print(*sorted(set(sys.modules) & set({HEAVY!r})))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (0, "") == (result.returncode, result.stdout.strip()), result.stderr
