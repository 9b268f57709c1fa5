"""A bound for foreign calls."""

from __future__ import annotations

import threading

import pytest

from vllm_mooncake_ascend.engines.deadline import call_with_deadline


def test_a_call_in_time_gives_its_result() -> None:
    """The number the call returned."""
    assert call_with_deadline(lambda: -7, timeout_s=10.0) == -7


def test_a_call_that_hangs_is_left_alone() -> None:
    """None at the deadline; the call ends later by itself and hurts nobody."""
    gate, ended = threading.Event(), threading.Event()

    def hang() -> int:
        gate.wait(10.0)
        ended.set()
        return 0

    assert call_with_deadline(hang, timeout_s=0.001) is None
    gate.set()
    assert ended.wait(10.0)


def test_an_exception_of_the_call_is_raised_here() -> None:
    """It must not vanish in the thread."""

    def fail() -> int:
        raise ValueError("as ordered")

    with pytest.raises(ValueError, match="as ordered"):
        call_with_deadline(fail, timeout_s=10.0)
