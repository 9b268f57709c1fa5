"""Consumer: given these events, exactly these actions. What must hold under every order of events is the simulator's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.stage import (
    ADDRESS,
    BLOCKS,
    DECODE,
    NUM_TOKENS,
    PREFILL,
    RANKS,
    TTL_S,
    ConsumerStage,
    R,
    T,
    about,
    others,
    pin,
    sent,
    unpin,
)
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.p2p import actions, counters, events
from vllm_mooncake_ascend.types import Incarnation, Outcome, TransferId
from vllm_mooncake_ascend.wire import messages
from vllm_mooncake_ascend.wire.steps import PeerRanks, ReadEnded, ReadOrder, Report

HELLO = messages.Hello(incarnation=DECODE, version=messages.PROTOCOL_VERSION)
SUBSCRIBE = messages.Subscribe(**about())
RELEASE = messages.Release(**about())
CANCEL = actions.CancelRead(transfer_id=T, request_id=R)
ORDER = actions.OrderRead(
    order=ReadOrder(
        transfer_id=T,
        request_id=R,
        incarnation=PREFILL,
        first_token=4,
        end_token=10,
        remote_block_ids=(BLOCKS[0][1:],),
        local_block_ids=((2, 3),),
        table_token=4,
    )
)
SUCCESSOR = Incarnation("successor")
UNALLOCATED = ("asking", "pending", "ready")


def read_done(*, ok: bool) -> messages.ReadDone:
    return messages.ReadDone(**about(), ok=ok)


def report(*, ok: bool) -> actions.ReportReceive:
    return actions.ReportReceive(report=Report(request_id=R, ok=ok, block_ids=(2, 3)))


def at(state: str, **settings: Any) -> ConsumerStage:
    """A consumer whose request r is in a state."""
    stage = ConsumerStage(**settings)
    stage.until(state)
    return stage


def remote_tokens(stage: ConsumerStage, num_local_tokens: int = 4) -> int | None:
    return stage.machine.remote_tokens(R, num_local_tokens)


# --- the way it should go --------------------------------------------------------------------------------------------------


def test_a_request_asks_at_once() -> None:
    """Goal: no round trip is wasted. Method: the first request to a producer greets and subscribes."""
    stage = ConsumerStage()

    assert [HELLO, SUBSCRIBE] == sent(stage.arrive())
    assert None is remote_tokens(stage)


def test_a_known_producer_is_not_greeted_again() -> None:
    """Goal: one handshake a peer. Method: a second request after the first one's Welcome."""
    stage = at("ready")

    assert [messages.Subscribe(**about("r2"))] == sent(stage.arrive("r2"))


def test_what_is_remote_is_what_the_offer_has_beyond_the_local_hit() -> None:
    """Goal: the range vLLM is told. Method: hits of several lengths; tokens below the worthwhile count as none."""
    stage = at("ready", min_remote_tokens=3)

    assert [10, 6, 3, 0, 0] == [remote_tokens(stage, num_local) for num_local in (0, 4, 7, 8, 10)]


def test_an_offer_longer_than_the_prompt_is_cut() -> None:
    """Goal: never more tokens than vLLM allows. Method: an offer of twelve tokens for a prompt of ten."""
    stage = ConsumerStage()
    stage.arrive()
    stage.welcome()
    stage.offered("ready", num_tokens=12)

    assert NUM_TOKENS == remote_tokens(stage, 0)


def test_allocated_blocks_are_pinned_and_read() -> None:
    """Goal: pin first, then the layout, then the order. Method: blocks for a request with a local prefix."""
    stage = at("ready")

    shared = actions.ShareLayout(peer=PeerRanks(incarnation=PREFILL, ranks=RANKS))
    assert [pin(2, 3), shared, ORDER] == stage.allocate()


def test_a_layout_is_shared_once() -> None:
    """Goal: workers plan a peer once. Method: a second request of the same peer."""
    stage = at("reading")
    stage.arrive("r2")
    stage.offered("ready", "r2")

    assert ["PinBlocks", "OrderRead"] == [type(action).__name__ for action in stage.allocate(request_id="r2")]


def test_a_read_is_reported_after_the_producers_word() -> None:
    """Goal: no bytes are used before it is certain whose they are. Method: all ranks done, then held."""
    stage = at("reading")

    assert [read_done(ok=True)] == sent(stage.rank_ended(Outcome.DONE))
    assert [unpin(2, 3), report(ok=True)] == stage.verdict(held=True)
    assert {(counters.LOADS_DONE, counters.HELD): 1} == {
        key: count for key, count in stage.counts.items() if key[0] == counters.LOADS_DONE
    }


def test_every_rank_must_have_read() -> None:
    """Goal: no rank is forgotten. Method: two ranks, one after the other, one of them twice."""
    stage = at("reading", num_ranks=2)

    assert [] == stage.rank_ended(Outcome.DONE, rank=0)
    assert [] == stage.rank_ended(Outcome.DONE, rank=0)
    assert [read_done(ok=True)] == sent(stage.rank_ended(Outcome.DONE, rank=1))


def test_after_the_load_nothing_is_remote_any_more() -> None:
    """Goal: a preempted request computes locally. Method: vLLM's second call after promotion, then its question again."""
    stage = at("confirming")
    stage.verdict(held=True)

    assert [] == stage.allocate(0)
    assert 0 == remote_tokens(stage, 0)
    assert [] == stage.end_request()


def test_a_full_local_hit_releases_the_transfer() -> None:
    """Goal: prefill's blocks are freed at once. Method: vLLM allocates without remote tokens."""
    stage = at("ready")

    assert [RELEASE] == stage_sent(stage.allocate(0))
    assert 0 == remote_tokens(stage)


def stage_sent(done: list[Any]) -> list[Any]:
    """Messages, when there is nothing else."""
    assert [] == others(done)
    return sent(done)


def test_leases_are_renewed_until_the_verdict() -> None:
    """Goal: a queueing or reading request loses nothing. Method: one renewal names both, at a fifth of the ttl."""
    stage = at("reading")
    stage.arrive("r2")
    stage.offered("ready", "r2")

    renewals = [message for message in sent(stage.wait(TTL_S / limits.RENEWALS_PER_TTL)) if isinstance(message, messages.Renew)]

    assert [((T, "r"), (T, "r2"))] == [renewal.transfers for renewal in renewals]


def test_a_pending_request_asks_again_at_each_renewal() -> None:
    """Goal: a lost Offer costs seconds, not the transfer. Method: the news of the prefill's end never came."""
    stage = at("pending")
    stage.welcome()

    assert SUBSCRIBE in sent(stage.wait(TTL_S / limits.RENEWALS_PER_TTL))


def test_the_end_of_a_read_nobody_ordered_means_nothing() -> None:
    """Goal: late and repeated ends do no harm. Method: of a stranger, before the order, and of another transfer."""
    stage = at("ready")
    of_another = ReadEnded(
        transfer_id=TransferId("another"),
        request_id=R,
        rank=0,
        outcome=Outcome.DONE,
        reason="",
        num_bytes=0,
        num_descriptors=0,
        seconds=0.0,
    )

    assert [] == stage.rank_ended(Outcome.DONE, request_id="stranger")
    assert [] == stage.rank_ended(Outcome.DONE)
    stage.allocate()
    assert [] == stage.feed(events.RankReadEnded(ended=of_another))
    assert 3 == stage.counts[counters.MESSAGES_IGNORED, counters.NOBODY_ASKED]


def test_requests_that_vllm_holds_back_for_us_are_counted() -> None:
    """Goal: the shell knows when waiting is for us. Method: one request waits, one reads, one is aborted while it reads."""
    stage = at("reading")
    for request_id in ("aborted", "waiting"):
        stage.arrive(request_id)
        stage.offered("ready", request_id)
    stage.allocate(request_id="aborted")
    stage.end_request("aborted")

    assert 3 == stage.machine.num_loads
    stage.rank_ended(Outcome.FAILED, request_id="aborted")
    stage.rank_ended(Outcome.FAILED)
    stage.end_request("waiting")
    assert 0 == stage.machine.num_loads


def test_ranks_are_awaited_from_the_whole_order_to_their_last_end() -> None:
    """Goal: an engine waits where the next news will be. Method: the states before, a read of two ranks, the verdict after."""
    assert [False] * 3 == [at(state).machine.awaits_ranks for state in UNALLOCATED]
    stage = at("reading", num_ranks=2)
    assert stage.machine.awaits_ranks
    stage.rank_ended(Outcome.DONE)
    assert stage.machine.awaits_ranks
    stage.rank_ended(Outcome.DONE, rank=1)
    assert not stage.machine.awaits_ranks


def test_a_read_that_was_given_up_is_not_awaited() -> None:
    """Goal: nobody waits for it any more. Method: abort while reading; no rank has ended."""
    stage = at("reading")
    stage.end_request()
    assert not stage.machine.awaits_ranks


# --- refused ---------------------------------------------------------------------------------------------------------------


def test_params_of_another_prompt_are_not_asked_for() -> None:
    """Goal: a prompt list copies one dict to every prompt. Method: another digest in the params."""
    stage = ConsumerStage()

    assert [] == stage.arrive(digest=b"another")
    assert 0 == remote_tokens(stage)


@pytest.mark.parametrize("state", ["pending", "ready"])
def test_an_offer_of_another_prompt_is_released(state: str) -> None:
    """Goal: never another prompt's KV. Method: the digest comes with the offer, pending or ready."""
    stage = at("asking")
    stage.welcome()

    assert [RELEASE] == stage_sent(stage.offered(state, prompt_digest=b"another"))
    assert 0 == remote_tokens(stage)
    assert 1 == stage.counts[counters.LOADS_FAILED, counters.OTHER_PROMPT]


def test_a_ready_offer_without_a_digest_is_refused() -> None:
    """Goal: no digest is no proof. Method: a ready offer with an empty one."""
    stage = at("asking")
    stage.welcome()

    assert [RELEASE] == stage_sent(stage.offered("ready", prompt_digest=b""))


@pytest.mark.parametrize("block_ids", [(), ((5, 6),), ((5, 6, 7), (8,))])
def test_an_offer_that_makes_no_sense_is_refused(block_ids: events.BlockTable) -> None:
    """Goal: a peer's nonsense costs a transfer, not an engine. Method: missing blocks, missing or surplus groups."""
    stage = at("asking")
    stage.welcome()

    assert [RELEASE] == stage_sent(stage.offered("ready", block_ids=block_ids))
    assert 1 == stage.counts[counters.LOADS_FAILED, counters.OFFER_INVALID]


def test_an_incompatible_producer_is_refused_with_all_differences() -> None:
    """Goal: the operator reads what differs, once. Method: another model; then a second request to the same peer."""
    stage = at("pending")

    assert [RELEASE] == stage_sent(stage.welcome(model="other"))
    assert [messages.Release(**about("r2"))] == stage_sent(stage.arrive("r2"))
    assert 1 == len([note for note in stage.notes if "model: m here, other there" in note])


def test_a_transfer_of_our_own_is_computed_locally() -> None:
    """Goal: an engine neither waits for itself nor holds blocks for itself. Method: params that name our incarnation; our own
    producer is told as any other."""
    stage = ConsumerStage()

    release = messages.Release(incarnation=DECODE, expected=DECODE, transfer_id=T, request_id=R)
    assert [HELLO, release] == stage_sent(stage.arrive(incarnation=DECODE))
    assert 0 == remote_tokens(stage)


def test_a_request_that_arrives_twice_is_one_request() -> None:
    """Goal: events that come twice do no harm. Method: arrive again while it is read."""
    stage = at("reading")

    assert [] == stage.arrive()
    assert [read_done(ok=True)] == sent(stage.rank_ended(Outcome.DONE))


def test_peers_are_bounded() -> None:
    """Goal: hostile params cannot open sockets without end. Method: one engine more than may be known, all in use."""
    stage = ConsumerStage()
    for number in range(limits.MAX_PEERS):
        stage.arrive(f"r{number}", incarnation=Incarnation(f"i{number}"))

    assert [] == stage.arrive("one too many", incarnation=Incarnation("one too many"))
    assert 0 == stage.machine.remote_tokens("one too many", 0)


# --- failures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", UNALLOCATED)
def test_a_transfer_that_is_gone_is_computed_locally(state: str) -> None:
    """Goal: policy recompute. Method: Gone before blocks are allocated; the release is for a later announcement."""
    stage = at(state)

    assert [RELEASE] == stage_sent(stage.gone())
    assert 0 == remote_tokens(stage)


@pytest.mark.parametrize("state", UNALLOCATED)
def test_under_policy_fail_a_lost_transfer_is_doomed(state: str) -> None:
    """Goal: vLLM fails the request by its own policy. Method: Gone, then vLLM allocates as it was told."""
    stage = at(state, fail_on_load_error=True)
    stage.gone()

    assert 6 == remote_tokens(stage)
    assert [report(ok=False)] == stage.allocate()
    assert 0 == remote_tokens(stage)


def test_a_transfer_lost_between_question_and_allocation_is_reported_once() -> None:
    """Goal: vLLM waits for a report from its allocation on. Method: Gone in that moment."""
    stage = at("ready")
    stage.gone()

    assert [report(ok=False)] == stage.allocate()
    assert [] == stage.end_request()


def test_an_allocation_beyond_the_offer_is_reported_failed() -> None:
    """Goal: only offered tokens are read. Method: seven tokens where six are offered."""
    stage = at("ready")

    assert [report(ok=False)] == others(stage.allocate(7))


def test_an_allocation_for_a_stranger_is_reported_failed() -> None:
    """Goal: vLLM never waits for nobody. Method: blocks with remote tokens for a request that never arrived."""
    assert [report(ok=False)] == ConsumerStage().allocate()


@pytest.mark.parametrize("state", ["asking", "pending"])
def test_an_allocation_before_our_answer_is_reported_failed(state: str) -> None:
    """Goal: vLLM is never left waiting. Method: it allocates though it was told to ask again."""
    stage = at(state)

    done = stage.allocate()

    assert ([RELEASE], [report(ok=False)]) == (sent(done), others(done))


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.FAILED])
def test_a_failed_read_is_reported_at_once(outcome: Outcome) -> None:
    """Goal: nothing can land any more, so nobody waits. Method: the only rank fails."""
    done = at("reading").rank_ended(outcome)

    assert [read_done(ok=False)] == sent(done)
    assert [unpin(2, 3), report(ok=False)] == others(done)


def test_one_failed_rank_stops_the_others() -> None:
    """Goal: no bytes are moved in vain, and none lands after the report. Method: one of two ranks fails."""
    stage = at("reading", num_ranks=2)

    failed = stage.rank_ended(Outcome.FAILED, rank=0)
    ended = stage.rank_ended(Outcome.DONE, rank=1)

    assert [CANCEL] == others(failed)
    assert [unpin(2, 3), report(ok=False)] == ended


def test_an_unknown_read_keeps_its_blocks_through_the_quarantine() -> None:
    """Goal: late bytes hit nobody. Method: report at once, unpin when nothing can land any more."""
    stage = at("reading")

    assert [report(ok=False)] == others(stage.rank_ended(Outcome.UNKNOWN))
    stage.verdict(held=True)
    assert (2, 2) == (stage.machine.num_quarantined_blocks, stage.machine.num_pinned_blocks)
    stage.end_request()
    assert [] == others(stage.wait(limits.QUARANTINE_S - 0.001))
    assert [unpin(2, 3)] == others(stage.wait(limits.QUARANTINE_S))


def test_before_vllm_0_30_the_report_waits_with_the_quarantine() -> None:
    """Goal: vLLM would compute into the same blocks. Method: UNKNOWN where a report frees nothing."""
    stage = at("reading", can_report_unknown_at_once=False)

    assert [] == others(stage.rank_ended(Outcome.UNKNOWN))
    stage.verdict(held=True)
    assert [unpin(2, 3), report(ok=False)] == others(stage.wait(limits.QUARANTINE_S))


def test_a_read_whose_lease_was_lost_is_reported_failed() -> None:
    """Goal: an expired lease is never read as right. Method: Verdict(lost)."""
    assert [unpin(2, 3), report(ok=False)] == at("confirming").verdict(held=False)


def test_a_verdict_for_another_request_decides_nothing() -> None:
    """Goal: n>1 children are judged each for itself. Method: the verdict of the other child."""
    assert [] == at("confirming").verdict("r2", held=True)


def test_a_verdict_that_comes_twice_reports_once() -> None:
    """Goal: EngineCore dies of a second report. Method: held twice."""
    stage = at("confirming")
    stage.verdict(held=True)

    assert [] == stage.verdict(held=True)


def test_a_prefill_that_takes_too_long_is_given_up() -> None:
    """Goal: a bounded wait for an engine that goes on answering. Method: acknowledge renewals until the time is over."""
    stage = at("pending")
    stage.welcome()
    while stage.now < limits.OFFER_WAIT_S - 1.0:
        answer_renewals(stage, stage.wait(stage.now + 1.0))
        stage.offered("pending")

    done = stage.wait(limits.OFFER_WAIT_S)

    assert RELEASE in sent(done)
    assert 0 == remote_tokens(stage)


@pytest.mark.parametrize(("fails", "expected"), [(False, 0), (True, 6)])
def test_a_producer_that_answers_all_but_us_is_given_up(fails: bool, expected: int) -> None:
    """Goal: the deadline holds for a Subscribe that is never answered. Method: only Welcome comes, again and again."""
    stage = at("asking", fail_on_load_error=fails)
    while stage.now < limits.OFFER_WAIT_S:
        stage.wait(stage.now + 1.0)
        stage.welcome()

    assert expected == remote_tokens(stage)


def answer_renewals(stage: ConsumerStage, done: list[Any]) -> None:
    for message in sent(done):
        if isinstance(message, messages.Renew):
            stage.hear(messages.Renewed(incarnation=PREFILL, sequence=message.sequence, gone=()))


def test_a_renewal_that_is_gone_ends_a_waiting_request() -> None:
    """Goal: a lost Gone is made up for. Method: Renewed lists the transfer."""
    stage = at("ready")
    (renewal,) = [message for message in sent(stage.wait(6.0)) if isinstance(message, messages.Renew)]

    stage.hear(messages.Renewed(incarnation=PREFILL, sequence=renewal.sequence, gone=((T, R),)))

    assert 0 == remote_tokens(stage)


# --- peers that fall silent, restart or leave ------------------------------------------------------------------------------


def test_messages_are_repeated_until_answered() -> None:
    """Goal: a lost message costs half a second. Method: no answer for a second."""
    stage = at("asking")

    assert [HELLO, SUBSCRIBE] * 2 == sent(stage.wait(2 * limits.RESEND_S))


@pytest.mark.parametrize("state", UNALLOCATED)
def test_a_silent_peer_is_lost(state: str) -> None:
    """Goal: no request waits for the dead. Method: silence, from a state in which something was asked or is renewed."""
    stage = at(state)

    done = stage.wait(TTL_S / limits.RENEWALS_PER_TTL + limits.PEER_ANSWER_S + 1.0)

    assert [actions.ClosePeer(peer=ADDRESS)] == others(done)[:1]
    assert 0 == remote_tokens(stage)


def test_one_sign_of_life_ends_the_silence() -> None:
    """Goal: a lost message is no lost peer. Method: an answer after four seconds, then three more of silence."""
    stage = at("asking")
    stage.wait(4.0)
    stage.welcome()

    stage.wait(7.0)

    assert None is remote_tokens(stage)


def test_whoever_was_stopped_himself_gives_the_peer_a_chance() -> None:
    """Goal: a suspended engine does not take its own silence for the peer's. Method: a leap of a minute, four requests."""
    stage = at("asking")
    for number in range(3):
        stage.arrive(f"r{number}")
    stage.now = 60.0

    done = stage.feed(events.TimerFired())

    assert [HELLO, SUBSCRIBE] == sent(done)[:2]
    assert None is remote_tokens(stage)


@pytest.mark.parametrize("state", UNALLOCATED)
def test_a_restarted_peer_fails_its_requests_at_once(state: str) -> None:
    """Goal: a new engine on the port is noticed at its first word. Method: Welcome of another incarnation."""
    stage = at(state)

    stage.welcome(SUCCESSOR)

    assert 0 == remote_tokens(stage)
    assert [HELLO, messages.Subscribe(**about("r2") | {"expected": SUCCESSOR})] == sent(
        stage.arrive("r2", incarnation=SUCCESSOR)
    )


def test_a_restarted_peer_stops_reads_and_forgets_the_layout() -> None:
    """Goal: nothing of the old engine is used again. Method: Welcome of another incarnation while reading."""
    done = at("reading").welcome(SUCCESSOR)

    assert [actions.ForgetLayout(incarnation=PREFILL), actions.ClosePeer(peer=ADDRESS), CANCEL] == done


def test_a_late_welcome_of_the_replaced_engine_means_nothing() -> None:
    """Goal: the old engine's last words do not unseat the new one. Method: they arrive after the successor is known."""
    stage = at("ready")
    stage.welcome(SUCCESSOR)
    stage.arrive("r2", incarnation=SUCCESSOR)
    stage.welcome(SUCCESSOR)

    stage.welcome(PREFILL)

    assert None is stage.machine.remote_tokens("r2", 0)


@pytest.mark.parametrize("lost", ["disconnected", "goodbye"])
def test_a_peer_that_leaves_fails_its_requests_at_once(lost: str) -> None:
    """Goal: no deadline is waited out for what is known. Method: a broken socket, a Goodbye."""
    stage = at("ready")

    if lost == "disconnected":
        stage.feed(events.PeerDisconnected(peer=ADDRESS, reason="broken"))
    else:
        stage.hear(messages.Goodbye(incarnation=PREFILL, reason="shutdown"))

    assert 0 == remote_tokens(stage)
    assert 1 == stage.counts[counters.PEERS_LOST, lost]


def test_a_read_under_way_is_stopped_when_its_peer_is_lost() -> None:
    """Goal: reported only when no rank can write any more. Method: the peer breaks off, the rank ends later."""
    stage = at("reading")

    stopped = stage.feed(events.PeerDisconnected(peer=ADDRESS, reason="broken"))
    ended = stage.rank_ended(Outcome.DONE)

    assert CANCEL in stopped
    assert [unpin(2, 3), report(ok=False)] == ended


def test_an_idle_peer_is_forgotten() -> None:
    """Goal: sockets and layouts do not pile up. Method: one load, then a long time of nothing."""
    stage = at("confirming")
    stage.verdict(held=True)
    stage.end_request()

    done = stage.wait(limits.PEER_IDLE_S)

    assert [actions.ForgetLayout(incarnation=PREFILL), actions.ClosePeer(peer=ADDRESS)] == done
    assert (0, None) == (stage.machine.num_peers, stage.machine.next_timer())


# --- the time rule ---------------------------------------------------------------------------------------------------------


def test_an_unanswered_confirmation_is_decided_by_the_time_rule() -> None:
    """Goal: a producer that dies after the read costs nothing. Method: the read ended within a sure lease."""
    stage = at("confirming")

    done = stage.wait(limits.PEER_ANSWER_S)

    assert [unpin(2, 3), report(ok=True)] == others(done)[:2]
    assert 1 == stage.counts[counters.LOADS_DONE, counters.TIME_RULE]


def test_the_time_rule_trusts_no_lease_beyond_the_last_sign_of_life() -> None:
    """Goal: another engine may have taken the port. Method: the read ends just beyond what a restart takes at least."""
    stage = at("reading")
    stage.now = limits.ENGINE_RESTART_MIN_S + 0.001
    stage.rank_ended(Outcome.DONE)

    assert [unpin(2, 3), report(ok=False)] == others(stage.wait(stage.now + limits.PEER_ANSWER_S))[:2]


def test_the_time_rule_counts_acknowledged_renewals_from_their_sending() -> None:
    """Goal: a renewal counts once it is answered, and from when it was sent. Method: an answer, then a read that ends."""
    stage = at("reading")
    answer_renewals(stage, stage.wait(6.0))
    stage.now = 6.0 + limits.ENGINE_RESTART_MIN_S
    stage.rank_ended(Outcome.DONE)

    assert report(ok=True) in stage.wait(stage.now + limits.PEER_ANSWER_S)


def test_the_time_rule_does_not_count_lost_renewals() -> None:
    """Goal: what prefill never heard extends nothing. Method: the same without the answer."""
    stage = at("reading")
    stage.wait(6.0)
    stage.rank_ended(Outcome.DONE)

    assert report(ok=False) in stage.wait(stage.now + limits.PEER_ANSWER_S)


def test_a_verdict_that_lay_unread_while_we_were_stopped_still_counts() -> None:
    """Goal: our own pause does not cost the load. Method: a leap past the deadline and the rule, then the verdict."""
    stage = at("reading")
    stage.now = limits.ENGINE_RESTART_MIN_S + 1.0
    stage.rank_ended(Outcome.DONE)
    stage.now += 60.0

    assert [] == others(stage.feed(events.TimerFired()))
    assert [unpin(2, 3), report(ok=True)] == stage.verdict(held=True)


def test_our_own_pause_is_forgiven_once() -> None:
    """Goal: a bounded wait all the same. Method: a leap past the deadline, and no verdict."""
    stage = at("confirming")
    stage.now += 60.0
    stage.feed(events.TimerFired())

    assert [unpin(2, 3), report(ok=True)] == others(stage.wait(stage.now + 2 * limits.RESEND_S))[:2]


def test_a_restart_while_confirming_is_failed_without_the_time_rule() -> None:
    """Goal: a read that may have met the successor's memory is not used. Method: Welcome of another incarnation."""
    done = at("confirming").welcome(SUCCESSOR)

    assert report(ok=False) in done


# --- aborts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", UNALLOCATED)
def test_an_abort_before_allocation_releases(state: str) -> None:
    """Goal: a client that left costs prefill nothing. Method: the request ends while it waits."""
    assert [RELEASE] == stage_sent(at(state).end_request())


def test_a_farewell_is_repeated_until_it_is_answered() -> None:
    """Goal: a lost Release does not hold blocks for a ttl. Method: no answer, then the verdict."""
    stage = at("ready")
    stage.end_request()

    assert [RELEASE] == sent(stage.wait(limits.RESEND_S))
    stage.verdict(held=True)
    assert [] == stage.wait(TTL_S)


def test_farewells_that_pile_up_are_said_once() -> None:
    """Goal: bounded memory. Method: more requests leave than farewells are repeated for; none of it is answered."""
    stage = at("asking")
    stage.welcome()
    for number in range(limits.MAX_UNANSWERED + 10):
        stage.arrive(f"r{number}")
        stage.end_request(f"r{number}")

    assert limits.MAX_UNANSWERED == len(sent(stage.wait(stage.now + limits.RESEND_S)))


def test_an_aborted_read_is_reported_when_the_ranks_have_ended() -> None:
    """Goal: vLLM keeps the blocks until told; told once, and not early. Method: abort while reading."""
    stage = at("reading")

    aborted = stage.end_request()
    ended = stage.rank_ended(Outcome.FAILED)

    assert [RELEASE] == sent(aborted)
    assert [CANCEL] == others(aborted)
    assert [unpin(2, 3), report(ok=False)] == ended
    assert 0 == stage.machine.num_loads


def test_an_abort_while_confirming_is_reported_at_once() -> None:
    """Goal: nobody needs the verdict any more, but prefill the news. Method: abort, then the verdict comes."""
    stage = at("confirming")

    assert [unpin(2, 3), report(ok=False)] == stage.end_request()
    assert [read_done(ok=True)] == sent(stage.wait(limits.RESEND_S))
    assert [] == stage.verdict(held=True)


# --- ranks that do not end -------------------------------------------------------------------------------------------------


def overdue(stage: ConsumerStage) -> list[Any]:
    """Let every bound of a read pass, with the producer answering."""
    done = []
    bound_s = limits.READ_WAIT_S + 2 * (limits.ENGINE_CALL_S + limits.RANK_ANSWER_S)
    while stage.now < bound_s:
        step = stage.wait(stage.now + 1.0)
        answer_renewals(stage, step)
        if any(isinstance(message, messages.ReadDone) for message in sent(step)):
            stage.verdict(held=False)
        done += step
    return others(done)


def test_an_overdue_rank_is_cancelled_and_its_blocks_stay() -> None:
    """Goal: the request goes on with other blocks, these stay out of reach. Method: a rank that ends after all bounds."""
    stage = at("reading")

    assert [CANCEL, report(ok=False)] == overdue(stage)
    assert [] == stage.allocate(0)
    assert [unpin(2, 3)] == stage.rank_ended(Outcome.FAILED)


def test_an_overdue_rank_is_waited_for_where_a_report_frees_nothing() -> None:
    """Goal: no waiting turns silence into an end. Method: the same before vLLM 0.30."""
    stage = at("reading", can_report_unknown_at_once=False)

    assert [CANCEL] == overdue(stage)
    assert [unpin(2, 3), report(ok=False)] == stage.rank_ended(Outcome.FAILED)
