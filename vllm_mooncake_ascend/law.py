"""Laws: which moves of a state machine are possible. Written once as a table, checked at every event, printed in the docs.

A machine says at each event in which state its record was, what happened, and in which state it is now. Whatever the
table does not name is a bug of ours, not of a peer: a peer's nonsense has its own cell, which says that it is ignored.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Generic, TypeVar

State = TypeVar("State", bound=enum.Enum)
What = TypeVar("What", bound=enum.Enum)


@dataclasses.dataclass(frozen=True, slots=True)
class Cell(Generic[State]):
    """What one thing that happens in one state leads to."""

    text: str
    """What is done, for the reader of docs/protocol.md."""
    to: tuple[State, ...]
    """The states it may lead to."""


class Law(Generic[State, What]):
    """The table of one machine. The simulator puts one that also counts in its place."""

    def __init__(self, cells: Mapping[State, Mapping[What, Cell[State]]]) -> None:
        self.cells = cells

    def check(self, before: State, what: What, after: State) -> None:
        """Accept one move.

        Raises:
            AssertionError: the table has no such move.
        """
        cell = self.cells[before].get(what)
        assert cell is not None, f"{what.name} cannot happen in {before.name}"
        assert after in cell.to, f"{what.name} led from {before.name} to {after.name}; allowed: {[s.name for s in cell.to]}"
