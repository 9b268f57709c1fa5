"""Engines of the end-to-end tests: a pair, a pool and a plain engine for all of them, extra ones where a test kills or tunes.

Everything runs in float32 with blocks of 32 tokens and prefill chunks of 512, so that answers must be equal token by
token and block edges are near. `pair` is the fixture that most tests take: it ends with the proof that nothing was left
behind; `pool` is the same for two engines that share a prefix pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_mooncake_ascend.cli import processes
from vllm_mooncake_ascend.testing.engine_messages import EngineSpec
from vllm_mooncake_ascend.testing.engine_pair import SHORT_GOLDEN_LENGTHS, EnginePair, Reference
from vllm_mooncake_ascend.testing.engine_pool import CONNECTOR, PoolEngines, pool_options
from vllm_mooncake_ascend.testing.engine_process import EngineProcess, wait_all_ready
from vllm_mooncake_ascend.testing.pool_master import PoolMaster

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / "build" / "logs" / "e2e"
GQA, FAT = "tiny-gqa", "tiny-fat"
FAT_LEASE_TTL_S = 2.0
ROLES = (("prefill", "kv_producer"), ("decode", "kv_consumer"))
STREAM = {"transfer_mode": "stream"}
"""Of the shared pairs: what is sent one leg after the other goes as it does after_prefill, what is sent at once is streamed."""
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 256,
    "seed": 0,
}

Start = Callable[..., EngineProcess]
MakePair = Callable[..., EnginePair]


def engine_spec(name: str, model: str, kv_role: str = "", *, extra: dict[str, Any] | None = None, **args: Any) -> EngineSpec:
    folder = ROOT / "build" / "models" / model
    assert folder.exists(), f"{folder} is missing: run python scripts/make_models.py"
    connector = {"connector": args.pop("connector")} if "connector" in args else {}
    return EngineSpec(
        name=name,
        model=str(folder),
        kv_role=kv_role,
        engine_args={**ENGINE_ARGS, **args},
        extra_config=extra or {},
        **connector,
    )


def _starter(started: list[EngineProcess]) -> Start:
    def start(
        name: str, model: str = GQA, kv_role: str = "", *, extra: dict[str, Any] | None = None, **args: Any
    ) -> EngineProcess:
        environment = args.pop("environment", None)
        spec = engine_spec(name, model, kv_role, extra=extra, **args)
        engine = EngineProcess(spec, log_folder=LOGS, environment=environment)
        engine.log_path.unlink(missing_ok=True)
        started.append(engine)
        engine.start()
        return engine

    return start


def _kill(started: list[EngineProcess]) -> None:
    """A polite end takes each engine ten seconds, and shows nothing here: `test_both_roles` looks at one."""
    for engine in started:
        engine.kill()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts extra engines of one test, without waiting for them; ends them afterwards."""
    started: list[EngineProcess] = []
    yield _starter(started)
    _kill(started)


@pytest.fixture(scope="module")
def start_for_module() -> Iterator[Start]:
    """Starts engines that the tests of one module share."""
    started: list[EngineProcess] = []
    yield _starter(started)
    _kill(started)


@pytest.fixture(scope="session")
def _plain() -> Iterator[EngineProcess]:
    """Started, and perhaps not ready yet."""
    started: list[EngineProcess] = []
    yield _starter(started)("plain", GQA)
    _kill(started)


@pytest.fixture(scope="session")
def reference(_plain: EngineProcess) -> Reference:
    """The plain engine of the small model."""
    _plain.wait_ready()
    return Reference(_plain)


@pytest.fixture(scope="session")
def _session(_plain: EngineProcess, request: pytest.FixtureRequest) -> Iterator[EnginePair]:
    started: list[EngineProcess] = []
    begin = _starter(started)
    prefill, decode = (begin(name, GQA, role, extra=STREAM) for name, role in ROLES)
    try:
        wait_all_ready(started)
        pair = EnginePair(prefill, decode, request.getfixturevalue("reference"))
        pair.warm_up()
        yield pair
    finally:
        _kill(started)


@pytest.fixture
def pair(_session: EnginePair) -> Iterator[EnginePair]:
    """The shared pair; when the test is over, golden answers must be right and nothing may be left behind."""
    _session.revive()
    yield _session
    assert {} == _session.remains()


@pytest.fixture(scope="session")
def models() -> Path:
    """Folder of the test models."""
    return ROOT / "build" / "models"


@pytest.fixture(scope="session")
def logs() -> Path:
    """Where the logs of all engines and servers of these tests go."""
    return LOGS


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Gives ports that nobody listens on, for engines that must come back on the same one."""
    return processes.free_port


@pytest.fixture(scope="module")
def _fat(start_for_module: Start, free_port: Callable[[], int]) -> EnginePair:
    size = {"num_gpu_blocks_override": 100, "max_model_len": 2048}
    lease = {"lease_ttl_s": FAT_LEASE_TTL_S, "side_channel_port": free_port(), "max_pinned_ratio": 0.9}
    engines = [
        start_for_module("fat-prefill", FAT, "kv_producer", extra=STREAM | lease, **size),
        start_for_module("fat-decode", FAT, "kv_consumer", extra=STREAM, **size),
        start_for_module("fat-plain", FAT, **size),
    ]
    wait_all_ready(engines)
    prefill, decode, plain = engines
    fat = EnginePair(prefill, decode, Reference(plain), golden_lengths=SHORT_GOLDEN_LENGTHS)
    fat.warm_up()
    return fat


@pytest.fixture
def fat(_fat: EnginePair) -> Iterator[EnginePair]:
    """A pair whose transfers last long enough to be hit: 256 KiB of KV a token, a short send lease, a fixed side channel.

    Afterwards answers are right and nothing is left behind on the engines that live.
    """
    _fat.revive()
    yield _fat
    assert {} == _fat.remains()


@pytest.fixture(scope="session")
def pool_master() -> Iterator[PoolMaster]:
    """The master of `pool`."""
    master = PoolMaster()
    yield master
    master.end()


@pytest.fixture(scope="session")
def _pool(_plain: EngineProcess, pool_master: PoolMaster, request: pytest.FixtureRequest) -> Iterator[PoolEngines]:
    started: list[EngineProcess] = []
    begin = _pool_starter(_starter(started), pool_master)
    engines = [begin("pool-first"), begin("pool-second", extra={"segment_bytes": 0, "save_decode": True})]
    try:
        wait_all_ready(engines)
        pool = PoolEngines(engines, request.getfixturevalue("reference"))
        pool.warm_up()
        yield pool
    finally:
        _kill(started)


@pytest.fixture
def pool(_pool: PoolEngines) -> Iterator[PoolEngines]:
    """Two engines that share a pool, whose memory the first one lends; the second one saves what it generates, too. When the
    test is over, golden answers must be right and nothing may be left behind."""
    _pool.revive()
    yield _pool
    assert {} == _pool.remains()


@pytest.fixture
def start_in_pool(start: Start, _pool: PoolEngines, pool_master: PoolMaster) -> Start:
    """Starts extra engines of one test that share the pool of `pool`. They lend nothing to it: memory that goes with an engine
    spoils the puts of others until the master has noticed."""
    return _pool_starter(start, pool_master, segment_bytes=0)


def _pool_starter(start: Start, master: PoolMaster, **options: object) -> Start:
    def start_in_pool(name: str, model: str = GQA, *, extra: dict[str, Any] | None = None, **args: Any) -> EngineProcess:
        return start(
            name, model, "kv_both", extra=pool_options(master, **{**options, **(extra or {})}), connector=CONNECTOR, **args
        )

    return start_in_pool
