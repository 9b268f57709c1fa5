"""Settings: the only reader of options and environment variables, both handed in as mappings.

`keys` and `pool_keys` hold the tables of keys as data, `reading` says what a value may be, `p2p` turns mappings into a
`P2PConfig`, `pool` and `mooncake_json` into a `PoolConfig`, `page` prints the tables as the page `docs/configuration.md`
(`python -m vllm_mooncake_ascend.config`).
"""

from vllm_mooncake_ascend.config.p2p import P2PConfig, parse_p2p
from vllm_mooncake_ascend.config.pool import PoolConfig, parse_pool

__all__ = ["P2PConfig", "PoolConfig", "parse_p2p", "parse_pool"]
