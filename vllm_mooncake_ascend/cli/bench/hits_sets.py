"""The sets of engines of `bench hits`, each beside a plain engine, and what is asked of them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import aiohttp
import msgspec

from vllm_mooncake_ascend.cli import processes, servers, startup
from vllm_mooncake_ascend.cli.bench.foreign_cpu import ForeignCpu
from vllm_mooncake_ascend.cli.bench.pd_cases import SETTLE_S as REST_S
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.run import Run
from vllm_mooncake_ascend.cli.bench.samples import Goal, Sample
from vllm_mooncake_ascend.cli.demo_client import read_metrics
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, Server
from vllm_mooncake_ascend.cli.master_http import MasterHttp

LOGS = Path("build/bench/logs")
MODEL_NAME = "bench"
SEGMENT = "1GB"
ASK_S = 180.0
SETTLE_S = 15.0
QUIET_S = 0.5
POLL_S = 0.1
FIRST_TOKEN, END_TOKEN = 1_000, 30_000
HITS = "vllm:external_prefix_cache_hits_total"
COLD, LOCAL, POOL = "cold", "local hit", "pool hit"
RUNNING = 8
"""Requests that decode at once."""
RUNNING_TOKENS = 96
RUNNING_PROMPT = 24
"""With the answer less than a block: neither saved nor loaded."""
GOALS = {
    (POOL, LOCAL): Goal(limit=1.5, is_ceiling=True),
    (COLD, ""): Goal(limit=1.03, is_ceiling=True),
    (LOCAL, ""): Goal(limit=1.05, is_ceiling=True),
    ("decode", ""): Goal(limit=1 / 0.98, is_ceiling=True),
}
"""Of ratios of ours: of two ways, or of one way with the pool and without."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One set."""

    subject: str
    role: str
    """Of `servers.CONNECTORS`, or another word for none of ours."""
    peer_connector: str = ""

    @property
    def plain(self) -> str:
        """The engine beside it, by name: figures of two sets are of different minutes."""
        return f"no connector, beside {self.subject}"


KINDS = {
    "ours": Kind(subject="ours", role=servers.POOL),
    "vllm": Kind(subject="vLLM's store", role="peer", peer_connector="MooncakeStoreConnector"),
}
_PLAIN = Kind(subject="no connector", role="plain")


class _Set(msgspec.Struct, frozen=True, kw_only=True):
    """A set that runs."""

    kind: Kind
    session: aiohttp.ClientSession
    first: str
    """URL of the engine that computes and saves."""
    second: str
    """That loads."""
    plain: str
    master: MasterHttp


class Failed(Exception):
    """A request was not answered well."""


class _Found(msgspec.Struct):
    """What came of one set."""

    samples: dict[Measure, list[Sample]]
    num_failed: int = 0
    num_missed: int = 0
    """Prompts of which the second engine loaded nothing."""
    num_different: int = 0
    """Prompts whose pool hit and local hit were answered with other tokens."""

    def add(self, taken: Mapping[Measure, Sample]) -> None:
        """What belongs together: all of it counts, or none."""
        for measure, sample in taken.items():
            self.samples.setdefault(measure, []).append(sample)


def measure_set(run: Run, kind: Kind, model: Path, dtype: str, lengths: Sequence[int]) -> None:
    """Start the set, ask, stop it, and add what was found to the run.

    Raises:
        ServerFailed: a server did not come up.
    """
    with (
        processes.termination_as_interrupt(),
        tempfile.TemporaryDirectory(prefix="bench-hits-") as folder,
        LocalCluster(LOGS) as cluster,
    ):
        master = cluster.start(servers.master())
        cluster.wait_ready()
        kinds = {"first": kind, "second": kind, "plain": _PLAIN}
        urls = {
            name: cluster.start(_engine(f"{kind.role}-{name}", one, model, dtype, master, Path(folder))).url
            for name, one in kinds.items()
        }
        with startup.progress(run.console, cluster) as show:
            cluster.wait_ready(on_poll=show)
        http = MasterHttp(master.url.removeprefix("http://"))
        with run.console.status(f"{kind.subject}: asking"):
            found = asyncio.run(_ask_all(run, kind, urls, http, lengths))
    run.add(found.samples, _comparisons(kind, found.samples))
    pool_hits = [sample.value for measure, some in found.samples.items() if POOL in measure.name for sample in some]
    run.note(
        f"{kind.subject}: of {run.num_rounds * len(lengths)} prompts and {run.num_rounds} times {RUNNING} requests "
        f"{found.num_failed} failed, {found.num_missed} loaded "
        f"nothing, {found.num_different} were answered otherwise than a local hit; the slowest pool hit took "
        f"{max(pool_hits, default=0.0):.0f} ms."
    )


def _engine(name: str, kind: Kind, model: Path, dtype: str, master: Server, folder: Path) -> servers.ServerSpec:
    arguments = [
        *("--served-model-name", MODEL_NAME, "--dtype", dtype, "--enforce-eager", "--max-model-len", "4096"),
        *("--max-num-batched-tokens", "512", "--max-num-seqs", "8"),
    ]
    environment = servers.cpu_environment(os.environ, kv_cache_gib=1) | servers.pool_environment(os.environ)
    extra: Mapping[str, object] | None = None
    if kind.peer_connector:
        path = folder / "mooncake.json"
        path.write_text(json.dumps(_peer_config(master.rpc_address)))
        environment["MOONCAKE_CONFIG_PATH"] = str(path)
        arguments += ["--kv-transfer-config", json.dumps({"kv_connector": kind.peer_connector, "kv_role": "kv_both"})]
    elif kind is not _PLAIN:
        extra = servers.pool_settings(kind.role, master.rpc_address, SEGMENT)
    return servers.engine(name, kind.role, str(model), arguments=arguments, environment=environment, extra=extra)


def _peer_config(master_address: str) -> dict[str, object]:
    return {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master_address,
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": SEGMENT,
        "local_buffer_size": "64MB",
    }


# --- asking ------------------------------------------------------------------------------------------------------------


async def _ask_all(run: Run, kind: Kind, urls: Mapping[str, str], master: MasterHttp, lengths: Sequence[int]) -> _Found:
    found = _Found(samples={})
    draw = random.Random(run.seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
        this = _Set(kind=kind, session=session, master=master, **urls)
        for url in urls.values():
            await _ask(session, url, _prompt(draw, 600))
        for _ in range(run.num_rounds):
            for length in draw.sample((*lengths, 0), k=len(lengths) + 1):
                try:
                    await (_ask_one(this, draw, found, length=length) if length else _decode(this, draw, found))
                except (Failed, aiohttp.ClientError, TimeoutError):
                    found.num_failed += 1
    return found


async def _ask_one(this: _Set, draw: random.Random, found: _Found, *, length: int) -> None:
    """One prompt, all ways; its samples count only when all were answered."""
    prompt = _prompt(draw, length)
    taken: dict[Measure, Sample] = {}
    used_before = await _used_bytes(this.master)
    texts = {}
    for subject, url in draw.sample(_with_and_without(this), k=2):
        taken[_measure(COLD, length, subject)], _ = await _sample(this.session, url, prompt)
        if url == this.first:
            await _settled(this.master, above=used_before)
    hits_before = (await read_metrics(this.session, this.second)).get(HITS, 0.0)
    taken[_measure(POOL, length, this.kind.subject)], text = await _sample(this.session, this.second, prompt)
    # Published with a later step.
    await _ask(this.session, this.second, prompt[:100])
    found.num_missed += (await read_metrics(this.session, this.second)).get(HITS, 0.0) == hits_before
    for subject, url in draw.sample(_with_and_without(this), k=2):
        taken[_measure(LOCAL, length, subject)], texts[subject] = await _sample(this.session, url, prompt)
    found.num_different += text != texts[this.kind.subject]
    found.add(taken)


async def _decode(this: _Set, draw: random.Random, found: _Found) -> None:
    """Requests that decode, all at once: what the connector costs where it has nothing to do."""
    taken = {}
    for subject, url in draw.sample(_with_and_without(this), k=2):
        prompts = [_prompt(draw, RUNNING_PROMPT) for _ in range(RUNNING)]
        await asyncio.sleep(REST_S)
        noise = ForeignCpu()
        started_s = time.monotonic()
        await asyncio.gather(*(_ask(this.session, url, prompt, max_tokens=RUNNING_TOKENS) for prompt in prompts))
        taken[_decode_measure(subject)] = Sample(value=1e3 * (time.monotonic() - started_s), foreign_cores=noise.cores())
    found.add(taken)


def _with_and_without(this: _Set) -> list[tuple[str, str]]:
    return [(this.kind.subject, this.first), (this.kind.plain, this.plain)]


async def _sample(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[Sample, str]:
    """After a rest, in which the queues of engines that were asked before stop to spin."""
    await asyncio.sleep(REST_S)
    noise = ForeignCpu()
    started_s = time.monotonic()
    text = await _ask(session, url, prompt)
    seconds = time.monotonic() - started_s
    return Sample(value=1e3 * seconds, foreign_cores=noise.cores()), text


async def _ask(session: aiohttp.ClientSession, url: str, prompt: list[int], *, max_tokens: int = 1) -> str:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise Failed(f"{url} answered {response.status}")
        return str((await response.json())["choices"][0]["text"])


async def _used_bytes(master: MasterHttp) -> int:
    return sum(segment.used_bytes for segment in await asyncio.to_thread(master.segments))


async def _settled(master: MasterHttp, *, above: int) -> None:
    """Until what was saved is in the pool; at the latest after SETTLE_S."""
    deadline_s = time.monotonic() + SETTLE_S
    used_bytes, changed_s = above, time.monotonic()
    while time.monotonic() < deadline_s and (used_bytes == above or time.monotonic() - changed_s < QUIET_S):
        await asyncio.sleep(POLL_S)
        now_bytes = await _used_bytes(master)
        if now_bytes != used_bytes:
            used_bytes, changed_s = now_bytes, time.monotonic()


def _prompt(draw: random.Random, length: int) -> list[int]:
    """Token ids nobody has asked before."""
    return [draw.randrange(FIRST_TOKEN, END_TOKEN) for _ in range(length)]


def _measure(name: str, length: int, subject: str) -> Measure:
    return Measure(name=f"time to first token, {name}", case=f"{length:,} tokens", subject=subject, unit="ms", clock="wall")


def _decode_measure(subject: str) -> Measure:
    case = f"{RUNNING} requests of {RUNNING_TOKENS} tokens"
    return Measure(name="decode", case=case, subject=subject, unit="ms", clock="wall")


def _comparisons(kind: Kind, samples: Mapping[Measure, Sequence[Sample]]) -> list[Comparison]:
    """Pool hits over what the same engines did without the pool, and all else over the plain engine beside them."""
    goals = GOALS if kind.role == servers.POOL else {}
    found = []
    for above in samples:
        what, _, way = above.name.rpartition(", ")
        if above.subject != kind.subject:
            continue
        if way == POOL:
            others = {other: msgspec.structs.replace(above, name=f"{what}, {other}") for other in (COLD, LOCAL)}
        else:
            others = {"": msgspec.structs.replace(above, subject=kind.plain)}
        found += [Comparison(above=above, below=below, goal=goals.get((way, other))) for other, below in others.items()]
    return found
