"""KV-cache transfer between vLLM engines over Mooncake.

Importing the package imports none of vllm, torch, torch_npu and mooncake, so that the doctor runs on a broken machine.
The connector classes are found by name when vLLM asks for them (`kv_connector_module_path: "vllm_mooncake_ascend"`).
"""

from __future__ import annotations

from typing import Any

from vllm_mooncake_ascend._version import __version__

_CONNECTORS = {
    "MooncakeConnectorV1": "vllm_mooncake_ascend.connectors.p2p",
    "MooncakeStoreConnectorV1": "vllm_mooncake_ascend.connectors.pool",
}

__all__ = ["MooncakeConnectorV1", "MooncakeStoreConnectorV1", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _CONNECTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_CONNECTORS[name]), name)
