"""A mooncake_client of a test: a process that owns memory of a pool and does nothing else, and ways to harm it."""

from __future__ import annotations

from vllm_mooncake_ascend.cli import servers
from vllm_mooncake_ascend.testing.pool_master import PoolMaster
from vllm_mooncake_ascend.testing.pool_process import HOST, PoolProcess


class PoolOwner(PoolProcess):
    """Lends memory to a pool. `segment_size`: with its unit, as Mooncake has it."""

    def __init__(self, master: PoolMaster, *, segment_size: str) -> None:
        super().__init__(servers.memory_owner(servers.OWNER, master.address, segment_size=segment_size, host=HOST))
