"""What the doctor says about a prefix pool."""

from __future__ import annotations

import json
import socket

import msgspec
import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli.doctor_pool import Master, findings_of, look_at, pool_config
from vllm_mooncake_ascend.cli.main import build_app
from vllm_mooncake_ascend.cli.master_http import Segment
from vllm_mooncake_ascend.config import PoolConfig, parse_pool
from vllm_mooncake_ascend.errors import ConfigError
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
