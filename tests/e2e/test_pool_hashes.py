"""Engines whose block hashes no other engine can have: told at start, never found out by a hit rate of zero.

User case R15. vLLM 0.29 and newer start sha256 hashes from a fixed seed, but those of xxhash from a random one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_mooncake_ascend.testing.engine_pool import CONNECTOR, PoolEngines, pool_options
from vllm_mooncake_ascend.testing.engine_process import EngineFailed, EngineProcess, wait_all_ready
from vllm_mooncake_ascend.testing.engine_prompts import Reference, random_prompt
from vllm_mooncake_ascend.testing.pool_master import PoolMaster

pytestmark = pytest.mark.engine

STAND_IN = '''
"""Stands in for the package of this name, which is not among the test tools: another hash of the same length."""

import hashlib


def xxh3_128_digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
'''
REASON = "block hashes cannot be shared: with prefix_caching_hash_algo=xxhash"
PRIVATE = "this engine will share with nobody but itself"
NUM_TOKENS = 500
NUM_HIT_TOKENS = 480


@pytest.fixture(scope="module")
def master() -> Iterator[PoolMaster]:
    master = PoolMaster()
    yield master
    master.end()


@pytest.fixture(scope="module")
def start_with_xxhash(
    start_for_module: Callable[..., EngineProcess], master: PoolMaster, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., EngineProcess]:
    """Starts engines of one pool that hash with xxhash."""
    folder: Path = tmp_path_factory.mktemp("stand in")
    (folder / "xxhash.py").write_text(STAND_IN)

    def start(name: str, **options: object) -> EngineProcess:
        return start_for_module(
            name,
            kv_role="kv_both",
            connector=CONNECTOR,
            extra=pool_options(master, segment_bytes="64MB", **options),
            prefix_caching_hash_algo="xxhash",
            environment={"PYTHONPATH": str(folder)},
        )

    return start


def test_hashes_that_nobody_can_share_are_loud(start_with_xxhash: Callable[..., EngineProcess], reference: Reference) -> None:
    """Goal: a seed that each process draws for itself is refused, by its name and with the remedy; with the setting that says
    so it is a warning and a metric, and each engine shares with itself alone. Method: one engine without the setting, two
    with it."""
    refused = start_with_xxhash("hashes-refused")
    private = [start_with_xxhash(f"hashes-private-{index}", allow_private_hashes=True) for index in range(2)]
    with pytest.raises(EngineFailed):
        refused.wait_ready()
    told = refused.log_path.read_text(errors="replace")
    assert [True] * 4 == [word in told for word in (REASON, "sha256", "PYTHONHASHSEED=0", "allow_private_hashes")]

    wait_all_ready(private)
    prompt = random_prompt("private", NUM_TOKENS)
    pool = PoolEngines(private, reference)
    hits = [pool.compute(engine, prompt).num_cached_tokens for engine in private]
    pool.forget(pool.first)
    hits.append(pool.compute(pool.first, prompt).num_cached_tokens)
    assert [0, 0, NUM_HIT_TOKENS] == hits
    assert [1, 1] == [engine.metric("pool_hashes_private") for engine in private]
    assert [1, 1] == [engine.log_path.read_text(errors="replace").count(PRIVATE) for engine in private]
