"""The host's memory as the device: nothing to bind, nothing to align."""

from __future__ import annotations


class CpuDevice:
    """KV cache in host memory."""

    device_type = "cpu"
    alignment_bytes = 1

    def memory_location(self) -> str:
        """`*`: over TCP it does not matter, and over RDMA Mooncake finds the NUMA node of each region itself."""
        return "*"

    def bind_thread(self) -> None:
        """Host memory is the same in every thread."""
