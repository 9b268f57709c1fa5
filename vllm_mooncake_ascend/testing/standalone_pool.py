"""A pool whose memory, and SSD tier if it has one, belong to a `mooncake_client` process: its master, the owner, and ways to
harm them. On loopback, on ports nobody else has."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from vllm_mooncake_ascend.cli import servers
from vllm_mooncake_ascend.cli.local_cluster import Server
from vllm_mooncake_ascend.cli.master_http import MasterHttp
from vllm_mooncake_ascend.engines.native_store import StoreSettings
from vllm_mooncake_ascend.testing import cluster, pool_process
from vllm_mooncake_ascend.testing.pool_process import HOST

SEGMENT_SIZE = "32MB"
OBJECT_LEASE_S = 1.0
CLIENT_TTL_S = 3.0
KEYS_PER_BUCKET = 5
"""Objects go to disk by the bucket; Mooncake's own is 500, or 256 MB."""


class StandalonePool:
    """Runs from the constructor to `end`. With an SSD tier objects go there when they are evicted from memory."""

    def __init__(self, *, has_ssd: bool, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: of the owner."""
        self._folder = tempfile.TemporaryDirectory(prefix="standalone-pool-")
        self.ssd_folder = Path(self._folder.name) / "ssd"
        self.ssd_folder.mkdir()
        offload = ("--enable_offload=true", "--offload_on_evict=true") if has_ssd else ()
        arguments = ("--client_ttl", f"{CLIENT_TTL_S:.0f}", *offload)
        self.master = self._started(servers.master(host=HOST, object_lease_s=OBJECT_LEASE_S, arguments=arguments))
        heartbeat = {
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(KEYS_PER_BUCKET),
        }
        self.owner = self._started(
            servers.memory_owner(
                servers.OWNER,
                self.master.rpc_address,
                segment_size=SEGMENT_SIZE,
                ssd_folder=str(self.ssd_folder) if has_ssd else "",
                environment={**heartbeat, **(environment or {})},
                host=HOST,
            )
        )

    @property
    def settings(self) -> StoreSettings:
        """Of a client that lends nothing."""
        return StoreSettings(host=HOST, protocol="tcp", master_address=self.master.rpc_address, segment_bytes=0)

    def keys_on_disk_alone(self) -> list[str]:
        """Those that no memory holds any more, as the master knows it. Grants no object lease."""
        http = MasterHttp(self.master.url.removeprefix("http://"))
        keys = http.keys()
        in_memory = http.sizes(keys)
        return [key for key in keys if key not in in_memory]

    def restart(self, server: Server) -> None:
        """On its old ports; returns when it is ready."""
        cluster.restart(server)
        pool_process.wait_ready(server)

    def stop_owner(self) -> None:
        """Returns when it is stopped with all its threads."""
        pool_process.stop(self.owner)

    def resume_owner(self) -> None:
        self.owner.child.signal(signal.SIGCONT)

    def end(self) -> None:
        for server in (self.owner, self.master):
            cluster.kill(server)
        self._folder.cleanup()

    def _started(self, spec: servers.ServerSpec) -> Server:
        server = Server(spec, host=HOST, log_path=Path(self._folder.name) / f"{spec.name}.log")
        pool_process.wait_ready(server)
        return server
