"""Where the machines spend a request: calls and own time of each function, by Python's profiler. It makes calls dear, so its
times are for comparing functions with each other, and its counts for comparing loads: no noise changes them."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

PACKAGE = Path(__file__).parents[2]
"""Folder of the package: what lies elsewhere is not ours."""
_DRIVER = Path(__file__).parent
TOP = 5
"""Functions that are named."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Of one function, for one request."""

    calls: float
    own_us: float
    is_ours: bool
    """A function of the product; neither the bench's own driver nor Python's."""


def profiled(
    serve: Callable[[], None], num_requests: int, *, renew_state: Callable[[], None] = lambda: None, min_s: float = 0.0
) -> dict[str, Cost]:
    """What a call of `serve`, which serves so many requests, spends by function."""
    profile = cProfile.Profile(time.thread_time)
    num_served, started_s = 0, time.thread_time()
    while num_served == 0 or time.thread_time() - started_s < min_s:
        renew_state()
        profile.enable()
        serve()
        profile.disable()
        num_served += num_requests
    found: dict[str, Cost] = {}
    stats: Mapping[tuple[str, int, str], tuple[int, int, float, float, object]] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, line, function), (_, calls, own_s, _, _) in stats.items():
        name, is_ours = _named(file, line, function)
        found[name] = Cost(calls=calls / num_served, own_us=1e6 * own_s / num_served, is_ours=is_ours)
    return found


def num_calls(costs: Mapping[str, Cost]) -> float:
    """Calls of the product's functions for one request; each turn of a generator is one."""
    return sum(cost.calls for cost in costs.values() if cost.is_ours)


def own_us(costs: Mapping[str, Cost]) -> float:
    """Of everything, for one request."""
    return sum(cost.own_us for cost in costs.values())


def dearest(small: Mapping[str, Cost], large: Mapping[str, Cost]) -> str:
    """The functions that a request of the larger load spends most in, with what they take at the smaller one."""
    none = Cost(calls=0, own_us=0, is_ours=True)
    names = sorted(large, key=lambda name: -large[name].own_us)[:TOP]
    return "; ".join(f"{name} {_shown(small.get(name, none))} -> {_shown(large[name])}" for name in names)


def _shown(cost: Cost) -> str:
    return f"{cost.own_us:,.1f} us in {cost.calls:,.1f}"


def _named(file: str, line: int, function: str) -> tuple[str, bool]:
    path = Path(file)
    if not path.is_relative_to(PACKAGE):
        return (function if file == "~" else f"{path.name}:{line} {function}"), False
    return f"{path.relative_to(PACKAGE)}:{line} {function}", not path.is_relative_to(_DRIVER)
