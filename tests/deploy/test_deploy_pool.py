"""The deploy files of a prefix pool say nothing that Mooncake's programs and our settings do not know; what they say works."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_deploy import compose_services, containers
from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.cli import servers
from vllm_mooncake_ascend.cli.local_cluster import Server
from vllm_mooncake_ascend.cli.master_http import MasterHttp
from vllm_mooncake_ascend.config import parse_pool
from vllm_mooncake_ascend.testing import cluster

WAIT_S = 30.0
HOST = "127.0.0.1"


def programs() -> list[tuple[str, list[str], dict[str, str]]]:
    """Every call of a program of Mooncake's: its name, its options and its environment."""
    found: list[tuple[str, list[str], dict[str, str]]] = []
    for service in compose_services().values():
        if "entrypoint" in service:
            found.append((service["entrypoint"][0], service["command"], service.get("environment", {})))
    for one in containers():
        if "command" in one:
            variables = {variable["name"]: variable.get("value", "") for variable in one.get("env", ())}
            found.append((one["command"][0], one["args"], variables))
    return found


PROGRAMS = programs()


def options(words: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def program(name: str) -> Path:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("Mooncake is not installed")
    return Path(spec.submodule_search_locations[0]) / name


def test_both_places_have_both_programs() -> None:
    """The search for them finds them."""
    assert ["mooncake_client", "mooncake_client", "mooncake_master", "mooncake_master"] == sorted(
        name for name, _, _ in PROGRAMS
    )


@pytest.mark.engine
@pytest.mark.parametrize(("name", "words", "environment"), PROGRAMS)
def test_mooncake_knows_every_option_and_variable(name: str, words: list[str], environment: dict[str, str]) -> None:
    """Options by the program's own help; variables by its text, for nothing lists them."""
    text = subprocess.run([str(program(name)), "--help"], capture_output=True, text=True, check=False)
    known = set(re.findall(r"^\s+-(\w+) \(", text.stdout + text.stderr, re.MULTILINE))
    assert set() == set(options(words)) - known
    inside = program(name).read_bytes()
    assert [] == [variable for variable in environment if variable != "POD_IP" and variable.encode() not in inside]


@pytest.mark.parametrize("words", [words for name, words, _ in PROGRAMS if name == "mooncake_master"])
def test_the_masters_have_our_times_and_the_tier(words: list[str]) -> None:
    """Those of the master that `launch` starts, and what objects need to go to disk."""
    wanted = {
        "default_kv_lease_ttl": f"{limits.OBJECT_LEASE_S * 1e3:.0f}",
        "client_ttl": f"{limits.MASTER_CLIENT_TTL_S:.0f}",
        "enable_offload": "true",
        "offload_on_evict": "true",
    }
    assert wanted == {name: options(words).get(name) for name in wanted}


def engines() -> list[list[str]]:
    commands = [service["command"] for service in compose_services().values()] + [one["args"] for one in containers()]
    return [words for words in commands if "--role=pool" in words]


def test_engines_lend_nothing_and_call_the_master_of_their_set() -> None:
    """Its name and port are a service's of the same file."""
    assert 3 == len(engines())
    for words in engines():
        values = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        settings = servers.pool_settings("pool", values["pool-master"], values["pool-segment"])
        config, warnings = parse_pool(settings, {}, device_type="cpu", default_host=HOST)
        assert (0, ()) == (config.segment_bytes, warnings)
        assert config.master_address in ("master:50051", "pool-master:50051")


@pytest.mark.engine
def test_the_master_and_the_owner_of_the_compose_file_make_a_pool(tmp_path: Path) -> None:
    """Both run here with the options of the file, but for addresses, ports and the folder: 4 GB of memory are in the pool."""
    program("mooncake_master")
    services = compose_services()
    master = started("mooncake_master", services["compose-pool: master"], tmp_path, {})
    owner = None
    try:
        changes = {"host": HOST, "master_server_address": master.rpc_address}
        owner = started("mooncake_client", services["compose-pool: owner"], tmp_path, changes)
        segments = MasterHttp(master.url.removeprefix("http://")).segments()
    finally:
        for server in filter(None, (owner, master)):
            cluster.kill(server)
    assert [4 << 30] == [segment.capacity_bytes for segment in segments]


def started(name: str, service: dict[str, Any], folder: Path, changes: dict[str, str]) -> Server:
    ports = {"rpc_port": servers.RPC_PORT, "port": servers.RPC_PORT, "metrics_port": servers.PORT, "http_port": servers.PORT}
    words = [word for key, value in (options(service["command"]) | changes).items() for word in option(key, value, ports)]
    environment = {**service.get("environment", {})}
    if "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH" in environment:
        environment["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] = str(folder)
    spec = servers.ServerSpec(name=name, role=name, command=(str(program(name)), *words), environment=environment)
    server = Server(spec, host=HOST, log_path=folder / f"{name}.log")
    deadline_s = time.monotonic() + WAIT_S
    while not server.check():
        assert time.monotonic() < deadline_s, server.story("is not ready")
        time.sleep(0.05)
    return server


def option(name: str, value: str, ports: dict[str, str]) -> tuple[str, ...]:
    """Switches need the sign, ports must be words of their own."""
    return (f"--{name}", ports[name]) if name in ports else (f"--{name}={value}",)
