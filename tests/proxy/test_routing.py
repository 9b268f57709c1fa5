"""Which instance is next, and which is left alone."""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.proxy.routing import Finding, Routing, finding_of_status

URLS = ("a", "b", "c")


def test_instances_take_turns() -> None:
    """Goal: round robin. Method: two rounds."""
    routing = Routing(URLS)

    assert [*URLS, *URLS] == [routing.choose((), 0.0) for _ in range(6)]


def test_a_retry_goes_elsewhere() -> None:
    """Goal: what was tried is avoided. Method: avoid two of three, then all."""
    routing = Routing(URLS)

    assert ("c", None) == (routing.choose(("a", "b"), 0.0), routing.choose(URLS, 0.0))


def test_a_broken_instance_is_left_alone_for_its_cool_down() -> None:
    """Goal: out, and back by time alone. Method: one lost request; sound probes do not shorten it."""
    routing = Routing(("a", "b"))
    routing.learn("a", "request", Finding.BROKEN, 0.0)
    routing.learn("a", "probe", Finding.SOUND, 1.0)
    just_before_s = limits.COOL_DOWN_S - 0.01

    assert [False, True] == [routing.is_usable("a", now_s) for now_s in (just_before_s, limits.COOL_DOWN_S)]


def test_errors_in_a_row_break_an_instance() -> None:
    """Goal: one bad request does not, a failing engine does. Method: errors up to the bound."""
    routing = Routing(("a", "b"))
    usable = []
    for _ in range(limits.FAILURES_TO_COOL_DOWN):
        routing.learn("a", "request", Finding.SUSPECT, 0.0)
        usable.append(routing.is_usable("a", 0.0))

    assert [True] * (limits.FAILURES_TO_COOL_DOWN - 1) + [False] == usable


def test_a_sound_answer_ends_the_row() -> None:
    """Goal: errors far apart do not add up. Method: an answer between them."""
    routing = Routing(("a",))
    for _ in range(limits.FAILURES_TO_COOL_DOWN):
        routing.learn("a", "request", Finding.SUSPECT, 0.0)
        routing.learn("a", "request", Finding.SOUND, 0.0)

    assert routing.is_usable("a", 0.0)


def test_sound_probes_do_not_end_a_row_of_errors() -> None:
    """Goal: an API server that answers does not hide a failing engine. Method: probes between the errors."""
    routing = Routing(("a",))
    for _ in range(limits.FAILURES_TO_COOL_DOWN):
        routing.learn("a", "request", Finding.SUSPECT, 0.0)
        routing.learn("a", "probe", Finding.SOUND, 0.0)

    assert not routing.is_usable("a", 0.0)


def test_a_failing_probe_prolongs_the_cool_down() -> None:
    """Goal: no traffic to what is known to be down. Method: a broken probe in the middle of a cool-down."""
    routing = Routing(("a",))
    routing.learn("a", "request", Finding.BROKEN, 0.0)
    routing.learn("a", "probe", Finding.BROKEN, limits.PROBE_INTERVAL_S)

    assert not routing.is_usable("a", limits.COOL_DOWN_S)


def test_with_all_broken_there_is_none() -> None:
    """Goal: the exchange decides what then. Method: break all."""
    routing = Routing(URLS)
    for url in URLS:
        routing.learn(url, "request", Finding.BROKEN, 0.0)

    assert routing.choose((), 0.0) is None


@pytest.mark.parametrize(("status", "finding"), [(200, Finding.SOUND), (400, Finding.SOUND), (500, Finding.SUSPECT)])
def test_an_answer_shows_its_instance(status: int, finding: Finding) -> None:
    """Goal: a client's fault is not the instance's. Method: one status of each class."""
    assert finding is finding_of_status(status)
