"""Runs one set of engines of `bench pd`: starts it beside a plain engine, asks, checks, stops it."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from vllm_mooncake_ascend.cli import demo_report, processes, servers, startup
from vllm_mooncake_ascend.cli.bench import pd_cases, pd_measures, pd_subjects
from vllm_mooncake_ascend.cli.bench.pd_answers import Tally
from vllm_mooncake_ascend.cli.bench.pd_asking import Handover, Way, ask
from vllm_mooncake_ascend.cli.bench.pd_cases import Case, Setting, Taken
from vllm_mooncake_ascend.cli.bench.pd_moved import Moved, moved_of
from vllm_mooncake_ascend.cli.bench.pd_subjects import Options, Subject
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.run import Run
from vllm_mooncake_ascend.cli.bench.samples import Sample
from vllm_mooncake_ascend.cli.demo_client import RequestFailed, new_session, read_metrics
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, Server

LOGS = Path("build/bench/pd")
CPU_TOKENS = 2_049
"""CPU is measured with prompts of this length, or the longest."""
METRICS_WAIT_S = 5.0
METRICS_POLL_S = 0.2
FLUSH_TOKENS = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What to measure of each set."""

    tokens: tuple[int, ...]
    parts: tuple[str, ...]
    set_s: float
    """Time for the rounds of one set; there are peers that take half a minute for a token."""

    @property
    def cpu_tokens(self) -> int:
        return CPU_TOKENS if CPU_TOKENS in self.tokens else max(self.tokens)

    def for_another_flow(self) -> Plan:
        """The rest, for a second order of asking the same engines: what comes between tokens is asked in one order only."""
        return dataclasses.replace(self, parts=tuple(part for part in self.parts if part != "between"))


@dataclasses.dataclass(slots=True)
class Outcome:
    """What came of one set."""

    samples: dict[Measure, list[Sample]] = dataclasses.field(default_factory=dict)
    comparisons: dict[Comparison, None] = dataclasses.field(default_factory=dict)
    """In the order they came."""
    tallies: dict[str, Tally] = dataclasses.field(default_factory=dict)
    moved: Moved | None = None
    broken: str = ""
    """Why it ended too soon."""
    cut_short: str = ""
    """How far it came in its time; empty: it came to the end."""

    def add(self, taken: Taken) -> None:
        for measure, sample in taken.samples.items():
            self.samples.setdefault(measure, []).append(sample)
        self.comparisons |= dict.fromkeys(taken.comparisons)


def cases_of(plan: Plan) -> list[Case]:
    """Of one round."""
    found: list[Case] = []
    if "single" in plan.parts:
        found += [
            functools.partial(pd_cases.take_single, num_tokens=tokens, with_cpu=tokens == plan.cpu_tokens)
            for tokens in plan.tokens
        ]
    if "burst" in plan.parts:
        found.append(functools.partial(pd_cases.take_burst, num_tokens=min(plan.tokens)))
    if "between" in plan.parts:
        found.append(functools.partial(pd_cases.take_between, num_tokens=max(plan.tokens)))
    return found


def measure_subject(run: Run, subject: Subject, options: Options, plan: Plan) -> Outcome:
    """Start the set, ask, stop it. What was measured before something broke counts.

    Raises:
        ServerFailed: a server did not come up.
    """
    outcome = Outcome()
    slug = subject.name.replace(",", "").replace(" ", "-")
    with processes.termination_as_interrupt(), LocalCluster(LOGS / slug) as cluster:
        for spec in pd_subjects.engine_specs(subject, options, cpus=frozenset(os.sched_getaffinity(0))):
            cluster.start(spec)
        with startup.progress(run.console, cluster) as show:
            cluster.wait_ready(on_poll=show)
            if subject.proxy_flow:
                arguments = ("--flow", subject.proxy_flow)
                prefill, decode, *_ = cluster.servers
                cluster.start(servers.proxy([prefill.url], [decode.url], arguments=arguments))
                cluster.wait_ready(on_poll=show)
        with run.console.status(f"{subject.name}: asking") as status:
            asking = _Asking(run, subject, options, cluster.servers, outcome)
            asyncio.run(asking.all(plan, on_step=lambda text: status.update(f"{subject.name}: {text}")))
    return outcome


class _Asking:
    """All requests to one set."""

    def __init__(self, run: Run, subject: Subject, options: Options, started: Sequence[Server], outcome: Outcome) -> None:
        self._subject = subject
        self._options = options
        self._outcome = outcome
        self._num_rounds = run.num_rounds
        self._order = random.Random(f"{run.seed} {subject.name}")
        self._by_name = {server.spec.name: server for server in started}

    async def all(self, plan: Plan, *, on_step: Callable[[str], None]) -> None:
        """First requests, rounds, and the proof that KV moved."""
        async with new_session() as session:
            try:
                settings = await self._settings(session)
                await self._first(settings, plan)
                await self._rounds(settings, plan, on_step)
                self._outcome.moved = await self._moved(session)
            except (RequestFailed, aiohttp.ClientError, TimeoutError) as error:
                self._outcome.broken = str(error) or repr(error)

    async def _settings(self, session: aiohttp.ClientSession) -> list[Setting]:
        """One for each flow."""
        prefill, decode, plain = (self._by_name[name] for name in (*pd_subjects.SIDES, pd_measures.COLOCATED))
        handover = await self._handover(session)
        urls = {"prefill_url": prefill.url, "decode_url": decode.url}
        legs = Way(subject="legs", flow="prefill first", handover=handover, **urls)
        proxy = self._by_name.get("proxy")
        found = []
        for name, flow in self._subject.flows.items():
            url = proxy.url if proxy is not None else ""
            tally = self._outcome.tallies.setdefault(name, Tally())
            found.append(
                Setting(
                    session=session,
                    plain=plain,
                    decode=decode,
                    engines=(prefill, decode, *((proxy,) if proxy is not None else ())),
                    way=Way(subject=name, flow=flow, url=url, handover=handover, **urls),
                    legs=legs,
                    dtype=self._options.dtype,
                    vocabulary=pd_subjects.vocabulary(self._options.model),
                    order=self._order,
                    tally=tally,
                )
            )
        return found

    async def _handover(self, session: aiohttp.ClientSession) -> Handover:
        """With the id of the prefill engine, for peers whose decode must be told it."""
        handover = self._subject.handover
        if not self._subject.bootstrap_url:
            return handover
        async with session.get(self._subject.bootstrap_url + "/query") as response:
            (entry,) = (await response.json()).values()
        assert handover.decode is not None
        return Handover(prefill=handover.prefill, decode={**handover.decode, "remote_engine_id": entry["engine_id"]})

    async def _first(self, settings: Sequence[Setting], plan: Plan) -> None:
        """The first requests, which warm the engines up too; then the longest prompt once, uncounted."""
        taken = await pd_cases.take_first(settings[0], min(plan.tokens))
        if "first" in plan.parts:
            self._outcome.add(taken)
        if not cases_of(plan):
            return
        for way in (settings[0].way, settings[0].colocated):
            await pd_cases.ask_way(settings[0], way, settings[0].prompt(max(plan.tokens)))
        await asyncio.sleep(pd_cases.SETTLE_S)

    async def _rounds(self, settings: Sequence[Setting], plan: Plan, on_step: Callable[[str], None]) -> None:
        turns = [(setting, case) for setting in settings[:1] for case in cases_of(plan)]
        turns += [(setting, case) for setting in settings[1:] for case in cases_of(plan.for_another_flow())]
        deadline_s = time.monotonic() + plan.set_s
        for number in range(self._num_rounds):
            on_step(f"round {number + 1} of {self._num_rounds}")
            for setting, case in self._order.sample(turns, k=len(turns)):
                if time.monotonic() > deadline_s:
                    self._outcome.cut_short = f"{number} of {self._num_rounds} rounds whole after {plan.set_s / 60:.0f} minutes"
                    return
                await self._take(setting, case)

    async def _take(self, setting: Setting, case: Case) -> None:
        """One case; the failure of a peer is counted, ours ends the set."""
        try:
            self._outcome.add(await case(setting))
        except RequestFailed as error:
            if self._subject.is_ours:
                raise
            setting.tally.num_failed += 1
            setting.tally.last_failure = str(error)
            await asyncio.sleep(pd_cases.SETTLE_S)

    async def _moved(self, session: aiohttp.ClientSession) -> Moved:
        """Read off decode's metrics, which come with the output of steps: so it is given one to make."""
        decode = self._by_name["decode"].url
        await ask(session, decode, [next(iter(pd_subjects.vocabulary(self._options.model)))] * FLUSH_TOKENS)
        config = json.loads((self._options.model / "config.json").read_text())
        size = demo_report.block_bytes(config, dtype=self._options.dtype, block_size=pd_subjects.BLOCK_SIZE)
        remote_tokens = [tokens for tally in self._outcome.tallies.values() for tokens in tally.remote_tokens]
        deadline_s = time.monotonic() + METRICS_WAIT_S
        while True:
            moved = moved_of(
                remote_tokens,
                await read_metrics(session, decode),
                block_size=pd_subjects.BLOCK_SIZE,
                block_bytes=size if self._subject.is_ours else None,
            )
            if not moved.missing or time.monotonic() > deadline_s:
                return moved
            await asyncio.sleep(METRICS_POLL_S)
