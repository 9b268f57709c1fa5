"""Where this process runs, as vLLM has it."""

from __future__ import annotations


def device_type() -> str:
    """vLLM's name of the device this process runs on: cpu, npu or cuda."""
    from vllm.platforms import current_platform

    return str(current_platform.device_type)


def host_address() -> str:
    """vLLM's idea of this host's address."""
    from vllm.utils.network_utils import get_ip

    return str(get_ip())
