"""Entry point `vllm.general_plugins`: makes the connectors known to vLLM by name, without kv_connector_module_path.

vLLM calls it in every process and more than once. Beside vllm-ascend the name MooncakeConnectorV1 is taken in vLLM's
registry; then theirs stays and ours is reached by kv_connector_module_path "vllm_mooncake_ascend".
"""

from __future__ import annotations

import logging

from vllm_mooncake_ascend.connectors.logs import join_vllms_log

_CONNECTORS = {
    "MooncakeConnectorV1": "vllm_mooncake_ascend.connectors.p2p",
    "MooncakeStoreConnectorV1": "vllm_mooncake_ascend.connectors.pool",
}


def register() -> None:
    """Register the connectors with vLLM's factory, and join its log; idempotent, never over another's registration."""
    join_vllms_log()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in _CONNECTORS.items():
        if name in KVConnectorFactory._registry:
            logging.getLogger(__name__).debug("connector name is taken, left as it is: name=%s", name)
        else:
            KVConnectorFactory.register_connector(name, module, name)
