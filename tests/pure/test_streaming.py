"""Streaming: what the machines of a transfer do while its prefill still runs. Given these events, exactly these actions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pure.stage import (
    BLOCKS,
    PREFILL,
    ConsumerStage,
    ProducerStage,
    R,
    Stage,
    T,
    about,
    offer,
    others,
    pin,
    sent,
    unpin,
    verdicts,
)
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.p2p import actions, counters, events
from vllm_mooncake_ascend.p2p.reader import Reader
from vllm_mooncake_ascend.p2p.settings import ReaderSettings
from vllm_mooncake_ascend.types import Outcome, RequestId
from vllm_mooncake_ascend.wire import messages

RELEASE = messages.Release(**about())
CANCEL = actions.CancelRead(transfer_id=T, request_id=R)


def written(*block_ids: int, generation: int = 0, known: int = 0) -> messages.Offer:
    """An offer of so many whole blocks of a prefill that runs, less those the reader knows."""
    return offer(
        "pending",
        num_tokens=4 * len(block_ids),
        generation=generation,
        block_ids=(block_ids[known:],) if block_ids else (),
        num_known_blocks=(known,) if known else (),
    )


# --- producer --------------------------------------------------------------------------------------------------------------


def running(*, streams: bool = True, reader_streams: bool = True, **settings: Any) -> ProducerStage:
    """A prefill that runs, and one reader."""
    stage = ProducerStage(streams=streams, **settings)
    stage.announce()
    stage.subscribe(streams=reader_streams)
    return stage


def test_progress_is_pinned_once_per_block_and_offered() -> None:
    """Goal: what is offered stays. Method: progress twice, the second time of one block more, then the end."""
    stage = running()

    first, second = stage.progress(5), stage.progress(5, 6)
    ended = stage.end_prefill()

    assert ([pin(5)], [written(5)]) == (others(first), sent(first))
    assert ([pin(6)], [written(5, 6, known=1)]) == (others(second), sent(second))
    assert ([pin(7)], [offer("ready")]) == (others(ended), sent(ended))
    assert [unpin(5), unpin(6), unpin(7)] == others(stage.read_done())


def test_preemption_withdraws_what_was_offered() -> None:
    """Goal: vLLM may reuse the blocks, and readers know. Method: preempt after progress, go on in other blocks."""
    stage = running()
    stage.progress(5)

    preempted = stage.preempt()

    assert ([unpin(5)], [written(generation=1)]) == (others(preempted), sent(preempted))
    assert [written(8, 9, generation=1)] == sent(stage.progress(8, 9))


def test_progress_that_is_told_twice_is_offered_once() -> None:
    """Goal: no message without news. Method: the same progress again."""
    stage = running()
    stage.progress(5)

    assert [] == stage.progress(5)


@pytest.mark.parametrize(("streams", "reader_streams"), [(False, True), (True, False)])
def test_both_sides_must_stream(streams: bool, reader_streams: bool) -> None:
    """Goal: without streaming on either side all comes at the end, and nothing is pinned before. Method: progress, a second
    subscription, the end."""
    stage = running(streams=streams, reader_streams=reader_streams)

    assert [] == stage.progress(5)
    assert [offer("pending")] == sent(stage.subscribe(streams=reader_streams))
    assert [pin(5, 6, 7)] == others(stage.end_prefill())


def test_a_reader_that_comes_later_is_told_what_is_pinned() -> None:
    """Goal: blocks are pinned by the thread that owns them alone: a subscription brings no pins. Method: subscribe after
    progress that nobody wanted, and after progress that somebody did."""
    stage = ProducerStage(streams=True)
    stage.announce()
    stage.progress(5)

    assert [offer("pending")] == stage_sent(stage.subscribe(streams=True))
    stage.progress(5, 6)
    told = stage_sent(stage.subscribe("r2", streams=True))
    assert [(5, 6)] == [message.block_ids[0] for message in told]


def test_each_reader_is_told_what_it_does_not_know() -> None:
    """Goal: a message carries news only, and an answer all. Method: a second reader after two blocks, then a third block; the
    first asks again, then a fourth."""
    stage = running()
    stage.progress(5)
    stage.progress(5, 6)
    stage.subscribe("r2", streams=True)

    third = [(message.block_ids, message.num_known_blocks) for message in sent(stage.progress(5, 6, 7))]
    again = sent(stage.subscribe(streams=True))
    fourth = [(message.block_ids, message.num_known_blocks) for message in sent(stage.progress(5, 6, 7, 8))]

    assert [(((7,),), (2,))] * 2 == third
    assert [written(5, 6, 7)] == again
    assert [(((8,),), (3,))] * 2 == fourth


def test_a_table_of_another_beginning_is_of_another_generation() -> None:
    """Goal: what a reader knows is never joined with other blocks. Method: progress in other blocks."""
    stage = running()
    stage.progress(5)

    elsewhere = stage.progress(8, 9)

    assert [unpin(5), pin(8, 9)] == others(elsewhere)
    assert [written(generation=1), written(8, 9, generation=1)] == sent(elsewhere)


def stage_sent(done: list[Any]) -> list[Any]:
    """Messages, when there is nothing else."""
    assert [] == others(done)
    return sent(done)


def test_progress_takes_no_room_from_leases() -> None:
    """Goal: what is whole comes before what may be. Method: progress beyond the bound, then a lease that fills it, then the
    prefill's own end, for which there is no room."""
    stage = running(max_pinned_blocks=3)
    assert [pin(8, 9, 10, 11)] == others(stage.progress(8, 9, 10, 11))
    stage.announce("t2", request_id="p2")
    stage.subscribe("r2", "t2")

    assert offer("ready", "r2", transfer_id="t2") in sent(stage.end_prefill("p2"))
    assert [unpin(8, 9, 10, 11)] == others(stage.end_prefill(block_ids=((8, 9, 10, 11),)))
    assert (3, 3) == (stage.machine.num_kept_blocks, stage.machine.num_pinned_blocks)


def test_an_aborted_prefill_gives_all_back() -> None:
    """Goal: no pin outlives a prefill without KV. Method: abort after progress."""
    stage = running()
    stage.progress(5, 6)

    assert [unpin(5, 6)] == others(stage.end_prefill(has_kv=False))


def test_who_says_it_has_read_before_the_end_has_lost() -> None:
    """Goal: only the whole is ever held. Method: ReadDone while the prefill runs."""
    stage = running()
    stage.progress(5)

    assert [False] == verdicts(stage.read_done())


# --- consumer --------------------------------------------------------------------------------------------------------------


def at_ready(**settings: Any) -> ConsumerStage:
    """A request that has heard of one whole block of a prefill that runs."""
    stage = ConsumerStage(streams=True, **settings)
    stage.arrive()
    stage.welcome()
    stage.hear(written(5))
    return stage


def orders(done: list[Any]) -> list[tuple[int, int, int, int, bool]]:
    """Part, generation, range and whether it is the last, of each order."""
    found = (action.order for action in done if isinstance(action, actions.OrderRead))
    return [(order.part, order.generation, order.first_token, order.end_token, order.is_last) for order in found]


def test_a_subscription_says_whether_it_streams() -> None:
    """Goal: the producer knows whom to tell. Method: a request of each kind."""
    asked = [sent(ConsumerStage(streams=streams).arrive())[1].streams for streams in (False, True)]
    assert [False, True] == asked


def test_nothing_is_allocated_before_the_prefill_has_begun() -> None:
    """Goal: decode's blocks do not wait for a queue. Method: vLLM's question before and after the first whole block."""
    stage = ConsumerStage(streams=True)
    stage.arrive()
    stage.welcome()
    stage.offered("pending")

    before = stage.machine.remote_tokens(R, 4)
    stage.hear(written(5))

    assert (None, 6) == (before, stage.machine.remote_tokens(R, 4))


def test_parts_follow_the_prefill() -> None:
    """Goal: each token is ordered once, whole blocks until the end. Method: the local hit covers what is written first; then a
    block, the same again, an older offer, the rest."""
    stage = at_ready()

    assert [(0, 0, 4, 4, False)] == orders(stage.allocate())
    assert [(1, 0, 4, 8, False)] == orders(stage.hear(written(5, 6)))
    assert [] == stage.hear(written(5, 6))
    assert [] == stage.hear(written(5))
    assert not stage.machine.awaits_ranks, "the next news is the prefill's"
    assert [(2, 0, 8, 10, True)] == orders(stage.offered("ready"))
    assert stage.machine.awaits_ranks
    assert [messages.ReadDone(**about(), ok=True)] == sent(stage.rank_ended(Outcome.DONE))


def test_offers_of_what_is_new_are_joined() -> None:
    """Goal: a read goes on with each message that carries news only. Method: a block, one more, one that is known in part."""
    stage = at_ready()
    stage.allocate()

    assert [(1, 0, 4, 8, False)] == orders(stage.hear(written(5, 6, known=1)))
    assert [(2, 0, 8, 10, True)] == orders(stage.offered("ready", block_ids=((6, 7),), num_known_blocks=(1,)))


@pytest.mark.parametrize("is_allocated", [False, True])
@pytest.mark.parametrize("unjoined", [written(5, 6, 7, known=2), written(5, 6, known=1, generation=1)])
def test_what_does_not_join_is_asked_for_once(unjoined: messages.Offer, is_allocated: bool) -> None:
    """Goal: a lost message costs a question, never a wrong block. Method: an offer that goes on from a block, or from a
    preemption, that was never told of, twice; then the answer."""
    stage = at_ready()
    if is_allocated:
        stage.allocate()

    assert [messages.Subscribe(**about(), streams=True)] == sent(stage.hear(unjoined))
    assert [] == stage.hear(unjoined)
    assert 2 == stage.counts[counters.MESSAGES_IGNORED, counters.OFFER_GAP]
    answered = stage.hear(written(5, 6))
    part = 1 if is_allocated else 0
    assert [(part, 0, 4, 8, False)] == orders(answered if is_allocated else stage.allocate())


def test_news_do_not_answer_a_question() -> None:
    """Goal: what was lost is asked for until it is told. Method: a gap, then news that came late, then nothing for a while."""
    stage = at_ready()
    stage.hear(written(5, 6, 7, known=2))

    stage.hear(written(5, 6, known=1))

    assert messages.Subscribe(**about(), streams=True) in sent(stage.wait(limits.RESEND_S))


@pytest.mark.parametrize("is_allocated", [False, True])
@pytest.mark.parametrize(
    "lie",
    [
        pytest.param({"num_tokens": 1 << 30, "block_ids": ()}, id="tokens without blocks"),
        pytest.param({"num_tokens": 1 << 30, "block_ids": (), "prompt_digest": b""}, id="nobody's tokens without blocks"),
        pytest.param({"num_tokens": 8, "block_ids": (tuple(range(1, 100)),)}, id="more blocks than tokens"),
        pytest.param({"num_tokens": 8, "block_ids": ((6,),), "num_known_blocks": (1 << 20,)}, id="more known than tokens"),
    ],
)
def test_a_lying_producer_costs_its_own_request(lie: dict[str, Any], is_allocated: bool) -> None:
    """Goal: no message ends the engine, or makes it work for what cannot be. Method: lie before and after the allocation."""
    stage = at_ready()
    if is_allocated:
        stage.allocate()

    done = stage.hear(offer("pending", **lie))

    assert RELEASE in done_messages(done)
    assert is_allocated == (CANCEL in done)
    assert 1 == stage.counts[counters.LOADS_FAILED, counters.OFFER_INVALID]


def done_messages(done: list[Any]) -> list[Any]:
    """What was said to the producer."""
    return [action.message for action in done if isinstance(action, actions.SendToProducer)]


def test_an_order_carries_the_blocks_of_its_part() -> None:
    """Goal: what workers are told grows with the prompt, not its square. Method: the tables of each part."""
    stage = at_ready()
    done = [stage.allocate(), stage.hear(written(5, 6, known=1)), stage.offered("ready")]

    parts = [one.order for some in done for one in some if isinstance(one, actions.OrderRead)]
    tables = [(part.table_token, part.remote_block_ids, part.local_block_ids) for part in parts]
    assert [(4, (), ()), (4, ((6,),), ((2,),)), (8, ((7,),), ((3,),))] == tables


def test_after_a_preemption_all_is_read_again() -> None:
    """Goal: bytes of blocks that were taken away are not kept. Method: preempt after a part, lose the news, hear of the end."""
    stage = at_ready()
    stage.allocate()
    stage.hear(written(5, 6))

    assert [(2, 1, 4, 10, True)] == orders(stage.offered("ready", generation=1, block_ids=((8, 9, 10),)))
    assert 1 == stage.counts[counters.READS_BEGUN_AGAIN, ""]


def test_a_preemption_before_the_allocation_changes_nothing_for_vllm() -> None:
    """Goal: an answer once given stands. Method: preempt between the question and the allocation."""
    stage = at_ready()
    stage.hear(written(generation=1))

    assert 6 == stage.machine.remote_tokens(R, 4)
    assert [(0, 1, 4, 4, False)] == orders(stage.allocate())


@pytest.mark.parametrize("is_allocated", [False, True])
def test_a_prefill_that_does_not_end_is_given_up(is_allocated: bool) -> None:
    """Goal: no wait without a deadline. Method: a first block, then nothing but renewals that are answered."""
    stage = at_ready(offer_wait_s=50.0)
    if is_allocated:
        stage.allocate()
    for second in range(1, 50):
        for message in sent(stage.wait(second)):
            if isinstance(message, messages.Renew):
                stage.hear(messages.Renewed(incarnation=PREFILL, sequence=message.sequence, gone=()))
            else:
                stage.hear(written(5))

    done = stage.wait(51.0)

    assert RELEASE in sent(done)
    assert ([CANCEL] if is_allocated else []) == others(done)
    assert 1 == stage.counts[counters.LOADS_FAILED, counters.NO_OFFER]


def test_a_ready_offer_that_waits_for_blocks_is_not_given_up() -> None:
    """Goal: the deadline is the prefill's. Method: the prefill ends, vLLM has no blocks for long."""
    stage = at_ready(offer_wait_s=5.0)
    stage.offered("ready")

    assert [] == [message for message in sent(stage.wait(5.5)) if message == RELEASE]
    assert 6 == stage.machine.remote_tokens(R, 4)


@pytest.mark.parametrize("state", ["pending", "ready"])
@pytest.mark.parametrize("fails", [False, True])
def test_offers_that_make_no_sense_end_a_waiting_request(state: str, fails: bool) -> None:
    """Goal: a broken producer costs the KV, not the engine. Method: blocks of no group."""
    stage = at_ready(fail_on_load_error=fails)

    done = stage.offered(state, num_tokens=8 if state == "pending" else 10, block_ids=((), ()))

    assert [RELEASE] == stage_sent(done)
    assert (6 if fails else 0) == stage.machine.remote_tokens(R, 4)


def test_offers_that_make_no_sense_stop_a_read() -> None:
    """Goal: the same with a read under way. Method: fewer blocks than tokens, blocks of another prompt, and an end that comes
    before what is to be read."""
    for changes in ({"block_ids": ((5,),)}, {"prompt_digest": b"other"}, {"block_ids": ((5,),), "num_tokens": 4}):
        stage = at_ready()
        stage.allocate()
        done = stage.offered("ready", **{"block_ids": BLOCKS} | changes)
        assert ([RELEASE], [CANCEL]) == (sent(done), others(done))


def test_blocks_offered_without_a_digest_are_refused() -> None:
    """Goal: the digest decides whose KV it is. Method: a pending offer with blocks and no digest."""
    stage = ConsumerStage(streams=True)
    stage.arrive()
    stage.welcome()

    assert [RELEASE] == sent(stage.offered("pending", num_tokens=4, block_ids=((5,),), prompt_digest=b""))


# --- reader ----------------------------------------------------------------------------------------------------------------


class ReaderStage(Stage):
    """A reader and one read of several parts."""

    def __init__(self) -> None:
        super().__init__(Reader(0, ReaderSettings()))

    def plan(self, part: int, num_calls: int = 1, *, generation: int = 0, is_last: bool = False) -> list[Any]:
        return self.feed(
            events.ReadPlanned(
                transfer_id=T,
                request_id=R,
                session="s",
                num_calls=num_calls,
                part=part,
                generation=generation,
                is_last=is_last,
            )
        )

    def refuse(self, part: int) -> list[Any]:
        return self.feed(events.ReadRefused(transfer_id=T, request_id=R, reason="too many descriptors", part=part))

    def cancel(self) -> list[Any]:
        return self.feed(events.ReadCancelled(request_id=R))

    def call_ended(self, index: int, outcome: Outcome = Outcome.DONE) -> list[Any]:
        return self.feed(
            events.CallEnded(request_id=R, call_index=index, outcome=outcome, reason="", num_bytes=10, num_descriptors=1)
        )


def call(index: int) -> actions.StartCall:
    return actions.StartCall(transfer_id=T, request_id=R, call_index=index)


def ends(done: list[Any]) -> list[tuple[Outcome, int, float]]:
    found = (action.ended for action in done if isinstance(action, actions.EndRead))
    return [(ended.outcome, ended.num_bytes, ended.seconds) for ended in found]


def test_a_read_waits_for_its_last_part() -> None:
    """Goal: one end for all parts, and the wait for the prefill is no transfer time. Method: two parts, ten seconds apart."""
    stage = ReaderStage()
    assert [call(0)] == stage.plan(0)
    stage.now = 1.0
    assert [] == stage.call_ended(0)
    assert None is stage.machine.next_timer()
    stage.now = 11.0
    assert [call(1)] == stage.plan(1, is_last=True)
    stage.now = 13.0
    assert [(Outcome.DONE, 20, 3.0)] == ends(stage.call_ended(1))


def test_a_last_part_without_calls_ends_the_read() -> None:
    """Goal: the last part may bring nothing. Method: everything was written before the prefill ended."""
    stage = ReaderStage()
    stage.plan(0)
    stage.call_ended(0)

    assert [(Outcome.DONE, 10, 0.0)] == ends(stage.plan(1, 0, is_last=True))


def test_parts_without_calls_are_waited_out() -> None:
    """Goal: a part of no tokens is one. Method: two of them, then one with a call."""
    stage = ReaderStage()

    assert [[], [], [call(0)]] == [stage.plan(0, 0), stage.plan(1, 0), stage.plan(2, is_last=True)]


def test_a_new_generation_drops_what_has_not_begun() -> None:
    """Goal: no time is lost on blocks that were taken away. Method: four calls, one under way, then a new generation."""
    stage = ReaderStage()
    stage.plan(0, 4)
    stage.plan(1, 2, generation=1, is_last=True)

    assert [call(4)] == stage.call_ended(0)
    assert [call(5)] == stage.call_ended(4)
    assert [Outcome.DONE] == [end[0] for end in ends(stage.call_ended(5))]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_queued_read_whose_new_generation_has_no_calls(is_last: bool) -> None:
    """Goal: nothing stays queued without a call. Method: a read that waits for its turn behind another one."""
    stage = ReaderStage()
    stage.feed(events.ReadPlanned(transfer_id=T, request_id=RequestId("other"), session="s", num_calls=1))
    stage.plan(0, 2)

    assert ([Outcome.DONE] if is_last else []) == [end[0] for end in ends(stage.plan(1, 0, generation=1, is_last=is_last))]
    assert int(not is_last) + 1 == stage.machine.num_reads


def test_a_part_that_comes_twice_or_too_early_is_ignored() -> None:
    """Goal: parts come in order or not at all. Method: part 0 again, part 2 before part 1, part 1 of an unknown read."""
    stage = ReaderStage()
    stage.plan(0)

    assert [[], []] == [stage.plan(0), stage.plan(2)]
    assert [] == ReaderStage().plan(1)
    assert 2 == stage.counts[counters.ORDERS_IGNORED, ""]


def test_a_part_that_cannot_be_planned_ends_the_read() -> None:
    """Goal: one answer, told when nothing can land. Method: refused while it waits, is queued, is called, is stopping."""
    waiting = ReaderStage()
    waiting.plan(0)
    waiting.call_ended(0)
    queued = ReaderStage()
    queued.feed(events.ReadPlanned(transfer_id=T, request_id=RequestId("other"), session="s", num_calls=1))
    queued.plan(0)
    calling = ReaderStage()
    calling.plan(0)

    assert [Outcome.FAILED] == [end[0] for end in ends(waiting.refuse(1))]
    assert [Outcome.REFUSED] == [end[0] for end in ends(queued.refuse(1))]
    assert [[], []] == [calling.refuse(1), calling.refuse(1)]
    assert [Outcome.FAILED] == [end[0] for end in ends(calling.call_ended(0))]


def test_a_read_that_waits_can_be_cancelled() -> None:
    """Goal: an abort ends it at once. Method: cancel between two parts; the next part comes too late."""
    stage = ReaderStage()
    stage.plan(0)
    stage.call_ended(0)

    stage.now = 7.0

    assert [(Outcome.FAILED, 10, 0.0)] == ends(stage.cancel())
    assert [] == stage.plan(1, is_last=True)


def test_a_cancelled_call_that_was_not_the_last_of_all_fails_the_read() -> None:
    """Goal: done means whole. Method: cancel during the only call ordered so far, with parts to come."""
    stage = ReaderStage()
    stage.plan(0)
    stage.cancel()
    stage.plan(1)

    assert [Outcome.FAILED] == [end[0] for end in ends(stage.call_ended(0))]


def test_each_part_has_its_time() -> None:
    """Goal: the bound on calls is from the order that asked for them. Method: a part long after the first one."""
    stage = ReaderStage()
    stage.plan(0)
    stage.call_ended(0)
    stage.now = limits.READ_WAIT_S * 3
    stage.plan(1, is_last=True)

    assert stage.now + limits.READ_WAIT_S == stage.machine.next_timer()
