"""The pool's machines on a stage: feed events, see actions without the counting, short names for what tests say often."""

from __future__ import annotations

from typing import Any

from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.pool import actions, events
from vllm_mooncake_ascend.pool.scheduler import PoolScheduler
from vllm_mooncake_ascend.pool.settings import PoolSettings, WorkerSettings
from vllm_mooncake_ascend.pool.worker import PoolWorker
from vllm_mooncake_ascend.types import Outcome, RequestId
from vllm_mooncake_ascend.wire.pool_steps import GroupBlocks, LoadEnded, SaveEnded
from vllm_mooncake_ascend.wire.steps import Report

R = RequestId("r")
GROUP = GroupLayout(tokens_per_block=4, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
HASHES = [bytes([index]) for index in range(6)]
TABLE = ((10, 11, 12, 13, 14, 15),)


class PoolStage:
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
            self.now = max(self.now, next_s)
            done += self.feed(events.TimerFired())
        self.now = until_s
        return done


class SchedulerStage(PoolStage):
    """The scheduler's machine with one group, blocks of four tokens, prompts of six blocks."""

    def __init__(self, **settings: Any) -> None:
        chosen = {
            "namespace": "n",
            "groups": (GROUP,),
            "hash_tokens": 4,
            "num_ranks": 1,
            "can_report_unknown_at_once": True,
            "max_saved_blocks": 100,
        } | settings
        super().__init__(PoolScheduler(PoolSettings(**chosen)))

    def arrive(self, request_id: str = R, num_local_tokens: int = 0, num_prompt_tokens: int = 24, **changed: Any) -> list[Any]:
        chosen = {"hashes": HASHES, "may_load": True, "may_save": True} | changed
        return self.feed(
            events.RequestArrived(
                request_id=RequestId(request_id),
                num_prompt_tokens=num_prompt_tokens,
                num_local_tokens=num_local_tokens,
                **chosen,
            )
        )

    def answer(self, end_token: int, lookup_id: int = 1, *, is_lost: bool = False) -> list[Any]:
        return self.feed(events.LookupEnded(lookup_id=lookup_id, end_token=end_token, is_lost=is_lost))

    def ask(self, num_local_tokens: int = 0, request_id: str = R) -> int | None:
        """What vLLM is told."""
        self.feed(events.AdmissionTried(request_id=RequestId(request_id), num_local_tokens=num_local_tokens))
        tokens: int | None = self.machine.hit_tokens(RequestId(request_id), num_local_tokens)
        return tokens

    def allocate(self, num_remote_tokens: int, num_local_tokens: int = 0, request_id: str = R) -> list[Any]:
        first, end = num_local_tokens // 4, (num_local_tokens + num_remote_tokens) // 4
        return self.feed(
            events.BlocksAllocated(
                request_id=RequestId(request_id),
                num_local_tokens=num_local_tokens,
                num_remote_tokens=num_remote_tokens,
                block_ids=TABLE,
                loaded_block_ids=TABLE[0][first:end],
            )
        )

    def loading(self) -> None:
        """A load of all six blocks is under way."""
        self.arrive()
        self.answer(24)
        self.ask()
        self.allocate(24)

    def load_ended(
        self,
        outcome: Outcome = Outcome.DONE,
        load_id: int = 1,
        rank: int = 0,
        failed: tuple[int, ...] = (),
        missing: tuple[int, ...] = (),
    ) -> list[Any]:
        ended = LoadEnded(
            load_id=load_id,
            rank=rank,
            outcome=outcome,
            failed_block_ids=failed,
            missing_block_ids=missing,
            reason="" if outcome is Outcome.DONE else "failed",
            num_bytes=0,
            seconds=0.0,
        )
        return self.feed(events.RankLoadEnded(ended=ended))

    def compute(self, num_tokens: int, request_id: str = R, chain: int | None = None, table: Any = TABLE) -> list[Any]:
        """Progress of a step that was scheduled just now, unless a chain is named."""
        scheduled = self.machine.chain(RequestId(request_id)) if chain is None else chain
        return self.feed(
            events.ChunkComputed(request_id=RequestId(request_id), chain=scheduled or 0, num_tokens=num_tokens, block_ids=table)
        )

    def save_ended(self, outcome: Outcome = Outcome.DONE, save_id: int = 1, rank: int = 0, reason: str = "failed") -> list[Any]:
        said = "" if outcome is Outcome.DONE else reason
        ended = SaveEnded(save_id=save_id, rank=rank, outcome=outcome, reason=said, num_bytes=0, seconds=0.0)
        return self.feed(events.RankSaveEnded(ended=ended))

    def end(self, request_id: str = R) -> list[Any]:
        return self.feed(events.RequestEnded(request_id=RequestId(request_id)))


class WorkerStage(PoolStage):
    """The machine of worker 3."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(PoolWorker(3, WorkerSettings(**settings)))

    def plan_load(self, load_id: int = 1, calls: tuple[tuple[int, ...], ...] = ((10, 11), (12,))) -> list[Any]:
        return self.feed(events.LoadPlanned(load_id=load_id, calls=calls))

    def got(
        self, *outcomes: Outcome, load_id: int = 1, call_index: int = 0, num_missing: int = 0, is_lost: bool = False
    ) -> list[Any]:
        return self.feed(
            events.GetEnded(
                load_id=load_id,
                call_index=call_index,
                outcomes=outcomes,
                num_missing=num_missing,
                num_bytes=8 * outcomes.count(Outcome.DONE),
                is_lost=is_lost,
            )
        )

    def plan_save(self, save_id: int = 1, chain: int = 1, calls: tuple[int, ...] = (2, 1)) -> list[Any]:
        return self.feed(events.SavePlanned(save_id=save_id, chain=chain, calls=calls))

    def put(
        self, *outcomes: Outcome, save_id: int = 1, call_index: int = 0, is_full: bool = False, is_lost: bool = False
    ) -> list[Any]:
        return self.feed(
            events.PutEnded(
                save_id=save_id,
                call_index=call_index,
                outcomes=outcomes,
                num_bytes=8 * outcomes.count(Outcome.DONE),
                is_full=is_full,
                is_lost=is_lost,
            )
        )


def report(block_ids: tuple[int, ...] = (), request_id: str = R, *, ok: bool = True) -> actions.ReportReceive:
    return actions.ReportReceive(report=Report(request_id=RequestId(request_id), ok=ok, block_ids=block_ids))


def pin(*block_ids: int, request_id: str = R) -> actions.PinBlocks:
    return actions.PinBlocks(request_id=RequestId(request_id), block_ids=block_ids)


def unpin(*block_ids: int, request_id: str = R) -> actions.UnpinBlocks:
    return actions.UnpinBlocks(request_id=RequestId(request_id), block_ids=block_ids)


def blocks(first: int, end: int) -> tuple[GroupBlocks, ...]:
    """Positions [first, end) of the prompt in the table."""
    return (GroupBlocks(group_index=0, block_ids=TABLE[0][first:end], hashes=tuple(HASHES[first:end])),)


def saved(done: list[Any]) -> list[tuple[int, tuple[int, ...]]]:
    """Number and blocks of the saves that were ordered."""
    orders = [action.order for action in done if isinstance(action, actions.OrderSave)]
    return [(order.save_id, order.groups[0].block_ids) for order in orders]


def ends(done: list[Any]) -> list[tuple[int, Outcome, str]]:
    """Number, outcome and reason of what a worker has ended."""
    ended = [action.ended for action in done if isinstance(action, actions.EndLoad | actions.EndSave)]
    return [(one.load_id if isinstance(one, LoadEnded) else one.save_id, one.outcome, one.reason) for one in ended]
