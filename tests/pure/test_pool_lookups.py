"""Lookups and the breaker: given these events, exactly these actions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.pure.pool_stage import HASHES, R, SchedulerStage
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.pool import actions, counters, events
from vllm_mooncake_ascend.types import RequestId


def lookup(lookup_id: int = 1, first_token: int = 0, request_id: str = R) -> actions.StartLookup:
    return actions.StartLookup(
        lookup_id=lookup_id,
        request_id=RequestId(request_id),
        namespace="n",
        hashes=HASHES,
        first_token=first_token,
        end_token=24,
    )


def probe_ended(stage: SchedulerStage, *, is_healthy: bool) -> None:
    stage.feed(events.ProbeEnded(is_healthy=is_healthy))


def test_a_lookup_starts_when_its_request_arrives_and_asks_beyond_the_local_hit() -> None:
    """Goal: the answer is there when vLLM asks. Method: two of six blocks are local."""
    stage = SchedulerStage()

    assert [lookup(first_token=8)] == stage.arrive(num_local_tokens=8)
    stage.answer(20)
    assert 12 == stage.ask(8)


def test_vllm_waits_for_a_lookup_no_longer_than_its_time_box() -> None:
    """Goal: the pool delays nobody. Method: the first question starts 5 ms and 10 us for each of six blocks; then vLLM admits
    the request, and the answer comes too late."""
    stage = SchedulerStage()
    stage.arrive()
    stage.now = 0.5

    assert None is stage.ask()
    stage.wait(0.505)
    assert None is stage.ask()
    stage.wait(0.5051)
    assert 0 == stage.ask()
    assert [] == stage.allocate(0)
    stage.answer(24)
    assert 0 == stage.ask()
    assert 1 == stage.counts[counters.LOOKUPS_TOO_LATE, ""]


def test_an_answer_that_comes_late_to_a_request_that_still_waits_is_taken() -> None:
    """Goal: of many requests that come at once most wait their turn anyway. Method: an answer after the time box, and no
    admission in between."""
    stage = SchedulerStage()
    stage.arrive()
    assert None is stage.ask()
    stage.wait(0.5)
    assert 0 == stage.ask()

    stage.answer(24)

    assert 24 == stage.ask()


def test_lookups_that_vllm_waits_for_go_before_late_ones() -> None:
    """Goal: a burst does not make those late that come after it. Method: four lookups, of which vLLM has waited for the third
    long enough, and the fourth is new."""
    stage = SchedulerStage()
    for name in ("a", "b", "c"):
        stage.arrive(name)
        stage.ask(request_id=name)
    stage.wait(0.5)
    stage.arrive("d")

    assert [lookup(3, request_id="d")] == stage.answer(0, 1)
    assert [lookup(4, request_id="c")] == stage.answer(0, 2)


@pytest.mark.parametrize("changed", [{"num_local_tokens": 24}, {"num_prompt_tokens": 3}, {"may_load": False}])
def test_nobody_is_asked_where_nothing_can_come_of_it(changed: dict[str, int]) -> None:
    """Goal: no call for a full local hit, a prompt below a block, or a request that must not. Method: one each."""
    stage = SchedulerStage()

    assert [] == stage.arrive(**changed)
    assert 0 == stage.ask(changed.get("num_local_tokens", 0))


def test_an_answer_is_kept_for_every_question() -> None:
    """Goal: vLLM may ask at each step while it cannot allocate. Method: ask a hundred times; nothing is started."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(12)

    assert {12} == {stage.ask() for _ in range(100)}


def test_an_answer_older_than_the_lease_allows_is_asked_for_anew() -> None:
    """Goal: no load of what may be evicted by now. Method: admission after half a minute, several times."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(24)
    for number in range(2, limits.MAX_LOOKUPS_PER_REQUEST + 1):
        stage.now += 30.0
        tried = stage.feed(events.AdmissionTried(request_id=R, num_local_tokens=0))
        assert [lookup(number)] == tried
        stage.answer(24, number)
        assert 24 == stage.ask()
    stage.now += 30.0
    assert 0 == stage.ask()


def test_a_local_hit_that_shrank_is_asked_for_anew() -> None:
    """Goal: no gap between what is local and what is loaded. Method: four local blocks at arrival, one at admission."""
    stage = SchedulerStage()
    stage.arrive(num_local_tokens=16)
    stage.answer(24)

    assert [lookup(2, first_token=4)] == stage.feed(events.AdmissionTried(request_id=R, num_local_tokens=4))


def test_a_local_hit_that_grew_leaves_less_to_load() -> None:
    """Goal: what others computed meanwhile is not loaded. Method: ask with one and with all blocks local."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(16)

    assert (12, 0, 0) == (stage.ask(4), stage.ask(16), stage.ask(20))


def test_few_lookups_run_at_once_and_the_rest_in_turn() -> None:
    """Goal: a bounded number of threads. Method: three requests, the first call ends."""
    stage = SchedulerStage()
    assert [lookup(1, request_id="a")] == stage.arrive("a")
    assert [lookup(2, request_id="b")] == stage.arrive("b")
    assert [] == stage.arrive("c")

    assert [lookup(3, request_id="c")] == stage.answer(0, 1)


def test_a_request_that_ends_in_the_queue_is_not_looked_up() -> None:
    """Goal: no call for nobody. Method: the third of three ends before its turn."""
    stage = SchedulerStage()
    for name in ("a", "b", "c"):
        stage.arrive(name)
    stage.end("c")

    assert [] == stage.answer(0, 1)


def test_the_answer_of_an_earlier_request_of_the_same_id_is_not_taken() -> None:
    """Goal: request ids come again. Method: the first lookup ends after the id was used a second time."""
    stage = SchedulerStage()
    stage.arrive()
    stage.end()
    stage.arrive()
    stage.answer(24, 1)

    assert None is stage.ask()
    stage.answer(8, 2)
    assert 8 == stage.ask()


def test_the_first_sign_of_a_dead_store_stops_all_lookups() -> None:
    """Goal: an outage costs nobody anything. Method: one call is lost; the others, and those to come, are misses at once."""
    stage = SchedulerStage()
    for name in ("a", "b", "c"):
        stage.arrive(name)
    stage.answer(0, 1, is_lost=True)

    assert [0, 0, 0] == [stage.ask(request_id=name) for name in ("a", "b", "c")]
    assert [] == stage.arrive("d")
    assert stage.machine.is_breaker_open
    assert 1 == len(stage.notes)


def test_a_call_that_is_overdue_is_a_sign() -> None:
    """Goal: a stopped master, whose calls hang for half a minute, is noticed. Method: no answer for a second."""
    stage = SchedulerStage()
    stage.arrive()
    stage.wait(limits.LOOKUP_OVERDUE_S)

    assert stage.machine.is_breaker_open


def test_without_a_client_nobody_is_asked() -> None:
    """Goal: an engine that started without the pool loses no time on it. Method: StoreLost, then a request."""
    stage = SchedulerStage()

    assert [] == stage.feed(events.StoreLost())
    assert [] == stage.arrive()
    assert 0 == stage.ask()
    assert [actions.ProbeStore()] == stage.wait(limits.STORE_PROBE_S)


def test_the_breaker_closes_after_healthy_probes_in_a_row() -> None:
    """Goal: hits come back by themselves. Method: healthy, sick, healthy, healthy; then a request is looked up."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(0, is_lost=True)
    for number, is_healthy in enumerate((True, False, True, True), 1):
        assert [actions.ProbeStore()] == stage.wait(float(number))
        probe_ended(stage, is_healthy=is_healthy)

    assert not stage.machine.is_breaker_open
    assert [lookup(2, request_id="b")] == stage.arrive("b")


def test_one_probe_is_under_way_at_a_time() -> None:
    """Goal: a client that hangs is not asked again and again. Method: a probe without answer for a minute."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(0, is_lost=True)

    assert [actions.ProbeStore()] == stage.wait(60.0)


def flap(stage: SchedulerStage, number: int) -> None:
    """One outage, and the store is healthy again."""
    stage.arrive(f"r{number}")
    stage.answer(0, number + 1, is_lost=True)
    for _ in range(limits.PROBES_TO_CLOSE):
        stage.wait(stage.now + limits.STORE_PROBE_S)
        probe_ended(stage, is_healthy=True)


def test_a_flapping_store_is_told_once_in_a_while() -> None:
    """Goal: the operator's log stays readable. Method: five outages in half a minute; warnings are counted."""
    stage = SchedulerStage()
    for number in range(5):
        flap(stage, number)

    assert 1 == sum("does not answer" in note for note in stage.notes)
    assert 5 == stage.counts[counters.BREAKER_OPENED, ""]


def test_a_store_that_goes_on_flapping_is_told_again() -> None:
    """Goal: silence does not last as long as the trouble. Method: outages until the time of a line is over."""
    stage = SchedulerStage()
    start_s, number = stage.now, 0
    while stage.now < start_s + limits.BREAKER_NOTE_S:
        flap(stage, number)
        number += 1
    assert 1 == sum("does not answer" in note for note in stage.notes)

    flap(stage, number)

    assert 2 == sum("does not answer" in note for note in stage.notes)


def test_a_reset_moves_all_that_comes_to_another_namespace() -> None:
    """Goal: nothing of the past is found. Method: one answer before, one request after."""
    stage = SchedulerStage()
    stage.arrive()
    stage.answer(24)
    stage.feed(events.PoolReset(namespace="n2"))

    assert 0 == stage.ask()
    (started,) = stage.arrive("later")
    assert "n2" == started.namespace


class Untouchable(Sequence[bytes]):
    """Hashes of a long prompt that nobody may look at."""

    def __len__(self) -> int:
        return 8_192

    def __getitem__(self, index: object) -> bytes:  # type: ignore[override]
        raise AssertionError(f"hash {index} was looked at")


def test_a_lookup_costs_the_scheduler_thread_nothing_per_block() -> None:
    """Goal: a prompt of 8,192 blocks costs what one of a single block does. Method: hashes that must not be touched."""
    stage = SchedulerStage()
    hashes = Untouchable()

    (started,) = stage.arrive(num_prompt_tokens=4 * 8_192, hashes=hashes)
    stage.answer(4 * 8_192)

    assert hashes is started.hashes
    assert 4 * 8_192 == stage.ask()
