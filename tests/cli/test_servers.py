"""Commands, environments and places of the servers of a set."""

from __future__ import annotations

import json

import pytest

from vllm_mooncake_ascend.cli import launch, servers
from vllm_mooncake_ascend.cli.processes import Placement


def test_the_transfer_config_is_what_the_readme_says() -> None:
    """The JSON that vLLM gets for each role."""
    expected = {
        "kv_connector": "MooncakeConnectorV1",
        "kv_connector_module_path": "vllm_mooncake_ascend",
        "kv_role": "kv_consumer",
    }
    assert expected == json.loads(servers.transfer_config("decode"))


def test_a_plain_engine_has_no_connector() -> None:
    """The reference of the demo must be vLLM alone."""
    assert "--kv-transfer-config" not in servers.engine("plain", "reference", "model").command


def test_the_proxy_knows_every_engine() -> None:
    """Two prefill engines and one decode engine."""
    words = servers.proxy(["http://p0", "http://p1"], ["http://d0"]).command
    expected = ("--prefill", "http://p0", "--prefill", "http://p1", "--decode", "http://d0")
    assert expected == words[-6:]


@pytest.mark.parametrize(
    ("num_cpus", "num_engines", "decode_cpus"),
    [(1, 2, None), (2, 2, {1}), (3, 2, {2}), (4, 2, {2, 3}), (8, 2, None), (8, 4, {4, 5, 6, 7})],
)
def test_decode_leaves_cores_to_prefill_on_small_hosts(num_cpus: int, num_engines: int, decode_cpus: set[int] | None) -> None:
    """On hosts of several sizes: which cores decode engines are kept to, if any."""
    placed = servers.placements(frozenset(range(num_cpus)), num_engines)
    expected = {"decode": Placement(cpus=frozenset(decode_cpus), niceness=servers.DECODE_NICENESS)} if decode_cpus else {}
    assert expected == placed


def test_the_users_environment_wins() -> None:
    """A variable the user has set is not set again."""
    assert "OMP_NUM_THREADS" not in servers.cpu_environment({"OMP_NUM_THREADS": "4"})


@pytest.mark.parametrize(("role", "pooling"), [("prefill", True), ("pool", None)])
def test_an_engine_of_a_pool_knows_its_master(role: str, pooling: bool | None) -> None:
    """The settings of an engine with both connectors in one, and of one that only shares prefixes."""
    spec = servers.engine("one", role, "model", extra=servers.pool_settings(role, "10.0.0.1:50051", "2GB"))
    config = json.loads(spec.command[spec.command.index("--kv-transfer-config") + 1])
    extra = config["kv_connector_extra_config"]
    assert ("10.0.0.1:50051", "2GB", pooling) == (extra["master_address"], extra["segment_bytes"], extra.get("prefix_pooling"))


def test_launch_gives_all_engines_the_pool() -> None:
    """A plan with a pool, once its master is known."""
    plan = launch.Plan(model="model", num_prefill=1, num_decode=1, arguments=(), pool_segment="1GB").with_master("127.0.0.1:7")
    specs = launch.engine_specs(plan, cpus=frozenset(range(2)), cpu_environment={})
    settings = [spec.command[spec.command.index("--kv-transfer-config") + 1] for spec in specs]
    assert [True, True] == ['"master_address": "127.0.0.1:7"' in text for text in settings]


def test_the_master_is_asked_for_our_times() -> None:
    """Object leases of 30 s in milliseconds, and its two ports as words that are replaced."""
    words = servers.master(arguments=("--eviction_ratio", "0.1")).command
    options = dict(zip(words[1::2], words[2::2], strict=False))
    wanted = {
        "--default_kv_lease_ttl": "30000",
        "--client_ttl": "60",
        "--rpc_port": servers.RPC_PORT,
        "--metrics_port": servers.PORT,
    }
    assert wanted == {name: options.get(name) for name in wanted}
    assert ("--eviction_ratio", "0.1") == words[-2:]


@pytest.mark.parametrize("folder", ["", "/ssd"])
def test_an_owner_of_memory_has_an_ssd_tier_if_it_has_a_folder(folder: str) -> None:
    """Its switch and the variable that names the folder come together."""
    spec = servers.memory_owner("owner", "10.0.0.1:50051", segment_size="4GB", ssd_folder=folder)
    has_tier = ("--enable_offload" in spec.command, "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH" in spec.environment)
    assert (bool(folder), bool(folder)) == has_tier
    assert {"10.0.0.1:50051", "4GB", servers.PORT, servers.RPC_PORT} <= set(spec.command)


def test_launch_makes_the_engines_asked_for() -> None:
    """One prefill and two decode engines, an option for all and a variable for decode only."""
    plan = launch.Plan(
        model="model", num_prefill=1, num_decode=2, arguments=("--max-model-len", "64"), decode_environment={"KEY": "value"}
    )
    specs = launch.engine_specs(plan, cpus=frozenset({0, 1}), cpu_environment={"OMP_NUM_THREADS": "1"})
    seen = [(spec.name, spec.environment.get("KEY"), spec.command[-2:], len(spec.placement.cpus)) for spec in specs]
    option = ("--max-model-len", "64")
    assert [("prefill-0", None, option, 0), ("decode-0", "value", option, 1), ("decode-1", "value", option, 1)] == seen
