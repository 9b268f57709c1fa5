"""Choose the device adapter. The only place that imports an accelerator's runtime, and only when it is asked for."""

from __future__ import annotations

from vllm_mooncake_ascend.devices.accelerator import NPU_ALIGNMENT_BYTES, Accelerator
from vllm_mooncake_ascend.devices.base import Device
from vllm_mooncake_ascend.devices.cpu import CpuDevice
from vllm_mooncake_ascend.errors import ConfigError, DeviceError

DEVICE_TYPES = ("cpu", "cuda", "npu")


def select_device(device_type: str) -> Device:
    """The adapter for `device_type` (`vllm.platforms.current_platform.device_type`).

    Call it in the thread in which vLLM chose the device: for an accelerator, the current one is taken.

    Raises:
        ConfigError: there is no adapter for this kind of device.
        DeviceError: its runtime is not installed or has no current device.
    """
    if device_type == "cpu":
        return CpuDevice()
    if device_type == "npu":
        return _npu()
    if device_type == "cuda":
        return _cuda()
    raise ConfigError(f"KV transfer from device type {device_type!r} is not supported; supported: {', '.join(DEVICE_TYPES)}")


def _npu() -> Device:
    try:
        import torch
        import torch_npu  # noqa: F401  its import adds torch.npu
    except ImportError as error:
        raise DeviceError(f"loading torch_npu: {error}; install the torch_npu that vllm-ascend asks for") from error
    return Accelerator(device_type="npu", runtime=torch.npu, alignment_bytes=NPU_ALIGNMENT_BYTES)


def _cuda() -> Device:
    try:
        import torch
    except ImportError as error:
        raise DeviceError(f"loading torch: {error}") from error
    return Accelerator(device_type="cuda", runtime=torch.cuda, alignment_bytes=1)
