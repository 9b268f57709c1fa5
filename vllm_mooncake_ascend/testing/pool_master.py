"""A mooncake_master of a test: the one that `launch` starts, and ways to harm it."""

from __future__ import annotations

import json
import urllib.request

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.cli import servers
from vllm_mooncake_ascend.testing.pool_process import HOST, PoolProcess

_ANSWER_S = 5.0


class PoolMaster(PoolProcess):
    """Knows where the objects of a pool are."""

    def __init__(
        self, *, object_lease_s: float = limits.OBJECT_LEASE_S, client_ttl_s: float = limits.MASTER_CLIENT_TTL_S
    ) -> None:
        arguments = ("--client_ttl", f"{client_ttl_s:.0f}")
        super().__init__(servers.master(host=HOST, object_lease_s=object_lease_s, arguments=arguments))

    @property
    def address(self) -> str:
        """Where clients call it."""
        return self._server.rpc_address

    @property
    def metrics_address(self) -> str:
        """Where it answers over HTTP."""
        return self._server.url.removeprefix("http://")

    def num_segments(self) -> int:
        """Memory that it knows of; that of a dead owner until `client_ttl_s` have passed."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/get_segments_detail", timeout=_ANSWER_S) as answer:
            return int(json.load(answer)["total_segments"])

    def remove_everything(self) -> int:
        """As an operator can, whether object leases are over or not; returns how many objects there were."""
        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        code = client.setup(HOST, "P2PHANDSHAKE", 0, 0, "tcp", "", self.address)
        assert code == 0, f"the master does not take a client: {code}"
        num_removed = int(client.remove_all(True))
        client.close()
        return num_removed
