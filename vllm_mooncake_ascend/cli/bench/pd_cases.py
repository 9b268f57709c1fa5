"""The cases of `bench pd`: one prompt, or several at once, asked of the plain engine and of a subject in turns.

A case returns its samples whole or not at all, so that those of one round stay pairs. Between any two requests the engines get
time to come to rest: vLLM's message queue spins for a second after the last step.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import aiohttp

from vllm_mooncake_ascend.cli import cpu_use
from vllm_mooncake_ascend.cli.bench import pd_measures
from vllm_mooncake_ascend.cli.bench.foreign_cpu import ForeignCpu
from vllm_mooncake_ascend.cli.bench.pd_answers import NEAR_TIES, Tally
from vllm_mooncake_ascend.cli.bench.pd_asking import Answer, Way, ask, ask_by, ask_prefill, keep_running
from vllm_mooncake_ascend.cli.bench.pd_gaps import Gaps, idle_gaps, newcomer_gaps
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.samples import Sample
from vllm_mooncake_ascend.cli.demo_client import RequestFailed
from vllm_mooncake_ascend.cli.local_cluster import Server

SETTLE_S = 1.3
IDLE_S = 1.5
"""Window in which running requests are watched before somebody comes."""
RUNNING_PROMPT = 128
RUNNING_TOKENS = 3_900
"""More than come in the time; a small model makes hundreds a second."""
RUNNING_WAIT_S = 30.0
RUNNING_MIN_TOKENS = 5
POLL_S = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What is asked, and by whom."""

    session: aiohttp.ClientSession
    plain: Server
    decode: Server
    engines: tuple[Server, ...]
    """Of the subject, its proxy included."""
    way: Way
    legs: Way
    """The same engines, prefill first, asked by the bench itself."""
    dtype: str
    vocabulary: range
    order: random.Random
    tally: Tally

    def prompt(self, num_tokens: int) -> list[int]:
        """One that nobody has asked before."""
        return [self.order.choice(self.vocabulary) for _ in range(num_tokens)]

    @property
    def colocated(self) -> Way:
        return Way(subject=pd_measures.beside(self.way.subject), flow="one url", url=self.plain.url)

    def watched(self, way: Way) -> tuple[Server, ...]:
        return self.engines if way.subject == self.way.subject else (self.plain,)


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """Samples of one round of one case."""

    samples: Mapping[Measure, Sample]
    comparisons: tuple[Comparison, ...] = ()


Case = Callable[[Setting], Awaitable[Taken]]


async def take_first(setting: Setting, num_tokens: int) -> Taken:
    """First and second request ever through engines that nobody has asked yet."""
    found = {}
    for way in (setting.way, setting.colocated):
        seconds = []
        noise = ForeignCpu()
        for _ in range(2):
            answer = await _asked(setting, way, setting.prompt(num_tokens))
            seconds.append(answer.first_token_s)
        first, second = seconds
        measure = pd_measures.first_ever(num_tokens, way.subject)
        found[measure] = Sample(value=first - second, foreign_cores=noise.cores())
    return Taken(found)


async def take_single(setting: Setting, num_tokens: int, *, with_cpu: bool) -> Taken:
    """One prompt, nothing else."""
    prompt = setting.prompt(num_tokens)
    found: dict[Measure, Sample] = {}
    answers: dict[str, Answer] = {}
    subject = setting.way.subject
    for way in setting.order.sample((setting.colocated, setting.way), k=2):
        before = _cpu_seconds(setting.watched(way))
        noise = ForeignCpu()
        answers[way.subject] = await ask_way(setting, way, prompt)
        foreign = noise.cores()
        await asyncio.sleep(SETTLE_S)
        used = {name: after_s - before[name] for name, after_s in _cpu_seconds(setting.watched(way)).items()}
        ttft = pd_measures.first_token(num_tokens, way.subject)
        found[ttft] = Sample(value=1e3 * answers[way.subject].first_token_s, foreign_cores=foreign)
        if with_cpu:
            total = pd_measures.cpu_of_all(num_tokens, way.subject)
            found[total] = Sample(value=sum(used.values()), foreign_cores=foreign)
        if with_cpu and way.subject == subject:
            found |= await _decode_cpu(setting, prompt, used[setting.decode.spec.name], foreign)
    compare(setting, answers, f"single {num_tokens:,}")
    ratios = (pd_measures.first_token_ratio(num_tokens, subject),)
    return Taken(found, (*ratios, pd_measures.cpu_ratio(num_tokens, subject)) if with_cpu else ratios)


async def _decode_cpu(setting: Setting, prompt: Sequence[int], used_s: float, foreign: float) -> dict[Measure, Sample]:
    """CPU of decode for a prompt just answered, and what it takes for the same from its own cache."""
    before = _cpu_seconds([setting.decode])
    await _asked(setting, Way(subject="decode alone", flow="one url", url=setting.decode.url), prompt)
    ((_, after_s),) = _cpu_seconds([setting.decode]).items()
    local_s = after_s - before[setting.decode.spec.name]
    subject = setting.way.subject
    return {
        pd_measures.cpu_of_decode(len(prompt), subject): Sample(value=used_s, foreign_cores=foreign),
        pd_measures.cpu_above_local_hit(len(prompt), subject): Sample(value=used_s - local_s, foreign_cores=foreign),
    }


async def take_burst(setting: Setting, num_tokens: int) -> Taken:
    """Several prompts at once, until the last of them has its first token."""
    prompts = [setting.prompt(num_tokens) for _ in range(pd_measures.BURST)]
    found: dict[Measure, Sample] = {}
    answers: dict[str, list[Answer]] = {}
    for way in setting.order.sample((setting.colocated, setting.way), k=2):
        noise = ForeignCpu()
        answers[way.subject] = list(await asyncio.gather(*(ask_way(setting, way, prompt) for prompt in prompts)))
        foreign = noise.cores()
        await asyncio.sleep(SETTLE_S)
        last_s = max(answer.first_token_s for answer in answers[way.subject])
        found[pd_measures.all_first_tokens(num_tokens, way.subject)] = Sample(value=1e3 * last_s, foreign_cores=foreign)
    for index in range(len(prompts)):
        compare(setting, {subject: several[index] for subject, several in answers.items()}, f"burst {index + 1}")
    return Taken(found, (pd_measures.all_first_tokens_ratio(num_tokens, setting.way.subject),))


async def take_between(setting: Setting, num_tokens: int) -> Taken:
    """Requests run on decode while the KV of another one comes, its prefill being over; on the plain engine it is computed."""
    prompt = setting.prompt(num_tokens)
    found: dict[Measure, Sample] = {}
    answers: dict[str, Answer] = {}
    for way in setting.order.sample((setting.colocated, setting.way), k=2):
        is_plain = way.subject != setting.way.subject
        answers[way.subject], taken = await _watched_newcomer(setting, prompt, way.subject, is_plain=is_plain)
        found |= taken
        await asyncio.sleep(SETTLE_S)
    compare(setting, answers, f"between {num_tokens:,}")
    subjects = (setting.colocated.subject, setting.way.subject)
    kinds: tuple[pd_measures.Gap, ...] = ("mean", "longest")
    return Taken(found, tuple(pd_measures.gap_ratio(kind, num_tokens, subject) for subject in subjects for kind in kinds))


async def _watched_newcomer(
    setting: Setting, prompt: Sequence[int], subject: str, *, is_plain: bool
) -> tuple[Answer, dict[Measure, Sample]]:
    url, params = setting.plain.url, None
    if not is_plain:
        url, handover = setting.decode.url, setting.legs.handover
        assert handover is not None
        transfer_id = str(uuid.uuid4())
        answered = await ask_prefill(setting.session, setting.legs.prefill_url, prompt, handover.prefill_params(transfer_id))
        params = handover.decode_params(transfer_id, answered)
        setting.tally.remote_tokens.append(len(prompt))
        await asyncio.sleep(SETTLE_S)
    streams: list[list[float]] = [[] for _ in range(pd_measures.NUM_RUNNING)]
    async with _running(setting, url, streams):
        noise = ForeignCpu()
        await asyncio.sleep(IDLE_S)
        asked_s = time.monotonic()
        answer = await ask(setting.session, url, prompt, params=params)
        foreign = noise.cores()
    idle = idle_gaps(streams, asked_s - IDLE_S, asked_s)
    newcomer = newcomer_gaps(streams, asked_s, asked_s + answer.first_token_s, idle) if idle is not None else None
    if idle is None or newcomer is None:
        raise RequestFailed(f"{url}: requests that were to run stood still")
    return answer, _gap_samples(len(prompt), subject, idle, newcomer, foreign)


def _gap_samples(num_tokens: int, subject: str, idle: Gaps, newcomer: Gaps, foreign: float) -> dict[Measure, Sample]:
    found: dict[Measure, Sample] = {}
    moments: tuple[tuple[pd_measures.Moment, Gaps], ...] = (("idle", idle), ("newcomer", newcomer))
    for moment, gaps in moments:
        for kind, value_s in (("mean", gaps.mean_s), ("longest", gaps.longest_s)):
            measure = pd_measures.gap("mean" if kind == "mean" else "longest", moment, num_tokens, subject)
            found[measure] = Sample(value=1e3 * value_s, foreign_cores=foreign)
    return found


@contextlib.asynccontextmanager
async def _running(setting: Setting, url: str, streams: list[list[float]]) -> AsyncIterator[None]:
    """Requests that run there for the time of the block."""
    tasks = [
        asyncio.create_task(
            keep_running(setting.session, url, setting.prompt(RUNNING_PROMPT), max_tokens=RUNNING_TOKENS, arrivals_s=arrivals_s)
        )
        for arrivals_s in streams
    ]
    try:
        deadline_s = time.monotonic() + RUNNING_WAIT_S
        while min(len(arrivals_s) for arrivals_s in streams) < RUNNING_MIN_TOKENS:
            if time.monotonic() > deadline_s or any(task.done() for task in tasks):
                raise RequestFailed(f"{url}: requests that were to run did not")
            await asyncio.sleep(POLL_S)
        yield
        if any(task.done() for task in tasks):
            raise RequestFailed(f"{url}: requests that were to run ended too soon")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask_way(setting: Setting, way: Way, prompt: Sequence[int]) -> Answer:
    """One prompt; counts what decode is to read."""
    if way.subject == setting.way.subject:
        setting.tally.remote_tokens.append(len(prompt))
    return await ask_by(setting.session, way, prompt)


async def _asked(setting: Setting, way: Way, prompt: Sequence[int]) -> Answer:
    answer = await ask_way(setting, way, prompt)
    await asyncio.sleep(SETTLE_S)
    return answer


def compare(setting: Setting, answers: Mapping[str, Answer], case: str) -> None:
    """Count how the subject's answer agrees with the plain engine's."""
    reference, answer = answers[setting.colocated.subject], answers[setting.way.subject]
    setting.tally.count(reference, answer, near_tie=NEAR_TIES[setting.dtype], case=case)


def _cpu_seconds(watched: Sequence[Server]) -> dict[str, float]:
    return {server.spec.name: cpu_use.total_cpu_seconds(server.child.pid) for server in watched}
