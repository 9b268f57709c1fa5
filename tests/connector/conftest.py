"""Engines made by hand: what tests of the connector against vLLM's own objects share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parents[2] / "build" / "models" / "tiny-gqa"


@pytest.fixture(scope="session")
def process_groups(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM's process groups of one rank."""
    pytest.importorskip("vllm")
    if not MODEL.exists():
        pytest.skip("the tiny models are not made yet: make models")
    from tests.connector import hand_engine

    hand_engine.offline()
    hand_engine.start_process_groups(str(tmp_path_factory.mktemp("groups")))


@pytest.fixture
def make_engine(process_groups: None) -> Iterator[Callable[..., Any]]:
    """Makes hand engines and, after the test, checks that each gave every block back before it is closed."""
    from tests.connector.hand_engine import HandEngine

    engines: list[HandEngine] = []

    def make(role: str, **options: Any) -> HandEngine:
        engines.append(HandEngine(str(MODEL), role, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def pool_master() -> Iterator[Any]:
    """A master of this module's tests alone."""
    pytest.importorskip("mooncake")
    from vllm_mooncake_ascend.testing.pool_master import PoolMaster

    master = PoolMaster()
    yield master
    master.end()


def pool_options(master: Any, *, tenant: str) -> dict[str, Any]:
    """Of a hand engine that shares a pool with those of the same tenant."""
    return {
        "connector": "MooncakeStoreConnectorV1",
        "master_address": master.address,
        "segment_bytes": "64MB",
        "tenant": tenant,
        "lookup_wait_ms": 2000,
    }


@pytest.fixture
def make_pool_engine(make_engine: Callable[..., Any], pool_master: Any) -> Callable[..., Any]:
    """Makes hand engines that share a pool with those of the same test."""
    tenant = uuid.uuid4().hex

    def make(role: str = "kv_both", **options: Any) -> Any:
        return make_engine(role, **{**pool_options(pool_master, tenant=tenant), **options})

    return make
