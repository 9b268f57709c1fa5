"""What the product needs of the device that holds the KV cache, as a Protocol.

Small on purpose: reading a peer's KV needs a bound thread, a word for the memory and its alignment. Nothing waits for the
device here: a producer publishes blocks only after the output of the step that wrote them has come back, and a consumer
reports a read only after its bytes are in place.
"""

from __future__ import annotations

from typing import Protocol


class Device(Protocol):
    """The device of one worker process. Made in the thread in which vLLM has already chosen it."""

    @property
    def device_type(self) -> str:
        """`cpu`, `npu` or `cuda`, as torch and vLLM name it."""

    @property
    def alignment_bytes(self) -> int:
        """Base addresses of registered memory must be multiples of this."""

    def memory_location(self) -> str:
        """Mooncake's word for where this device's memory lies: `npu:0`, `cuda:0`, or `*`: wherever it finds it."""

    def bind_thread(self) -> None:
        """Make the device current in the calling thread. First call of every thread that touches an engine or the device.

        Raises:
            DeviceError: the device runtime refused.
        """
