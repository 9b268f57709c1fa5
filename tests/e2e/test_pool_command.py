"""`pool` beside a real engine: what it saved is counted, and a block with wrong bytes is found."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli import demo, servers
from vllm_mooncake_ascend.cli.demo_client import ask, new_session
from vllm_mooncake_ascend.cli.demo_prompts import DemoPrompt
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, Server
from vllm_mooncake_ascend.cli.main import build_app
from vllm_mooncake_ascend.cli.master_http import MasterHttp
from vllm_mooncake_ascend.engines import environment
from vllm_mooncake_ascend.engines.base import KeyOutcome, KVStore
from vllm_mooncake_ascend.engines.native_store import StoreSettings
from vllm_mooncake_ascend.engines.sealed_store import SealedStore
from vllm_mooncake_ascend.engines.store import MooncakeStore
from vllm_mooncake_ascend.planner.store_batch import SEAL_BYTES
from vllm_mooncake_ascend.testing.store_world import MIB, memory_for, store_batch_of

MODEL = Path(__file__).resolve().parents[2] / "build/models/tiny-gqa"
NUM_BLOCKS = 3
PROMPT = DemoPrompt(name="saved", chat=False, stream=False, text=" ".join(f"word{number}" for number in range(120)))
SAVED_S = 20.0


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A master, and an engine that saves the whole blocks of PROMPT and lives as long as the test: its memory is the pool's."""
    for name, value in (
        environment.safe_defaults({}, protocol="tcp", host="127.0.0.1") | environment.store_defaults({})
    ).items():
        monkeypatch.setenv(name, value)
    with LocalCluster(tmp_path / "logs") as cluster:
        master = cluster.start(servers.master())
        cluster.wait_ready()
        engine = cluster.start(
            servers.engine(
                "pool",
                servers.POOL,
                str(MODEL),
                arguments=demo.engine_arguments("float32"),
                environment=servers.cpu_environment(os.environ, kv_cache_gib=1) | servers.pool_environment(os.environ),
                extra=servers.pool_settings(servers.POOL, master.rpc_address, "64MB"),
            )
        )
        cluster.wait_ready()
        asyncio.run(_ask(engine.url))
        yield master


async def _ask(url: str) -> None:
    async with new_session() as session:
        await ask(session, url, demo.MODEL_NAME, PROMPT)


def run(master: Server, *words: str) -> tuple[int, object]:
    options = ("--master", master.rpc_address, "--json")
    result = CliRunner().invoke(build_app(), ["pool", words[0], *options, *words[1:]])
    return result.exit_code, json.loads(result.stdout)


def saved_keys(master: Server) -> list[str]:
    """Saves run behind the answer."""
    http = MasterHttp(master.url.removeprefix("http://"))
    deadline_s = time.monotonic() + SAVED_S
    while len(keys := http.keys()) < NUM_BLOCKS and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return keys


def overwrite(master: Server, key: str, store: KVStore) -> None:
    """Other bytes of the same length in place of the block, with a seal that is right."""
    size = MasterHttp(master.url.removeprefix("http://")).sizes([key])[key] - SEAL_BYTES
    store.connect()
    assert (KeyOutcome.DONE,) == store.remove([key], prefix=key[:32]).outcomes
    source = memory_for(store, 1, size)
    source[:] = 60
    assert (KeyOutcome.ACCEPTED,) == store.put([key], store_batch_of(source)).outcomes


@pytest.mark.e2e
def test_a_block_with_wrong_bytes_is_found(master: Server) -> None:
    """What the engine saved equals a recomputation; then the bytes of one block are replaced."""
    keys = saved_keys(master)
    verify = ("verify", "--model", str(MODEL), "--prompt", PROMPT.text, *demo.engine_arguments("float32"))
    settings = StoreSettings(host="127.0.0.1", protocol="tcp", master_address=master.rpc_address, segment_bytes=16 * MIB)
    store = SealedStore(MooncakeStore(settings))
    try:
        overwrite(master, keys[0], store)
        code, (verdict,) = run(master, *verify)
    finally:
        store.close()
    seen = (verdict["in_pool"], verdict["equal"] + verdict["close"], verdict["different"], verdict["unread"])
    assert (1, len(keys), (len(keys), len(keys) - 1, 1, 0)) == (code, verdict["num_objects"], seen)
    assert {verdict["namespace"]} == {key[:32] for key in keys}


@pytest.mark.e2e
def test_an_engine_that_ends_is_told_with_its_last_words() -> None:
    """There is no such model."""
    words = ["pool", "verify", "--model", "no/such/model", "--master", "127.0.0.1:9", "--prompt", "Hello?"]
    result = CliRunner().invoke(build_app(), words)
    assert (2, True) == (result.exit_code, "the end of its log" in result.output), result.output
