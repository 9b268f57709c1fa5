"""The sets of engines of `bench hits`, and what is asked of them."""

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
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.run import Run
from vllm_mooncake_ascend.cli.bench.samples import Sample
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


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One set."""

    subject: str
    num_engines: int
    role: str
    """Of `servers.CONNECTORS`, or another word for none of ours."""
    peer_connector: str = ""


KINDS = {
    "none": Kind(subject="no connector", num_engines=1, role="plain"),
    "ours": Kind(subject="ours", num_engines=2, role=servers.POOL),
    "vllm": Kind(subject="vLLM's store", num_engines=2, role="peer", peer_connector="MooncakeStoreConnector"),
}


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
        master = None
        if kind.num_engines > 1:
            master = cluster.start(servers.master())
            cluster.wait_ready()
        engines = [
            cluster.start(_engine(f"{kind.role}{number}", kind, model, dtype, master, Path(folder)))
            for number in range(kind.num_engines)
        ]
        with startup.progress(run.console, cluster) as show:
            cluster.wait_ready(on_poll=show)
        http = None if master is None else MasterHttp(master.url.removeprefix("http://"))
        with run.console.status(f"{kind.subject}: asking"):
            found = asyncio.run(_ask_all(run, kind, [engine.url for engine in engines], http, lengths))
    run.add(found.samples, _comparisons(found.samples))
    if kind.num_engines > 1:
        run.note(
            f"{kind.subject}: of {run.num_rounds * len(lengths)} prompts {found.num_failed} failed, {found.num_missed} loaded "
            f"nothing, {found.num_different} were answered otherwise than a local hit."
        )


def _engine(name: str, kind: Kind, model: Path, dtype: str, master: Server | None, folder: Path) -> servers.ServerSpec:
    arguments = [
        *("--served-model-name", MODEL_NAME, "--dtype", dtype, "--enforce-eager", "--max-model-len", "4096"),
        *("--max-num-batched-tokens", "512", "--max-num-seqs", "8"),
    ]
    environment = servers.cpu_environment(os.environ, kv_cache_gib=1) | servers.pool_environment(os.environ)
    extra: Mapping[str, object] | None = None
    if master is not None and kind.peer_connector:
        path = folder / "mooncake.json"
        path.write_text(json.dumps(_peer_config(master.rpc_address)))
        environment["MOONCAKE_CONFIG_PATH"] = str(path)
        arguments += ["--kv-transfer-config", json.dumps({"kv_connector": kind.peer_connector, "kv_role": "kv_both"})]
    elif master is not None:
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


async def _ask_all(run: Run, kind: Kind, urls: Sequence[str], master: MasterHttp | None, lengths: Sequence[int]) -> _Found:
    found = _Found(samples={})
    draw = random.Random(run.seed)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as session:
        for url in urls:
            await _ask(session, url, _prompt(draw, 600))
        for _ in range(run.num_rounds):
            for length in draw.sample(lengths, k=len(lengths)):
                try:
                    await _ask_one(session, kind, urls, master, _prompt(draw, length), found)
                except (Failed, aiohttp.ClientError, TimeoutError):
                    found.num_failed += 1
    return found


async def _ask_one(
    session: aiohttp.ClientSession,
    kind: Kind,
    urls: Sequence[str],
    master: MasterHttp | None,
    prompt: list[int],
    found: _Found,
) -> None:
    """One prompt, all ways; its samples count only when all were answered."""
    taken: dict[str, Sample] = {}
    used_before = await _used_bytes(master)
    taken[COLD], _ = await _sample(session, urls[0], prompt)
    text = ""
    if master is not None:
        await _settled(master, above=used_before)
        hits_before = (await read_metrics(session, urls[1])).get(HITS, 0.0)
        taken[POOL], text = await _sample(session, urls[1], prompt)
        # Published with a later step.
        await _ask(session, urls[1], prompt[:100])
        found.num_missed += (await read_metrics(session, urls[1])).get(HITS, 0.0) == hits_before
    taken[LOCAL], local_text = await _sample(session, urls[0], prompt)
    found.num_different += master is not None and text != local_text
    for name, sample in taken.items():
        found.samples.setdefault(_measure(name, len(prompt), kind.subject), []).append(sample)


async def _sample(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[Sample, str]:
    noise = ForeignCpu()
    started_s = time.monotonic()
    text = await _ask(session, url, prompt)
    seconds = time.monotonic() - started_s
    return Sample(value=1e3 * seconds, foreign_cores=noise.cores()), text


async def _ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> str:
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise Failed(f"{url} answered {response.status}")
        return str((await response.json())["choices"][0]["text"])


async def _used_bytes(master: MasterHttp | None) -> int:
    if master is None:
        return 0
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


def _comparisons(samples: Mapping[Measure, Sequence[Sample]]) -> list[Comparison]:
    """Pool hits over what the same engines did without the pool."""
    by_name = {(one.name, one.case): one for one in samples}
    return [
        Comparison(above=pool, below=by_name[name, pool.case])
        for pool in samples
        if POOL in pool.name
        for name in (f"time to first token, {COLD}", f"time to first token, {LOCAL}")
    ]
