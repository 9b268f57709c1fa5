"""The decisions of one request, without any I/O: given these events, exactly these actions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.proxy.exchange import (
    Abandon,
    Action,
    AnswerError,
    AnswerPassed,
    AskDecode,
    AskPrefill,
    ClientLeft,
    CountRetry,
    EndStream,
    Event,
    Exchange,
    LegAnswered,
    LegLost,
    NoInstance,
    PassAnswer,
    Plan,
    Release,
    StreamBroke,
)
from vllm_mooncake_ascend.types import TransferId

IDS = (TransferId("t1"), TransferId("t2"))
PARAMS = {"transfer_id": "t1", "do_remote_prefill": True}


def begun(*, policy: Any = "fail", ids: tuple[TransferId, ...] = IDS) -> Exchange:
    """An exchange whose first leg is under way."""
    exchange = Exchange(Plan(transfer_ids=ids, on_prefill_unavailable=policy, has_prompt=True))
    exchange.begin()
    return exchange


def in_decode(**options: Any) -> Exchange:
    """An exchange whose prefill went well."""
    exchange = begun(**options)
    exchange.handle(LegAnswered(instance="p1", status=200, params=PARAMS))
    return exchange


def lost(instance: str, reason: Any = "reset") -> LegLost:
    return LegLost(instance=instance, reason=reason, detail="gone")


def test_a_request_goes_to_prefill_first() -> None:
    """Goal: the sequential flow. Method: the first action of a plan with transfer ids."""
    plan = Plan(transfer_ids=IDS, on_prefill_unavailable="fail", has_prompt=True)

    assert [AskPrefill(transfer_id=IDS[0], avoid=())] == Exchange(plan).begin()


def test_params_of_prefill_go_to_decode() -> None:
    """Goal: the second leg carries them. Method: prefill answers 200."""
    exchange = begun()

    answered = LegAnswered(instance="p1", status=200, params=PARAMS)
    assert [AskDecode(params=PARAMS, avoid=())] == exchange.handle(answered)
    assert "remote" == exchange.pd_mode


@pytest.mark.parametrize(("has_prompt", "mode"), [(True, "local"), (False, "none")])
def test_a_plan_without_prefill_goes_to_decode_alone(has_prompt: bool, mode: str) -> None:
    """Goal: local requests and passed calls have one leg. Method: no transfer ids."""
    exchange = Exchange(Plan(transfer_ids=(), on_prefill_unavailable="fail", has_prompt=has_prompt))

    assert [AskDecode(params=None, avoid=())] == exchange.begin()
    assert mode == exchange.pd_mode


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
def test_a_refusal_of_prefill_ends_the_request(status: int) -> None:
    """Goal: the client's fault is told once. Method: any 4xx; no retry and nothing to release."""
    exchange = begun()

    assert [PassAnswer()] == exchange.handle(LegAnswered(instance="p1", status=status))
    assert exchange.ended


def test_a_second_prefill_gets_a_new_transfer_id() -> None:
    """Goal: KV that the first may still hold is never taken for the second's. Method: lose the first."""
    exchange = begun()

    assert [
        CountRetry(leg="prefill", reason="reset"),
        AskPrefill(transfer_id=IDS[1], avoid=("p1",)),
    ] == exchange.handle(lost("p1"))


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (lost("p2", "unreachable"), 503),
        (lost("p2", "silent"), 504),
        (lost("p2", "reset"), 502),
        (LegAnswered(instance="p2", status=500), 502),
        (LegAnswered(instance="p2", status=302), 502),
        (LegAnswered(instance="p2", status=200), 502),
    ],
)
def test_two_failed_prefills_are_an_error(event: Event, status: int) -> None:
    """Goal: policy fail names the last failure. Method: two failures of several kinds."""
    exchange = begun()
    exchange.handle(lost("p1"))

    (error,) = exchange.handle(event)
    assert isinstance(error, AnswerError)
    assert (status, "prefill_unavailable") == (error.status, error.kind)
    assert "p2" in error.message


def test_without_another_prefill_the_first_failure_is_told() -> None:
    """Goal: the message names what went wrong, not that nothing was left. Method: one lost, then no instance."""
    exchange = begun()
    exchange.handle(lost("p1", "silent"))

    (error,) = exchange.handle(NoInstance())
    assert isinstance(error, AnswerError)
    assert (504, True) == (error.status, "p1" in error.message)


def test_no_prefill_at_all_runs_on_decode_by_policy() -> None:
    """Goal: policy local. Method: no instance to begin with."""
    exchange = begun(policy="local")

    assert [AskDecode(params=None, avoid=())] == exchange.handle(NoInstance())
    assert "local_fallback" == exchange.pd_mode


def test_decode_passes_its_answer_and_nothing_is_released() -> None:
    """Goal: KV that is read needs no release. Method: 200 of decode, then the end."""
    exchange = in_decode()

    assert [PassAnswer()] == exchange.handle(LegAnswered(instance="d1", status=200))
    assert [] == exchange.handle(AnswerPassed())
    assert exchange.ended


def test_a_refusal_of_decode_releases_first() -> None:
    """Goal: prefill's blocks do not wait for a slow client. Method: the order of the two actions."""
    exchange = in_decode()

    assert [Release(params=PARAMS), PassAnswer()] == exchange.handle(LegAnswered(instance="d1", status=400))


def test_a_second_decode_gets_the_same_params() -> None:
    """Goal: prefill still holds. Method: lose the first decode."""
    exchange = in_decode()

    assert [
        CountRetry(leg="decode", reason="unreachable"),
        AskDecode(params=PARAMS, avoid=("d1",)),
    ] == exchange.handle(lost("d1", "unreachable"))


def test_two_failed_decodes_release_and_are_an_error() -> None:
    """Goal: bounded tries. Method: two failures."""
    exchange = in_decode()
    exchange.handle(lost("d1"))

    release, error = exchange.handle(LegAnswered(instance="d2", status=503))
    assert Release(params=PARAMS) == release
    assert isinstance(error, AnswerError)
    assert (502, "decode_unavailable") == (error.status, error.kind)


def test_a_local_request_releases_nothing() -> None:
    """Goal: nothing to release, no release. Method: a local request that decode refuses."""
    exchange = begun(ids=())

    assert [PassAnswer()] == exchange.handle(LegAnswered(instance="d1", status=400))


def test_a_broken_stream_is_ended_and_never_asked_again() -> None:
    """Goal: no replay. Method: the stream breaks after bytes went out."""
    exchange = in_decode()
    exchange.handle(LegAnswered(instance="d1", status=200))

    (end,) = exchange.handle(StreamBroke(instance="d1", detail="reset"))
    assert isinstance(end, EndStream)
    assert exchange.ended


def test_a_client_that_leaves_prefill_abandons_its_transfer() -> None:
    """Goal: a prefill that ended while its client left is not held for nobody. Method: leave in the first leg, and in its
    second attempt."""
    again = begun()
    again.handle(lost("p1"))

    assert [[Abandon(transfer_id=found)] for found in IDS] == [begun().handle(ClientLeft()), again.handle(ClientLeft())]


def test_a_client_that_leaves_before_decode_starts_releases() -> None:
    """Goal: case R01. Method: leave in the second leg."""
    assert [Release(params=PARAMS)] == in_decode().handle(ClientLeft())


def test_a_client_that_leaves_the_answer_releases_nothing() -> None:
    """Goal: decode has the KV and lets go itself. Method: leave in the middle of the answer."""
    exchange = in_decode()
    exchange.handle(LegAnswered(instance="d1", status=200))

    assert [] == exchange.handle(ClientLeft())


@pytest.mark.parametrize("event", [AnswerPassed(), StreamBroke(instance="d1", detail="")])
def test_what_cannot_come_is_a_bug(event: Event) -> None:
    """Goal: a wrong shell is found at once. Method: events of the answer while prefill runs."""
    with pytest.raises(LocalProtocolError):
        begun().handle(event)


def test_nothing_comes_after_the_end() -> None:
    """Goal: an exchange ends once. Method: an event after its end."""
    exchange = begun()
    exchange.handle(ClientLeft())
    with pytest.raises(LocalProtocolError):
        exchange.handle(ClientLeft())


LEG_EVENTS = st.one_of(
    st.builds(
        LegAnswered,
        instance=st.sampled_from(["a", "b", "c"]),
        status=st.sampled_from([200, 204, 302, 400, 429, 500, 503]),
        params=st.sampled_from([None, PARAMS]),
    ),
    st.builds(
        LegLost,
        instance=st.sampled_from(["a", "b", "c"]),
        reason=st.sampled_from(["unreachable", "silent"]),
        detail=st.just("x"),
    ),
    st.just(NoInstance()),
    st.just(ClientLeft()),
)
ANSWER_EVENTS = st.sampled_from([AnswerPassed(), StreamBroke(instance="d", detail="x"), ClientLeft()])


@given(data=st.data(), policy=st.sampled_from(["fail", "local"]), ids=st.sampled_from([(), IDS]))
def test_every_exchange_ends_bounded_and_releases_at_most_once(data: st.DataObject, policy: Any, ids: Any) -> None:
    """Goal: safety and liveness of the machine. Method: whatever comes, count asks, releases and answers."""
    exchange = Exchange(Plan(transfer_ids=ids, on_prefill_unavailable=policy, has_prompt=True))
    done: list[Action] = exchange.begin()
    has_read = False
    while not exchange.ended:
        is_answering = isinstance(done[-1], PassAnswer)
        has_read = has_read or is_answering
        done += exchange.handle(data.draw(ANSWER_EVENTS if is_answering else LEG_EVENTS))
        assert len(done) <= 20

    def count(kind: type) -> int:
        return sum(isinstance(action, kind) for action in done)

    assert max(count(AskPrefill), count(AskDecode)) <= limits.LEG_ATTEMPTS
    assert count(PassAnswer) + count(AnswerError) <= 1
    assert count(Release) <= (0 if has_read or not any(isinstance(a, AskDecode) and a.params for a in done) else 1)
