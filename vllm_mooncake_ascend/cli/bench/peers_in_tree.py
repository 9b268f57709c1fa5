"""vLLM's own MooncakeConnector, for machines without an accelerator; vLLM loads this module by its path, nobody else.

Its worker asks `torch.accelerator.current_device_index()` once and raises where there is none (vLLM 0.32.0,
distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py, line 1186). The answer goes to
`current_platform.set_device`, which does nothing on CPU, so 0 is as good as any. Nothing else is changed, and nothing where an
accelerator is.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector

__all__ = ["MooncakeConnector"]

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0
