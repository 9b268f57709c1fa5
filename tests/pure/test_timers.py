"""Timers and laws: the small parts under the machines."""

from __future__ import annotations

import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.law import Cell, Law
from vllm_mooncake_ascend.timers import Timers

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 20)),
        st.tuples(st.just("drop"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("take"), st.just(0), st.integers(0, 20)),
    ),
    max_size=200,
)


@given(STEPS)
def test_alarms_go_off_as_in_a_plain_table(steps: list[tuple[str, int, int]]) -> None:
    """Goal: the heap is an optimisation and nothing else. Method: random steps against a dict."""
    timers: Timers[int] = Timers()
    table: dict[int, float] = {}
    for step, key, at_s in steps:
        if step == "set":
            timers.set(key, float(at_s))
            table[key] = float(at_s)
        elif step == "drop":
            timers.drop(key)
            table.pop(key, None)
        else:
            taken = timers.take_due(float(at_s))
            first_s = min(table.values(), default=99.0)
            assert (taken is not None) == (first_s <= at_s)
            assert taken is None or first_s == table.pop(taken)
        assert min(table.values(), default=None) == timers.next_s()
        assert len(table) == len(timers)


def test_an_alarm_that_is_moved_often_leaves_the_others_alone() -> None:
    """Goal: outdated entries are swept out, and nothing else. Method: one alarm is moved a thousand times beside another."""
    timers: Timers[str] = Timers()
    timers.set("rare", 500.0)
    for number in range(1_000):
        timers.set("busy", 1_000.0 + number)

    assert ["rare", "busy", None] == [timers.take_due(1e9) for _ in range(3)]


class Light(enum.Enum):
    RED = "red"
    GREEN = "green"


class Switch(enum.Enum):
    ON = "on"


LAW: Law[Light, Switch] = Law({Light.RED: {Switch.ON: Cell("go", (Light.GREEN,))}, Light.GREEN: {}})


def test_a_law_allows_what_its_table_says() -> None:
    """Goal: the table is the law. Method: the one move it has."""
    LAW.check(Light.RED, Switch.ON, Light.GREEN)


@pytest.mark.parametrize(("before", "after"), [(Light.RED, Light.RED), (Light.GREEN, Light.GREEN)])
def test_a_law_refuses_everything_else(before: Light, after: Light) -> None:
    """Goal: a move nobody thought of is a bug. Method: a wrong target, and a cell that does not exist."""
    with pytest.raises(AssertionError):
        LAW.check(before, Switch.ON, after)
