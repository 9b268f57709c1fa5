"""A simulated engine: vLLM's scheduler as far as the pool's machines meet it, and the shell between the two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.pool import actions, events
from vllm_mooncake_ascend.pool.scheduler import PoolScheduler
from vllm_mooncake_ascend.pool.settings import PoolSettings
from vllm_mooncake_ascend.testing.pool_simulator.blocks import Blocks
from vllm_mooncake_ascend.testing.pool_simulator.listener import Listener
from vllm_mooncake_ascend.testing.pool_simulator.plan import Job, PoolPlan
from vllm_mooncake_ascend.testing.pool_simulator.store import Alarm, Clock, SimulatedStore
from vllm_mooncake_ascend.testing.pool_simulator.worker import SimulatedWorker
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.pool_steps import LoadEnded, LoadOrder, PoolStep, SaveOrder
from vllm_mooncake_ascend.wire.steps import Report

TOKENS_PER_BLOCK = 4
STEP_S = 0.005
CROWDED_STEP_S = 0.2
"""Real engines ask again at once, and learn nothing new by it."""
CHUNK_BLOCKS = 3
Check = Callable[[bool, str], None]


@dataclasses.dataclass(slots=True, eq=False)
class Request:
    """A request as vLLM has it."""

    job: Job
    hashes: list[bytes]
    state: str = "waiting"
    """waiting, loading, running, over."""
    block_ids: list[int] = dataclasses.field(default_factory=list)
    first_loaded: int = 0
    num_computed: int = 0
    """Blocks whose KV is written."""
    loading_since_s: float = 0.0
    held_since_s: float | None = None
    held_s: float = 0.0
    """How long its lookup has held it back in all."""
    was_let_down: bool = False
    is_aborted: bool = False
    """vLLM frees it when its load is reported."""

    @property
    def is_held(self) -> bool:
        """It waits for its lookup."""
        return self.state == "waiting" and self.held_since_s is not None

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.job.request_id)


class Engine:
    """Steps while there is something to do; feeds the machine in vLLM's order and carries out what it asks for."""

    def __init__(
        self,
        plan: PoolPlan,
        settings: PoolSettings,
        machine: PoolScheduler,
        clock: Clock,
        store: SimulatedStore,
        check: Check,
    ) -> None:
        self.plan = plan
        self.machine = machine
        self.blocks = Blocks(plan.num_blocks)
        self.requests: list[Request] = []
        self.workers: list[SimulatedWorker] = []
        self.record = Record()
        self._settings = settings
        self._clock = clock
        self._store = store
        self._check = check
        self._orders = Orders()
        self._alarm = Alarm(clock, lambda: self.feed(events.TimerFired()))

    # --- events from outside ------------------------------------------------------------------------------------------

    def arrive(self, job: Job) -> None:
        """A request is given to the engine; vLLM does not take an id that is still in use."""
        if any(one.request_id == job.request_id for one in self.requests if one.state != "over"):
            return
        hashes = [f"{job.family}.{index}".encode() for index in range(job.num_blocks)]
        request = Request(job=job, hashes=hashes)
        self.requests.append(request)
        event = events.RequestArrived(
            request_id=request.request_id,
            hashes=hashes,
            num_prompt_tokens=job.num_blocks * TOKENS_PER_BLOCK,
            num_local_tokens=self.blocks.num_local(hashes) * TOKENS_PER_BLOCK,
            may_load=True,
            may_save=True,
        )
        self.feed(event)
        if job.is_aborted_after_s is not None:
            self._clock.at(self._clock.now + job.is_aborted_after_s, lambda: self._abort(request))
        if job.is_preempted_after_s is not None:
            self._clock.at(self._clock.now + job.is_preempted_after_s, lambda: self._preempt(request))
        self.wake()

    def reset(self, namespace: str) -> None:
        """reset_cache; nothing of the past may be found again."""
        self.blocks.clear_cache()
        self.record.expected.clear()
        self.feed(events.PoolReset(namespace=namespace))
        self._check(not self.record.listener.believed, "a reset, and blocks of before it are still told to be there")
        self.record.namespace = namespace

    def _abort(self, request: Request) -> None:
        if request.state == "over" or request.is_aborted:
            return
        self.feed(events.RequestEnded(request_id=request.request_id))
        if request.state == "loading":
            request.is_aborted = True
        else:
            self._free(request, "over")

    def _preempt(self, request: Request) -> None:
        if request.state == "running":
            self.feed(events.RequestPreempted(request_id=request.request_id))
            self._free(request, "waiting")
            request.num_computed = 0

    def _free(self, request: Request, state: str) -> None:
        self.blocks.release(request.block_ids)
        request.block_ids, request.state = [], state

    # --- steps --------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Step soon, if no step is due anyway."""
        if not self.record.is_stepping:
            self.record.is_stepping = True
            self._clock.at(self._clock.now + STEP_S, self._step)

    def _step(self) -> None:
        """One step: what came back, who is admitted, what is computed, what goes to the workers."""
        self.record.is_stepping = False
        self._take_results()
        self._take_progress()
        for request in [one for one in self.requests if one.state == "waiting"]:
            self._admit(request)
        for request in [one for one in self.requests if one.state == "running"]:
            self._compute(request)
        step = self._orders.taken()
        for worker in self.workers:
            worker.step(step)
        if self._orders.computed or any(one.state == "running" or one.is_held for one in self.requests):
            self.wake()
        elif any(one.state == "waiting" for one in self.requests):
            self._clock.at(self._clock.now + CROWDED_STEP_S, self.wake)

    def _take_results(self) -> None:
        for worker in self.workers:
            results, worker.results = worker.results, []
            for ended in results:
                is_load = isinstance(ended, LoadEnded)
                self.feed(events.RankLoadEnded(ended=ended) if is_load else events.RankSaveEnded(ended=ended))  # type: ignore[arg-type]

    def _take_progress(self) -> None:
        computed, self._orders.computed = self._orders.computed, []
        for event in computed:
            self.feed(event)
        for request in self.requests:
            if request.state == "running" and request.num_computed == len(request.hashes):
                self.feed(events.RequestEnded(request_id=request.request_id))
                self._free(request, "over")

    def _admit(self, request: Request) -> None:
        start_s, end_s = self.plan.crowded_s
        num_local = self.blocks.num_local(request.hashes)
        num_local_tokens = num_local * TOKENS_PER_BLOCK
        self.feed(events.AdmissionTried(request_id=request.request_id, num_local_tokens=num_local_tokens))
        num_tokens = self.machine.hit_tokens(request.request_id, num_local_tokens)
        self._hold_back(request, is_held=num_tokens is None)
        is_offered_again = request.was_let_down and bool(num_tokens)
        self._check(not is_offered_again, f"{request.request_id} was let down, and is sent to the pool again")
        if num_tokens is None or start_s <= self._clock.now < end_s:
            return
        block_ids = self.blocks.allocate(request.hashes, num_local)
        if block_ids is None:
            return
        num_remote = num_tokens // TOKENS_PER_BLOCK
        self._check(num_local + num_remote <= len(request.hashes), "more tokens were offered than the prompt has")
        if request.job.is_careless:
            num_remote //= 2
        request.block_ids, request.first_loaded, request.num_computed = block_ids, num_local, num_local
        request.state = "loading" if num_remote else "running"
        request.loading_since_s = self._clock.now
        event = events.BlocksAllocated(
            request_id=request.request_id,
            num_local_tokens=num_local_tokens,
            num_remote_tokens=num_remote * TOKENS_PER_BLOCK,
            block_ids=(tuple(block_ids),),
            loaded_block_ids=tuple(block_ids[num_local : num_local + num_remote]),
        )
        self.record.num_loaded[request.request_id] = num_remote
        self.feed(event)

    def _hold_back(self, request: Request, *, is_held: bool) -> None:
        """Time that a lookup costs: the bound for its tokens, and a step to notice."""
        if request.held_since_s is not None:
            request.held_s += self._clock.now - request.held_since_s
        request.held_since_s = self._clock.now if is_held else None
        bound_s = limits.MAX_LOOKUPS_PER_REQUEST * (
            self._settings.lookup_bound_s(len(request.hashes) * TOKENS_PER_BLOCK) + 2 * STEP_S
        )
        self._check(request.held_s <= bound_s, f"{request.request_id} was held back {request.held_s:.3f} s for its lookup")

    def _compute(self, request: Request) -> None:
        """One chunk; its output comes back with the next step."""
        end = min(request.num_computed + CHUNK_BLOCKS, len(request.hashes))
        for position in range(request.num_computed, end):
            block_id = request.block_ids[position]
            for worker in self.workers:
                worker.memory[block_id] = request.hashes[position]
            self.blocks.cache(request.hashes[position], block_id)
        request.num_computed = end
        chain = self.machine.chain(request.request_id)
        if chain is None:
            return
        self._orders.computed.append(
            events.ChunkComputed(
                request_id=request.request_id,
                chain=chain,
                num_tokens=end * TOKENS_PER_BLOCK,
                block_ids=(tuple(request.block_ids),),
            )
        )
        if end == len(request.hashes):
            self.record.expected.update(request.hashes)

    # --- the machine --------------------------------------------------------------------------------------------------

    def feed(self, event: events.SchedulerEvent) -> None:
        """One event to the machine, and what it asks for."""
        self.record.tell(self._clock.now, event)
        for action in self.machine.handle(event, self._clock.now):
            self.record.tell(self._clock.now, action)
            self.record.listener.hear(action, self._check)
            self._carry_out(action)
        self._alarm.set(self.machine.next_timer())

    def _carry_out(self, action: actions.SchedulerAction) -> None:
        match action:
            case actions.StartLookup():
                self._look_up(action)
            case actions.PinBlocks():
                self._check(len(set(action.block_ids)) == len(action.block_ids), "a block is pinned twice at once")
                for block_id in action.block_ids:
                    self._check(self.blocks.owners[block_id] > 0, f"block {block_id} is pinned though it is free")
                    self.blocks.take(block_id)
            case actions.UnpinBlocks():
                self._check(all(self.blocks.owners[one] > 0 for one in action.block_ids), "a block is unpinned twice")
                self.blocks.release(list(action.block_ids))
            case actions.OrderLoad():
                looked_up_s, namespace = self.record.looked_up[action.order.request_id]
                self._check(namespace == action.order.namespace, "a load of what was looked up before a reset")
                self.record.load_looked_up_s[action.order.load_id] = looked_up_s
                self._orders.loads.append(action.order)
                self.wake()
            case actions.CancelLoad():
                self._orders.cancels.append(action.load_id)
                self.wake()
            case actions.OrderSave():
                self._orders.saves.append(action.order)
                self.wake()
            case actions.ReportReceive():
                self._report(action.report)
            case actions.ProbeStore():
                self._later(0.001, events.ProbeEnded(is_healthy=self._store.is_healthy()))
            case _:
                pass

    def _look_up(self, action: actions.StartLookup) -> None:
        self.record.looked_up[action.request_id] = (self._clock.now, action.namespace)
        call = self._store.lookup()
        end = first = action.first_token // TOKENS_PER_BLOCK
        while not call.is_lost and end < action.end_token // TOKENS_PER_BLOCK:
            name = action.hashes[end].hex()
            if not all(f"{action.namespace}/0/{worker.rank}/{name}" in self._store.values for worker in self.workers):
                break
            end += 1
        end = max(first, end)
        event = events.LookupEnded(lookup_id=action.lookup_id, end_token=end * TOKENS_PER_BLOCK, is_lost=call.is_lost)
        self._later(call.seconds, event)

    def _report(self, report: Report) -> None:
        waiting = [one for one in self.requests if one.state == "loading" and one.request_id == report.request_id]
        self._check(len(waiting) == 1, f"a report of {report.request_id}, which does not wait for one")
        request = waiting[0]
        request.was_let_down = not report.ok
        num_loaded = self.record.num_loaded[request.request_id]
        self._check_bound(request)
        if request.is_aborted:
            self._free(request, "over")
        elif report.ok:
            end = request.first_loaded + num_loaded
            for position in range(end):
                for worker in self.workers:
                    is_right = worker.memory.get(request.block_ids[position]) == request.hashes[position]
                    self._check(is_right, f"{report.request_id} was told that KV came which did not")
            for position in range(request.first_loaded, end):
                self.blocks.cache(request.hashes[position], request.block_ids[position])
            request.state, request.num_computed = "running", end
        elif self._settings.can_report_unknown_at_once:
            self.record.num_failed += 1
            self._free(request, "waiting")
        else:
            self.record.num_failed += 1
            request.state, request.num_computed = "running", request.first_loaded

    def _check_bound(self, request: Request) -> None:
        """How long a load may hold a request back: its own bound, and the end where the report waits for that."""
        bound_s = self._settings.load_wait_s + 1.0
        if not self._settings.can_report_unknown_at_once:
            bound_s += limits.LOAD_END_S
        waited_s = self._clock.now - request.loading_since_s
        self._check(waited_s <= bound_s or request.is_aborted, f"{request.request_id} waited {waited_s:.1f} s for its load")

    def _later(self, seconds: float, event: events.SchedulerEvent) -> None:
        self._clock.at(self._clock.now + seconds, lambda: self.feed(event))


@dataclasses.dataclass(slots=True)
class Orders:
    """What goes to the workers with the next step, and what comes back from it."""

    computed: list[events.ChunkComputed] = dataclasses.field(default_factory=list)
    cancels: list[int] = dataclasses.field(default_factory=list)
    loads: list[LoadOrder] = dataclasses.field(default_factory=list)
    saves: list[SaveOrder] = dataclasses.field(default_factory=list)

    def taken(self) -> PoolStep:
        """The step, and nothing left."""
        step = PoolStep(cancels=tuple(self.cancels), loads=tuple(self.loads), saves=tuple(self.saves))
        self.cancels, self.loads, self.saves = [], [], []
        return step


@dataclasses.dataclass(slots=True)
class Record:
    """What an engine remembers for the world's laws."""

    is_stepping: bool = False
    looked_up: dict[str, tuple[float, str]] = dataclasses.field(default_factory=dict)
    """When the last lookup of each request began, and in which namespace."""
    load_looked_up_s: dict[int, float] = dataclasses.field(default_factory=dict)
    num_loaded: dict[str, int] = dataclasses.field(default_factory=dict)
    expected: set[bytes] = dataclasses.field(default_factory=set)
    """Hashes of prompts that were computed to their end."""
    num_failed: int = 0
    namespace: str = "n0"
    listener: Listener = dataclasses.field(default_factory=Listener)
    story: list[str] | None = None

    def tell(self, now: float, what: object) -> None:
        if self.story is not None:
            self.story.append(f"{now:9.4f} {what}")
