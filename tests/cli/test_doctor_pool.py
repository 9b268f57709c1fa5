"""What the doctor says about a prefix pool."""

from __future__ import annotations

import json
import socket

import msgspec
import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli.doctor_lease import lease_of, measure_lease
from vllm_mooncake_ascend.cli.doctor_pool import Lease, Master, findings_of, look_at, pool_config
from vllm_mooncake_ascend.cli.main import build_app
from vllm_mooncake_ascend.cli.master_http import MasterHttp, Segment
from vllm_mooncake_ascend.config import PoolConfig, parse_pool
from vllm_mooncake_ascend.engines import environment
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.testing.memory_store import MemoryPool
from vllm_mooncake_ascend.testing.mooncake_store_world import ProcessOwner
from vllm_mooncake_ascend.testing.pool_master import PoolMaster

ADDRESS = "127.0.0.1:50051"
SEGMENT = Segment(name="127.0.0.1:1", status="OK", used_bytes=0, capacity_bytes=1 << 30)


def config(**options: object) -> PoolConfig:
    made, _ = parse_pool({"master_address": ADDRESS, **options}, {}, device_type="cpu", default_host="127.0.0.1")
    return made


def master(**changes: object) -> Master:
    good = Master(address=ADDRESS, connect_error="", metrics_error="", segments=(SEGMENT,))
    return msgspec.structs.replace(good, **changes)


@pytest.mark.parametrize(
    ("found", "options", "states"),
    [
        (master(), {}, ["ok", "ok", "skipped"]),
        (master(connect_error="refused"), {}, ["error"]),
        (master(metrics_error="refused"), {}, ["ok", "skipped", "skipped"]),
        (master(segments=()), {}, ["ok", "ok", "skipped"]),
        (master(segments=()), {"segment_bytes": 0}, ["ok", "warning", "skipped"]),
    ],
    ids=["good", "no master", "no metrics port", "engines will lend", "nobody lends"],
)
def test_a_pool_is_judged(found: Master, options: dict[str, object], states: list[str]) -> None:
    """Masters that answer, do not, and that nobody lends memory to."""
    assert states == [finding.state for finding in findings_of(config(**options), found)]


def test_the_object_lease_the_master_must_have_is_told() -> None:
    """In milliseconds, as its option wants it."""
    (lease,) = [found for found in findings_of(config(object_lease_s=12.0), master()) if found.check == "pool object lease"]
    assert "--default_kv_lease_ttl=12000" in lease.remedy


@pytest.mark.parametrize(
    ("measured", "state", "word"),
    [
        (Lease(seconds=10.2, is_over=True), "warning", "set object_lease_s=10 in every engine"),
        (Lease(seconds=29.4, is_over=True), "ok", "29.4 s;"),
        (Lease(seconds=31.0), "ok", "31.0 s or more"),
        (Lease(error="no room"), "skipped", "no room"),
    ],
)
def test_a_measured_object_lease_is_judged(measured: Lease, state: str, word: str) -> None:
    """Mooncake's own lease of 10 s under engines that trust in 30 s, one that fits, a longer one, none."""
    found = findings_of(config(), master(), measured)[-1]
    assert ("pool object lease", state, True) == (found.check, found.state, word in found.seen + found.remedy)


class Clock:
    """Time that passes by sleeping alone, in the pool too."""

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool

    def __call__(self) -> float:
        return self._pool.now_s

    def sleep(self, seconds: float) -> None:
        self._pool.advance(seconds)


@pytest.mark.parametrize(
    ("lease_s", "seconds", "is_over"), [(10.0, 10.0, True), (30.0, 30.0, True), (60.0, 31.0, False), (0.001, 0.0, True)]
)
def test_an_object_lease_is_measured(lease_s: float, seconds: float, is_over: bool) -> None:
    """By an object in a pool in memory, as far as 30 s."""
    pool = MemoryPool(object_lease_s=lease_s)
    pool.client(segment_bytes=16 << 20).connect()
    store = pool.client()
    store.connect()
    clock = Clock(pool)
    found = lease_of(store, up_to_s=30.0, clock=clock, sleep=clock.sleep)
    assert (pytest.approx(seconds, abs=0.2), is_over, "") == (found.seconds, found.is_over, found.error)
    assert {} == pool.objects


def test_without_memory_no_object_lease_is_measured() -> None:
    """Nobody lends any: the reason is the pool's own."""
    store = MemoryPool().client()
    store.connect()
    assert "could not be put" in lease_of(store, up_to_s=1.0).error


@pytest.mark.engine
def test_the_object_lease_of_a_real_master_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 2 s, under settings that say 4 s; nothing is left in the pool."""
    pytest.importorskip("mooncake")
    defaults = environment.safe_defaults({}, protocol="tcp", host="127.0.0.1") | environment.store_defaults({})
    for name, value in defaults.items():
        monkeypatch.setenv(name, value)
    running = PoolMaster(object_lease_s=2.0)
    owner = ProcessOwner(running.address, 64 << 20)
    try:
        found = measure_lease(config(master_address=running.address, object_lease_s=4.0))
        keys = MasterHttp(running.metrics_address).keys()
    finally:
        owner.end()
        running.end()
    assert (pytest.approx(2.0, abs=0.9), True, [], True) == (found.seconds, found.is_over, keys, found.falls_short_of(4.0))


@pytest.mark.parametrize(
    ("connector", "extra", "environ", "is_about_one"),
    [
        ("MooncakeStoreConnectorV1", {"master_address": ADDRESS}, {}, True),
        ("MooncakeConnectorV1", {"prefix_pooling": True, "master_address": ADDRESS}, {}, True),
        ("MooncakeConnectorV1", {}, {"MOONCAKE_MASTER": ADDRESS}, False),
        ("", {}, {"MOONCAKE_MASTER": ADDRESS}, True),
        ("", {}, {}, False),
    ],
)
def test_settings_name_a_pool_or_none(
    connector: str, extra: dict[str, object], environ: dict[str, str], is_about_one: bool
) -> None:
    """By the connector, by its setting, by the environment where no settings are given."""
    found = pool_config(connector, extra, environ, device_type="cpu")
    assert (ADDRESS if is_about_one else None) == (found.master_address if found else None)


def test_a_pool_without_a_master_is_a_wrong_setting() -> None:
    """The connector of the pool, and nobody says where the pool is."""
    with pytest.raises(ConfigError, match="MOONCAKE_MASTER"):
        pool_config("MooncakeStoreConnectorV1", {}, {}, device_type="cpu")


def test_a_wrong_setting_of_the_pool_is_told_once() -> None:
    """Beside MooncakeConnectorV1's own settings, with a slip of the pen."""
    settings = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_connector_extra_config": {"prefix_pooling": True, "master_addres": ""},
    }
    result = CliRunner().invoke(build_app(), ["doctor", "--quick", "--json", "--kv-transfer-config", json.dumps(settings)])
    findings = json.loads(result.stdout)["findings"]
    assert [True] == ["did you mean 'master_address'" in found["seen"] for found in findings if "settings" in found["check"]]


def test_a_port_that_nobody_has_is_an_error() -> None:
    """A socket that is bound but does not listen keeps the port from everybody else."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        found = look_at(config(master_address=address), address)
    assert (True, True) == (bool(found.connect_error), address in found.metrics_error)


def test_a_real_master_is_found_well() -> None:
    """By the settings that an engine would have."""
    pytest.importorskip("mooncake")
    running = PoolMaster()
    try:
        settings = {
            "kv_connector": "MooncakeStoreConnectorV1",
            "kv_connector_extra_config": {"master_address": running.address},
        }
        words = ["doctor", "--quick", "--json", "--kv-transfer-config", json.dumps(settings)]
        result = CliRunner().invoke(build_app(), [*words, "--pool-metrics", running.metrics_address])
    finally:
        running.end()
    states = {found["check"]: found["state"] for found in json.loads(result.stdout)["findings"]}
    assert ("ok", "ok", "settings" in states) == (states["pool master"], states["pool memory"], False)
