"""NPU and CUDA devices: two runtimes with the same two calls, on which the current device belongs to a *thread*.

A thread that has not set it works on device 0, whatever the process uses; on Ascend the transfer then fails or, worse,
runs under another card's context. So the index is taken once, in the thread in which vLLM chose the device, and set again
in each thread of ours.
"""

from __future__ import annotations

from typing import Protocol

from vllm_mooncake_ascend.errors import DeviceError

NPU_ALIGNMENT_BYTES = 2 << 20
"""HCCS reaches device memory by huge pages; vllm-ascend allocates KV caches so when a connector is configured."""


class Runtime(Protocol):
    """The part of `torch.npu` and `torch.cuda` that is used."""

    def current_device(self) -> int: ...

    def set_device(self, device: int) -> None: ...


class Accelerator:
    """KV cache in the memory of one card."""

    def __init__(self, *, device_type: str, runtime: Runtime, alignment_bytes: int) -> None:
        """Raises DeviceError when the runtime has no current device."""
        self.device_type = device_type
        self.alignment_bytes = alignment_bytes
        self._runtime = runtime
        try:
            self._index = runtime.current_device()
        except RuntimeError as error:
            raise DeviceError(f"asking for the current {device_type}: {error}; vLLM must have chosen a device first") from error

    def memory_location(self) -> str:
        """Named, not `*`: Mooncake's build for Ascend takes unnamed memory it does not know for an error."""
        return f"{self.device_type}:{self._index}"

    def bind_thread(self) -> None:
        try:
            self._runtime.set_device(self._index)
        except RuntimeError as error:
            raise DeviceError(f"making {self.device_type}:{self._index} current in a thread: {error}") from error
