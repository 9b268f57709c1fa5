"""A law that allows every move: machines with planted mistakes are under it, so that it is the world that has to notice."""

from __future__ import annotations

from vllm_mooncake_ascend.law import Law, State, What


class NoLaw(Law[State, What]):
    """Allows every move."""

    def __init__(self) -> None:
        super().__init__({})

    def check(self, before: State, what: What, after: State) -> None:
        """Nothing is checked."""
