"""Settings: the only reader of options and environment variables, both handed in as mappings.

`keys` holds the table of keys as data, `p2p` turns mappings into a `P2PConfig`, `page` prints the table as the page
`docs/configuration.md` (`python -m vllm_mooncake_ascend.config`).
"""

from vllm_mooncake_ascend.config.p2p import P2PConfig, parse_p2p

__all__ = ["P2PConfig", "parse_p2p"]
