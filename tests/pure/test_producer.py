"""Producer: given these events, exactly these actions. What must hold under every order of events is the simulator's."""

from __future__ import annotations

from tests.pure.stage import (
    BLOCKS,
    PREFILL,
    TTL_S,
    ProducerStage,
    T,
    about,
    offer,
    others,
    pin,
    sent,
    told_gone,
    unpin,
    verdicts,
)
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.p2p import actions, counters, events
from vllm_mooncake_ascend.types import Incarnation, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages


def leased(**settings: object) -> ProducerStage:
    """A producer whose transfer t is leased, with reader r subscribed while the prefill ran."""
    stage = ProducerStage(**settings)
    stage.announce()
    stage.subscribe()
    stage.end_prefill()
    return stage


# --- the way it should go --------------------------------------------------------------------------------------------------


def test_a_transfer_is_named_as_the_proxy_wished() -> None:
    """Goal: concurrent legs meet under one id. Method: announce with a wanted id."""
    assert [actions.NameTransfer(request_id=RequestId("p"), transfer_id=T)] == ProducerStage().announce()


def test_a_transfer_without_a_wish_is_named_freshly() -> None:
    """Goal: routers that mint no id are served. Method: announce without one."""
    expected = [actions.NameTransfer(request_id=RequestId("p"), transfer_id=TransferId("fresh"))]
    assert expected == ProducerStage().announce(None)


def test_a_live_id_is_not_given_twice() -> None:
    """Goal: two prompts never share an id. Method: announce the same id for a second request."""
    stage = ProducerStage()
    stage.announce()

    named = stage.announce(T, request_id="p2")

    assert [actions.NameTransfer(request_id=RequestId("p2"), transfer_id=TransferId("fresh"))] == named
    assert 1 == stage.counts[counters.TRANSFERS_RENAMED, ""]


def test_an_ended_id_is_not_given_again_while_it_is_remembered() -> None:
    """Goal: a late message about the old one cannot hit the new one. Method: announce anew after an abort."""
    stage = ProducerStage()
    stage.announce()
    stage.end_prefill(has_kv=False)

    named = stage.announce(T, request_id="p2")

    assert [TransferId("fresh")] == [action.transfer_id for action in named]


def test_a_reader_is_offered_the_blocks_when_the_prefill_ends() -> None:
    """Goal: pin, then tell. Method: subscribe while it runs, then end."""
    stage = ProducerStage()
    stage.announce()
    pending = stage.subscribe()

    done = stage.end_prefill()

    assert [offer("pending")] == sent(pending)
    assert [pin(5, 6, 7)] == others(done)
    assert [offer("ready")] == sent(done)


def test_a_read_that_is_confirmed_frees_the_blocks() -> None:
    """Goal: blocks are kept not a moment longer than needed. Method: the only reader says it has read."""
    stage = leased()

    done = stage.read_done()

    assert [unpin(5, 6, 7)] == others(done)
    assert [True] == verdicts(done)
    assert (0, 0, 0) == (stage.machine.num_leases, stage.machine.num_pinned_blocks, stage.machine.num_waiting_readers)


def test_a_confirmation_is_answered_alike_each_time() -> None:
    """Goal: a lost verdict costs nothing. Method: say ReadDone three times, the last time just before it is forgotten."""
    stage = leased()
    stage.read_done()

    assert [True] == verdicts(stage.read_done())
    stage.wait(limits.VERDICT_MEMORY_S - 1.0)
    assert [True] == verdicts(stage.read_done())


def test_a_forgotten_transfer_is_lost() -> None:
    """Goal: no held from ignorance. Method: say ReadDone after the memory has gone."""
    stage = leased()
    stage.read_done()

    stage.wait(limits.VERDICT_MEMORY_S + 1.0)

    assert [False] == verdicts(stage.read_done())
    assert None is stage.machine.next_timer()


def test_the_first_of_two_readers_does_not_free() -> None:
    """Goal: n>1 children read one transfer. Method: one reads, then the other."""
    stage = ProducerStage()
    stage.announce()
    stage.subscribe("r1")
    stage.subscribe("r2")
    stage.end_prefill()

    assert [] == others(stage.read_done("r1"))
    assert [unpin(5, 6, 7)] == others(stage.read_done("r2"))


def test_a_reader_may_come_after_the_prefill_ended() -> None:
    """Goal: routers that know only one leg after the other. Method: subscribe to a lease."""
    stage = ProducerStage()
    stage.announce()
    stage.end_prefill()

    assert [offer("ready")] == sent(stage.subscribe())


def test_the_null_block_is_never_pinned() -> None:
    """Goal: block 0 belongs to nobody. Method: a table with holes, as sliding windows make them."""
    stage = ProducerStage()
    stage.announce()

    assert [pin(6)] == others(stage.end_prefill(block_ids=((0, 6, 0),)))


# --- before the prefill is announced ---------------------------------------------------------------------------------------


def test_an_early_reader_waits_and_is_offered() -> None:
    """Goal: decode's leg may overtake prefill's. Method: subscribe, then announce."""
    stage = ProducerStage()

    early = stage.subscribe()
    announced = stage.announce()

    assert [offer("pending", prompt_digest=b"")] == sent(early)
    assert [offer("pending")] == sent(announced)


def test_an_early_reader_hears_gone_when_nothing_comes() -> None:
    """Goal: waiting is bounded. Method: let the patience pass."""
    stage = ProducerStage()
    stage.subscribe()

    assert ["r"] == told_gone(stage.wait(limits.UNKNOWN_TRANSFER_WAIT_S))
    stage.wait(1_000.0)
    assert None is stage.machine.next_timer()


def test_a_release_before_the_announcement_frees_at_the_end() -> None:
    """Goal: a client that left before admission costs no blocks. Method: release, announce, end."""
    stage = ProducerStage()
    stage.release("")
    stage.announce()

    done = stage.end_prefill()

    assert [] == done
    assert 0 == stage.machine.num_leases


def test_an_early_release_is_remembered_for_a_while() -> None:
    """Goal: neither forgotten at once nor for ever. Method: announce just before and just after it is forgotten."""
    for waited_s, num_leases in ((limits.VERDICT_MEMORY_S - 1.0, 0), (limits.VERDICT_MEMORY_S + 1.0, 1)):
        stage = ProducerStage()
        stage.wait(1_000.0)
        stage.release()
        stage.wait(1_000.0 + waited_s)
        stage.announce()
        stage.end_prefill()
        assert num_leases == stage.machine.num_leases


def test_early_readers_are_bounded_per_engine() -> None:
    """Goal: no peer fills the table with ids nobody announced. Method: one more than it may have."""
    stage = ProducerStage()
    for number in range(limits.MAX_AWAITED_PER_READER):
        stage.subscribe(transfer_id=f"t{number}")

    assert ["r"] == told_gone(stage.subscribe(transfer_id="one too many"))


def test_early_releases_are_bounded_per_engine() -> None:
    """Goal: the same for releases: answered, not remembered. Method: one more than it may have, then announce it."""
    stage = ProducerStage()
    for number in range(limits.MAX_AWAITED_PER_READER):
        stage.release(transfer_id=f"t{number}")

    assert [False] == verdicts(stage.release(transfer_id="one too many"))
    stage.announce("one too many")
    stage.end_prefill()
    assert 1 == stage.machine.num_leases


def test_a_full_table_forgets_the_oldest_ended_and_refuses_when_none_has() -> None:
    """Goal: bounded memory. Method: fill the table, one transfer ended among all that run; then two more."""
    stage = ProducerStage()
    for number in range(limits.MAX_TRANSFERS):
        stage.announce(None, request_id=f"p{number}", fresh_id=f"t{number}")
    stage.end_prefill("p7", has_kv=False)

    assert 1 == len(stage.announce(None, request_id="more", fresh_id="more"))
    assert 0 == len(stage.announce(None, request_id="too many", fresh_id="too many"))
    assert [] == stage.end_prefill("too many")


def test_a_transfer_has_a_bounded_number_of_readers() -> None:
    """Goal: a fleet cannot read one transfer. Method: one more than it may have."""
    stage = ProducerStage()
    stage.announce()
    for number in range(limits.MAX_READERS_PER_TRANSFER):
        stage.subscribe(f"r{number}")

    assert ["one too many"] == told_gone(stage.subscribe("one too many"))


def test_releases_of_one_transfer_are_bounded_too() -> None:
    """Goal: no table grows by messages. Method: one release more than readers are remembered; it is answered all the same."""
    stage = ProducerStage()
    stage.announce()
    for number in range(limits.MAX_READERS_PER_TRANSFER):
        stage.subscribe(f"r{number}")

    assert [False] == verdicts(stage.release("one too many"))
    assert limits.MAX_READERS_PER_TRANSFER == stage.machine.num_waiting_readers
    stage.release("r0")
    assert [False] == verdicts(stage.release("still too many"))
    assert ["still too many"] == told_gone(stage.subscribe("still too many"))


# --- leases ----------------------------------------------------------------------------------------------------------------


def test_a_lease_nobody_reads_expires() -> None:
    """Goal: a decode engine that died frees the blocks. Method: let the ttl pass, to the moment."""
    stage = ProducerStage()
    stage.announce()
    stage.end_prefill()

    assert [] == stage.wait(TTL_S - 0.001)
    assert [unpin(5, 6, 7)] == stage.wait(TTL_S)
    assert 1 == stage.counts[counters.LEASES_ENDED, counters.EXPIRED]


def test_an_acknowledged_renewal_is_worth_one_ttl() -> None:
    """Goal: a queueing reader loses nothing. Method: renew once, late."""
    stage = leased()
    stage.wait(29.0)

    renewed = stage.renew(4)

    assert [messages.Renewed(incarnation=PREFILL, sequence=4, gone=())] == sent(renewed)
    assert [] == stage.wait(58.999)
    assert [unpin(5, 6, 7)] == others(stage.wait(59.0))


def test_no_renewal_outlasts_lease_max() -> None:
    """Goal: no lease lasts for ever. Method: renew when a ttl more would pass the bound."""
    stage = leased(lease_max_s=40.0)
    stage.wait(10.0)
    assert () == sent(stage.renew(1))[0].gone
    stage.wait(10.001)

    renewed = stage.renew(2)

    assert ((T, "r"),) == sent(renewed)[0].gone
    assert [unpin(5, 6, 7)] == others(stage.wait(40.0))


def test_a_new_reader_that_could_not_be_promised_a_ttl_is_refused() -> None:
    """Goal: whoever is offered blocks may trust them for a ttl. Method: subscribe near the end of another's lease."""
    stage = leased(lease_max_s=40.0)
    stage.wait(9.0)
    stage.renew(1)
    stage.wait(11.0)

    assert ["late"] == told_gone(stage.subscribe("late"))


def test_nothing_expires_while_the_prefill_runs() -> None:
    """Goal: a prefill of minutes keeps its readers. Method: an hour passes, then it ends."""
    stage = ProducerStage()
    stage.announce()
    stage.subscribe()

    assert [] == stage.wait(3_600.0)
    assert [offer("ready")] == sent(stage.end_prefill())


def test_a_reader_that_left_is_no_reader_again() -> None:
    """Goal: a late Subscribe does not revive a lease. Method: subscribe, release, subscribe; another reader keeps it."""
    stage = leased()
    stage.subscribe("other")
    stage.release()

    assert ["r"] == told_gone(stage.subscribe())
    assert ((T, "r"),) == sent(stage.renew(1))[0].gone


def test_the_last_release_while_the_prefill_runs_frees_at_its_end() -> None:
    """Goal: nobody is left to wait for. Method: subscribe, release, end."""
    stage = ProducerStage()
    stage.announce()
    stage.subscribe()
    stage.release()

    assert [] == stage.end_prefill()
    assert 0 == stage.machine.num_pinned_blocks


def test_a_prefill_without_kv_says_so_at_once() -> None:
    """Goal: decode does not wait for what cannot come. Method: an aborted prefill with a reader."""
    stage = ProducerStage()
    stage.announce()
    stage.subscribe()

    assert ["r"] == told_gone(stage.end_prefill(has_kv=False))


def test_a_second_end_of_a_prefill_is_ignored() -> None:
    """Goal: events that come twice do no harm. Method: end twice."""
    stage = leased()

    assert [] == stage.end_prefill()


# --- pins ------------------------------------------------------------------------------------------------------------------


def test_pressure_ends_the_oldest_lease_nobody_was_promised() -> None:
    """Goal: the bound on pins holds and the newest KV is kept. Method: a second lease that needs the first one's room."""
    stage = ProducerStage(max_pinned_blocks=4)
    stage.announce()
    stage.end_prefill()
    stage.announce("t2", request_id="p2")

    done = stage.end_prefill("p2", ((8, 9),))

    assert [unpin(5, 6, 7), actions.PinBlocks(transfer_id=TransferId("t2"), block_ids=(8, 9))] == done
    assert 1 == stage.counts[counters.LEASES_ENDED, counters.CAPACITY]


def test_pressure_breaks_no_promise() -> None:
    """Goal: a reader that cannot hear us may trust its lease. Method: the first lease has a reader, the second has no room."""
    stage = leased(max_pinned_blocks=4)
    stage.announce("t2", request_id="p2")

    assert [] == stage.end_prefill("p2", ((8, 9),))
    assert [True] == verdicts(stage.read_done())


def test_a_transfer_larger_than_the_bound_is_not_kept() -> None:
    """Goal: it does not throw out all others in vain. Method: three blocks where two may be pinned."""
    stage = ProducerStage(max_pinned_blocks=2)
    stage.announce("small", request_id="small")
    stage.end_prefill("small", ((9,),))
    stage.announce()
    stage.subscribe()

    done = stage.end_prefill()

    assert ["r"] == told_gone(done)
    assert [] == others(done)


def test_revocation_ends_what_nobody_was_promised() -> None:
    """Goal: reset_cache frees the blocks. Method: a lease without a reader."""
    stage = ProducerStage()
    stage.announce()
    stage.end_prefill()

    assert [unpin(5, 6, 7)] == stage.feed(events.LeasesRevoked(reason="reset"))


def test_revocation_waits_for_readers_that_may_trust_their_lease() -> None:
    """Goal: a reader that cannot hear us never reads reused blocks. Method: revoke under a reader, which then answers."""
    stage = leased()

    revoked = stage.feed(events.LeasesRevoked(reason="reset"))
    answered = stage.read_done()

    assert ["r"] == told_gone(revoked)
    assert [] == others(revoked)
    assert [unpin(5, 6, 7)] == others(answered)
    assert [False] == verdicts(answered)


def test_revocation_waits_no_longer_than_the_promise() -> None:
    """Goal: a dead reader does not hold a reset up for ever. Method: revoke under a reader that never answers."""
    stage = leased()
    stage.feed(events.LeasesRevoked(reason="reset"))

    assert ["r"] == told_gone(stage.subscribe())
    assert [unpin(5, 6, 7)] == others(stage.wait(TTL_S))


# --- others ----------------------------------------------------------------------------------------------------------------


def test_a_message_for_another_incarnation_changes_nothing() -> None:
    """Goal: whoever reached us by an old address learns who we are. Method: all kinds of messages, expected wrong."""
    stage = leased()
    stale = about() | {"expected": Incarnation("before")}
    kinds = (
        messages.Subscribe(**stale),
        messages.ReadDone(**stale, ok=True),
        messages.Release(**stale),
        messages.Renew(incarnation=stale["incarnation"], expected=stale["expected"], sequence=1, transfers=()),
    )

    answers = [sent(stage.say(message)) for message in kinds]

    assert [["Welcome"]] * 4 == [[type(message).__name__ for message in answer] for answer in answers]
    assert 1 == stage.machine.num_leases


def test_a_greeting_of_another_version_is_refused_by_name() -> None:
    """Goal: mixed installations say what is wrong. Method: Hello of another version."""
    (answer,) = sent(ProducerStage().say(messages.Hello(incarnation=Incarnation("d"), version=99)))

    assert isinstance(answer, messages.Goodbye)
    assert "protocol version" in answer.reason


def test_answers_go_where_the_reader_spoke_from_last() -> None:
    """Goal: a reader that reconnected is reached. Method: subscribe by one socket, renew by another, end."""
    stage = ProducerStage()
    stage.announce()
    stage.subscribe()
    stage.say(
        messages.Renew(incarnation=about()["incarnation"], expected=PREFILL, sequence=1, transfers=((T, RequestId("r")),)),
        peer=b"new socket",
    )

    (told,) = [action for action in stage.end_prefill() if isinstance(action, actions.SendToReader)]

    assert (b"new socket", BLOCKS) == (told.peer, told.message.block_ids)
