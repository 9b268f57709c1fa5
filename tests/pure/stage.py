"""Machines on a stage: feed events, see actions without the counting, short names for what tests say over and over."""

from __future__ import annotations

from typing import Any

from vllm_mooncake_ascend.layout.plane import GroupLayout, RankLayout
from vllm_mooncake_ascend.p2p import actions, events
from vllm_mooncake_ascend.p2p.consumer import Consumer
from vllm_mooncake_ascend.p2p.producer import Producer
from vllm_mooncake_ascend.p2p.settings import ConsumerSettings, ProducerSettings
from vllm_mooncake_ascend.types import Incarnation, Outcome, PeerAddress, RequestId, TransferId
from vllm_mooncake_ascend.wire import messages
from vllm_mooncake_ascend.wire.params import RemotePrefill
from vllm_mooncake_ascend.wire.steps import ReadEnded

PREFILL = Incarnation("prefill")
DECODE = Incarnation("decode")
ADDRESS = PeerAddress("prefill:1")
T = TransferId("t")
R = RequestId("r")
DIGEST = b"digest"
BLOCKS = ((5, 6, 7),)
NUM_TOKENS = 10
TTL_S = 30.0

GROUP = GroupLayout(tokens_per_block=4, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
RANKS = (RankLayout(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, session="s", groups=(GROUP,), planes=(), regions=()),)


class Stage:
    """One machine and a clock that tests own."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.now = 0.0
        self.counts: dict[tuple[str, str], float] = {}
        self.notes: list[str] = []

    def feed(self, event: Any) -> list[Any]:
        """Actions but counts and notes, which are kept aside."""
        done = []
        for action in self.machine.handle(event, self.now):
            match action:
                case actions.Count():
                    key = (action.name, action.reason)
                    self.counts[key] = self.counts.get(key, 0) + action.amount
                case actions.Note():
                    self.notes.append(action.text)
                case _:
                    done.append(action)
        return done

    def wait(self, until_s: float) -> list[Any]:
        """Let time pass to `until_s`, alarm by alarm."""
        done = []
        while (next_s := self.machine.next_timer()) is not None and next_s <= until_s:
            assert next_s > self.now or not done, "an alarm that does not go off"
            self.now = max(self.now, next_s)
            done += self.feed(events.TimerFired())
        self.now = until_s
        return done


class ProducerStage(Stage):
    """A producer, and readers that speak to it."""

    def __init__(self, **settings: Any) -> None:
        chosen = {"lease_ttl_s": TTL_S, "lease_max_s": 300.0, "max_pinned_blocks": 100} | settings
        super().__init__(Producer(PREFILL, {"model": "m"}, RANKS, ProducerSettings(**chosen)))

    def announce(self, transfer_id: str | None = T, request_id: str = "p", fresh_id: str = "fresh") -> list[Any]:
        return self.feed(
            events.PrefillArrived(
                request_id=RequestId(request_id),
                wanted_id=None if transfer_id is None else TransferId(transfer_id),
                fresh_id=TransferId(fresh_id),
                prompt_digest=DIGEST,
                num_prompt_tokens=NUM_TOKENS,
            )
        )

    def end_prefill(self, request_id: str = "p", block_ids: events.BlockTable = BLOCKS, *, has_kv: bool = True) -> list[Any]:
        return self.feed(
            events.PrefillEnded(
                request_id=RequestId(request_id),
                has_kv=has_kv,
                num_tokens=NUM_TOKENS if has_kv else 0,
                block_ids=block_ids if has_kv else (),
                reason="" if has_kv else "abort",
            )
        )

    def say(self, message: messages.FromReader, peer: bytes = b"socket") -> list[Any]:
        """What the producer answers to a message, and does."""
        return self.feed(events.ReaderSpoke(peer=peer, message=message))

    def subscribe(self, request_id: str = R, transfer_id: str = T, *, streams: bool = False) -> list[Any]:
        return self.say(messages.Subscribe(**about(request_id, transfer_id), streams=streams))

    def progress(self, *block_ids: int) -> list[Any]:
        """Whole blocks of the prefill are written."""
        return self.feed(
            events.PrefillProgressed(request_id=RequestId("p"), num_tokens=4 * len(block_ids), block_ids=(block_ids,))
        )

    def preempt(self) -> list[Any]:
        return self.feed(events.PrefillPreempted(request_id=RequestId("p")))

    def renew(self, sequence: int, request_id: str = R) -> list[Any]:
        return self.say(
            messages.Renew(incarnation=DECODE, expected=PREFILL, sequence=sequence, transfers=((T, RequestId(request_id)),))
        )

    def read_done(self, request_id: str = R, *, ok: bool = True) -> list[Any]:
        return self.say(messages.ReadDone(**about(request_id), ok=ok))

    def release(self, request_id: str = R, transfer_id: str = T) -> list[Any]:
        return self.say(messages.Release(**about(request_id, transfer_id)))


class ConsumerStage(Stage):
    """A consumer, and one producer that it hears."""

    def __init__(self, **settings: Any) -> None:
        chosen = {"num_ranks": 1, "fail_on_load_error": False, "can_report_unknown_at_once": True} | settings
        differences = {"m": ()}
        super().__init__(
            Consumer(
                DECODE,
                {"model": "m"},
                RANKS,
                ConsumerSettings(**chosen),
                differences=lambda _, __, remote, ___: differences.get(remote["model"], ("model: m here, other there",)),
            )
        )

    def arrive(self, request_id: str = R, *, incarnation: Incarnation = PREFILL, digest: bytes = b"") -> list[Any]:
        return self.feed(
            events.RequestArrived(
                request_id=RequestId(request_id),
                transfer=RemotePrefill(
                    transfer_id=T, incarnation=incarnation, address=ADDRESS, num_tokens=0, prompt_digest=digest
                ),
                prompt_digest=DIGEST,
                num_prompt_tokens=NUM_TOKENS,
            )
        )

    def hear(self, message: messages.FromProducer) -> list[Any]:
        return self.feed(events.ProducerSpoke(peer=ADDRESS, message=message))

    def welcome(self, incarnation: Incarnation = PREFILL, model: str = "m") -> list[Any]:
        return self.hear(
            messages.Welcome(
                incarnation=incarnation, version=messages.PROTOCOL_VERSION, fingerprint={"model": model}, ranks=RANKS
            )
        )

    def offered(self, state: str = "ready", request_id: str = R, **changes: Any) -> list[Any]:
        return self.hear(offer(state, request_id, **changes))

    def verdict(self, request_id: str = R, *, held: bool) -> list[Any]:
        return self.hear(messages.Verdict(incarnation=PREFILL, transfer_id=T, request_id=RequestId(request_id), held=held))

    def gone(self, request_id: str = R) -> list[Any]:
        return self.hear(messages.Gone(incarnation=PREFILL, transfer_id=T, request_id=RequestId(request_id), reason="why"))

    def allocate(self, num_remote_tokens: int = 6, request_id: str = R, num_local_tokens: int = 4) -> list[Any]:
        """Blocks 1, 2, 3 for the prompt; the first is a local hit."""
        return self.feed(
            events.BlocksAllocated(
                request_id=RequestId(request_id),
                num_local_tokens=num_local_tokens,
                num_remote_tokens=num_remote_tokens,
                block_ids=((1, 2, 3),),
                loaded_block_ids=(2, 3) if num_remote_tokens else (),
            )
        )

    def rank_ended(self, outcome: Outcome, rank: int = 0, request_id: str = R) -> list[Any]:
        return self.feed(
            events.RankReadEnded(
                ended=ReadEnded(
                    transfer_id=T,
                    request_id=RequestId(request_id),
                    rank=rank,
                    outcome=outcome,
                    reason="",
                    num_bytes=8,
                    num_descriptors=1,
                    seconds=0.5,
                )
            )
        )

    def end_request(self, request_id: str = R) -> list[Any]:
        return self.feed(events.RequestEnded(request_id=RequestId(request_id)))

    def until(self, state: str) -> None:
        """Bring request r to a state by the shortest way."""
        steps = {
            "asking": self.arrive,
            "pending": lambda: self.offered("pending"),
            "ready": lambda: (self.welcome(), self.offered("ready")),
            "reading": self.allocate,
            "confirming": lambda: self.rank_ended(Outcome.DONE),
        }
        for name, step in steps.items():
            step()
            if name == state:
                return
        raise AssertionError(f"no such state: {state}")


def about(request_id: str = R, transfer_id: str = T) -> dict[str, Any]:
    """Fields of a message from our reader about a transfer."""
    return {
        "incarnation": DECODE,
        "expected": PREFILL,
        "transfer_id": TransferId(transfer_id),
        "request_id": RequestId(request_id),
    }


def offer(state: str = "ready", request_id: str = R, **changes: Any) -> messages.Offer:
    """The producer's offer of transfer t to a reader."""
    is_ready = state == "ready"
    fields: dict[str, Any] = {
        "incarnation": PREFILL,
        "transfer_id": T,
        "request_id": RequestId(request_id),
        "state": state,
        "num_tokens": NUM_TOKENS if is_ready else 0,
        "generation": 0,
        "block_ids": BLOCKS if is_ready else (),
        "prompt_digest": DIGEST,
        "lease_ttl_s": TTL_S,
        "num_layers_ready": 0,
    }
    return messages.Offer(**(fields | changes))


def sent(done: list[Any]) -> list[Any]:
    """The messages among actions."""
    return [action.message for action in done if isinstance(action, (actions.SendToReader, actions.SendToProducer))]


def others(done: list[Any]) -> list[Any]:
    """The actions that are not messages."""
    return [action for action in done if not isinstance(action, (actions.SendToReader, actions.SendToProducer))]


def pin(*block_ids: int) -> actions.PinBlocks:
    return actions.PinBlocks(transfer_id=T, block_ids=block_ids)


def unpin(*block_ids: int) -> actions.UnpinBlocks:
    return actions.UnpinBlocks(transfer_id=T, block_ids=block_ids)


def told_gone(done: list[Any]) -> list[str]:
    """Request ids that were told Gone."""
    return [message.request_id for message in sent(done) if isinstance(message, messages.Gone)]


def verdicts(done: list[Any]) -> list[bool]:
    return [message.held for message in sent(done) if isinstance(message, messages.Verdict)]
