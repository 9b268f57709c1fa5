"""The sizes that CONTRIBUTING promises, so that a module can be read in one sitting. Ruff checks complexity and parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.source import package_modules, place

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_SELF_ATTRIBUTES = 12
MAX_NESTING = 4
"""One more than CONTRIBUTING asks for: a `with` or `try` around a loop is not a decision."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def functions() -> Iterator[tuple[Path, Function]]:
    for path, tree in package_modules():
        for node in ast.walk(tree):
            if isinstance(node, Function):
                yield path, node


def test_modules_are_short() -> None:
    """Counts the lines of every module."""
    long = [place(path) for path, _ in package_modules() if len(path.read_text().splitlines()) > MAX_MODULE_LINES]
    assert [] == long


def test_functions_are_short() -> None:
    """Counts the lines of every function, its docstring included."""
    long = [place(path, node) for path, node in functions() if node.end_lineno - node.lineno >= MAX_FUNCTION_LINES]
    assert [] == long


def test_objects_hold_few_attributes() -> None:
    """Counts the names that the methods of each class assign on self."""
    crowded = [
        f"{place(path, node)} {node.name}"
        for path, tree in package_modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and len(assigned_on_self(node)) > MAX_SELF_ATTRIBUTES
    ]
    assert [] == crowded


def assigned_on_self(node: ast.ClassDef) -> set[str]:
    return {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.ctx, ast.Store)
        and isinstance(part.value, ast.Name)
        and part.value.id == "self"
    }


def test_blocks_nest_little() -> None:
    """Finds the deepest block of every function."""
    deep = [place(path, node) for path, node in functions() if nesting(node.body) > MAX_NESTING]
    assert [] == deep


def nesting(body: list[ast.stmt]) -> int:
    """Depth of blocks in `body`; an `elif` is as deep as its `if`, a function inside starts anew."""
    depth = 0
    for statement in body:
        if isinstance(statement, BLOCKS):
            depth = max(depth, 1 + max(nesting(part) for part in inner_bodies(statement)))
    return depth


def inner_bodies(statement: ast.stmt) -> list[list[ast.stmt]]:
    if isinstance(statement, ast.Match):
        return [case.body for case in statement.cases]
    bodies = [statement.body, *(handler.body for handler in getattr(statement, "handlers", ()))]
    for name in ("orelse", "finalbody"):
        rest = getattr(statement, name, [])
        if isinstance(statement, ast.If) and len(rest) == 1 and isinstance(rest[0], ast.If):
            bodies += inner_bodies(rest[0])
        elif rest:
            bodies.append(rest)
    return bodies
