"""Entry point `vllm.general_plugins`: makes the connectors known to vLLM by name, without kv_connector_module_path.

vLLM calls it in every process and more than once. Beside vllm-ascend the name MooncakeConnectorV1 is taken in vLLM's
registry; then theirs stays and ours is reached by kv_connector_module_path "vllm_mooncake_ascend".
"""

from __future__ import annotations

import logging

_NAME = "MooncakeConnectorV1"
_MODULE = "vllm_mooncake_ascend.connectors.p2p"


def register() -> None:
    """Register the connectors with vLLM's factory; idempotent, never over another's registration."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if _NAME in KVConnectorFactory._registry:
        logging.getLogger(__name__).debug("connector name is taken, left as it is: name=%s", _NAME)
        return
    KVConnectorFactory.register_connector(_NAME, _MODULE, _NAME)
