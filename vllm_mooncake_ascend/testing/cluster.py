"""Real vLLM servers and proxies for end-to-end tests, on loopback, with means to harm them.

`launch` and `demo` use the same `LocalCluster`; what is here beyond it is only for tests: killing a server, restarting it on
its old port, and reading its metrics without an event loop.
"""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_mooncake_ascend.cli import servers
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, Server, ServerFailed
from vllm_mooncake_ascend.cli.processes import stop_all
from vllm_mooncake_ascend.cli.scrape import totals_of
from vllm_mooncake_ascend.cli.servers import ServerSpec

__all__ = [
    "LocalCluster",
    "Server",
    "ServerFailed",
    "ServerSpec",
    "engine_spec",
    "kill",
    "metrics",
    "proxy_spec",
    "restart",
]

ENGINE_ARGUMENTS = (
    *("--dtype", "float32", "--block-size", "128", "--max-num-batched-tokens", "512", "--max-num-seqs", "8"),
    *("--max-model-len", "4096", "--enforce-eager"),
)
"""Small and exact: several chunks for a prompt above 512 tokens, and float32, whose greedy answers do not depend on how a
prompt was cut."""
METRICS_TIMEOUT_S = 10.0


def engine_spec(
    name: str,
    role: str,
    model: Path,
    *,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    kv_cache_gib: int = 1,
) -> ServerSpec:
    """A test engine: `role` prefill, decode, or anything else for a plain one. It serves its model under the name `test`."""
    cpus = frozenset(os.sched_getaffinity(0))
    return servers.engine(
        name,
        role,
        str(model),
        arguments=("--served-model-name", "test", *ENGINE_ARGUMENTS, *arguments),
        environment={**servers.cpu_environment(os.environ, kv_cache_gib=kv_cache_gib), **(environment or {})},
        placement=servers.placements(cpus, 2).get(role),
    )


def proxy_spec(cluster: LocalCluster, *, arguments: Sequence[str] = ()) -> ServerSpec:
    """Our proxy before all prefill and decode engines that the cluster has now."""
    prefill, decode = ([server.url for server in cluster.with_role(role)] for role in ("prefill", "decode"))
    return servers.proxy(prefill, decode, arguments=arguments)


def kill(server: Server) -> None:
    """End the server and all its processes at once, without a chance to say goodbye."""
    server.child.signal(signal.SIGKILL)
    server.child.reap()


def restart(server: Server) -> None:
    """End the server if it still runs and start it again on the ports it had; wait with `LocalCluster.wait_ready`."""
    stop_all([server.child])
    server.start(port=server.port, rpc_port=server.rpc_port)


def metrics(server: Server) -> dict[str, float]:
    """All samples of the server's `/metrics` now, summed over their labels."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(server.url + "/metrics", timeout=METRICS_TIMEOUT_S) as response:
        return totals_of(response.read().decode())
