"""The demo's second part: a prefix computed by one engine is loaded by another from the pool between them.

Each scenario is a chat that one engine has served so far; then its last turn is asked of three engines, in this order:

    a plain engine, with a salt that no cache knows    cold: all of it is computed
    the other engine of the pool, for the first time   pool hit: the prefix is loaded
    the engine that had the chat                       local hit: the prefix is in its own cache

All three must say the same.
"""

from __future__ import annotations

import asyncio
import time

import aiohttp
import msgspec
from rich.console import Console

from vllm_mooncake_ascend.cli.demo_client import Answer, ask, new_session, read_metrics
from vllm_mooncake_ascend.cli.demo_pool_report import Loaded, PoolRow, row_of
from vllm_mooncake_ascend.cli.demo_prompts import SCENARIOS, Scenario
from vllm_mooncake_ascend.cli.master_http import MasterHttp

SETTLE_S = 10.0
"""Saves run behind the answers, and an engine publishes what a step did with a later step."""
QUIET_S = 0.5
"""A pool that has not grown for so long has all that was saved."""
POLL_S = 0.1


class Engines(msgspec.Struct, frozen=True, kw_only=True):
    """Where the demo's servers answer."""

    model: str
    first: str
    """Has the chat, and saves into the pool."""
    second: str
    """Has never seen it."""
    plain: str
    """vLLM alone."""


async def run_scenarios(engines: Engines, master: MasterHttp, console: Console) -> list[PoolRow]:
    """All scenarios, one after the other."""
    rows = []
    async with new_session() as session:
        for scenario in SCENARIOS:
            with console.status(f"pool: {scenario.name}"):
                rows.append(await _run(session, engines, master, scenario))
            if not console.is_terminal:
                console.print(f"pool: {scenario.name} done")
    return rows


async def _run(session: aiohttp.ClientSession, engines: Engines, master: MasterHttp, scenario: Scenario) -> PoolRow:
    async def answer_of(url: str, turn: int, *, salt: str = "") -> Answer:
        return await ask(session, url, engines.model, scenario.prompt(turn, tuple(answers)).salted(salt))

    used_before = await _used_bytes(master)
    answers: list[str] = []
    last = len(scenario.turns) - 1
    for turn in range(last):
        answers.append((await answer_of(engines.first, turn)).text)
    used_after = await _settled_bytes(master, above=used_before)
    cold = await answer_of(engines.plain, last, salt=scenario.name)
    before = await read_metrics(session, engines.second)
    pool_hit = await answer_of(engines.second, last)
    loaded = await _loaded_since(session, engines.second, before)
    local_hit = await answer_of(engines.first, last)
    return row_of(scenario, cold, local_hit, pool_hit, loaded, bytes_put=used_after - used_before)


async def _loaded_since(session: aiohttp.ClientSession, url: str, before: dict[str, float]) -> Loaded:
    """What the engine loaded since; waits a moment until something is counted."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        loaded = Loaded.between(before, await read_metrics(session, url))
        if loaded.num_tokens > 0 or time.monotonic() > deadline_s:
            return loaded
        await asyncio.sleep(POLL_S)


async def _used_bytes(master: MasterHttp) -> int:
    segments = await asyncio.to_thread(master.segments)
    return sum(segment.used_bytes for segment in segments)


async def _settled_bytes(master: MasterHttp, *, above: int) -> int:
    """What the pool holds once saves have come to an end; at the latest after SETTLE_S."""
    used_bytes, changed_s = above, time.monotonic()
    deadline_s = changed_s + SETTLE_S
    while time.monotonic() < deadline_s:
        now_bytes = await _used_bytes(master)
        if now_bytes != used_bytes:
            used_bytes, changed_s = now_bytes, time.monotonic()
        elif used_bytes > above and time.monotonic() - changed_s > QUIET_S:
            break
        await asyncio.sleep(POLL_S)
    return used_bytes
