"""Names and words that do not belong into the repository."""

from __future__ import annotations

import ast
import re

import pytest

from tests.tidy.source import ROOT, package_modules, place, tracked

EMPTY_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|misc|manager)($|_)")
MOCK_LIBRARY = "unittest" + ".mock"
MAGIC_MOCK = "Magic" + "Mock"
MACHINE_PATH = re.compile(r"/(?:wo" + r"rk|fa" + r"rm|ro" + r"ot|ho" + r"me/\w+)/")
TEXT_FILES = ("*.py", "*.md", "*.sh", "*.toml", "*.yaml", "*.yml", "*.lock", "*.json", "Makefile", ".ci/*", "*.txt", "*.svg")


def test_no_name_says_nothing() -> None:
    """Modules and classes called utils, helpers, common, misc or manager hide what they are for."""
    empty = [place(path) for path, _ in package_modules() if EMPTY_NAMES.search(path.stem)]
    for path, tree in package_modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and EMPTY_NAMES.search(snake(node.name)):
                empty.append(f"{place(path, node)} {node.name}")
    assert [] == empty


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("word", [MOCK_LIBRARY, MAGIC_MOCK])
def test_no_mock_library(word: str) -> None:
    """Doubles are classes in testing/ that pass the contract of the real thing; a mock agrees with everything."""
    assert [] == [place(path) for path in tracked("*.py") if word in path.read_text()]


def test_no_machine_paths() -> None:
    """A path of one machine in a file is broken on every other one."""
    found = []
    for path in tracked(*TEXT_FILES):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert [] == found


def test_no_pickle_of_our_own() -> None:
    """What comes from a socket is never unpickled: that would run the sender's code. (vLLM pickles between its processes.)"""
    found = []
    for path, tree in package_modules():
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if {"pickle", "cloudpickle", "dill", "marshal", "recv_pyobj", "send_pyobj"} & set(names):
                found.append(place(path, node))
            if isinstance(node, ast.Attribute) and node.attr in ("recv_pyobj", "send_pyobj"):
                found.append(place(path, node))
    assert [] == found


def test_lock_files_name_no_place() -> None:
    """A lock that names an index, a path or a hash of one machine's build cannot be installed elsewhere."""
    pinned = re.compile(r"[a-z0-9-]+==[0-9][a-z0-9.!]*")
    lines = [line for path in tracked("requirements/*.lock") for line in path.read_text().splitlines()]
    assert [] == [line for line in lines if not line.startswith("#") and not pinned.fullmatch(line)]
