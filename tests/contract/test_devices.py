"""Device adapters, on the host and on a fake NPU runtime."""

from __future__ import annotations

import importlib.util
import sys
import threading

import pytest

from vllm_mooncake_ascend.devices.select import select_device
from vllm_mooncake_ascend.errors import ConfigError, DeviceError
from vllm_mooncake_ascend.testing import fake_npu


def test_choosing_the_host_imports_no_accelerator() -> None:
    """Neither torch nor torch_npu is touched: the fakes would complain about any use of them."""
    with fake_npu.installed(num_devices=0):
        device = select_device("cpu")
        device.bind_thread()
    assert ("cpu", 1, "*") == (device.device_type, device.alignment_bytes, device.memory_location())
    assert "torch_npu" not in sys.modules


def test_an_npu_is_the_one_that_was_current_when_it_was_chosen() -> None:
    """vLLM sets the device in its worker thread; registered memory is named by it and aligned for it."""
    with fake_npu.installed(num_devices=4) as npu:
        npu.set_device(3)
        device = select_device("npu")
    assert ("npu", 2 << 20, "npu:3") == (device.device_type, device.alignment_bytes, device.memory_location())


def test_each_thread_is_bound_by_its_own_call() -> None:
    """A new thread starts on device 0; after bind_thread it is on the right one, and the maker's is untouched."""
    seen: list[int] = []
    with fake_npu.installed(num_devices=4) as npu:
        npu.set_device(3)
        device = select_device("npu")
        npu.set_device(1)

        def work() -> None:
            seen.append(npu.current_device())
            device.bind_thread()
            seen.append(npu.current_device())

        thread = threading.Thread(target=work, name="transfer")
        thread.start()
        thread.join(10.0)
        seen.append(npu.current_device())
    assert [0, 3, 1] == seen
    assert npu.bound_threads["transfer"] == 3


def test_a_machine_without_an_npu_is_named() -> None:
    """The runtime's refusal becomes a DeviceError that says what to do."""
    with fake_npu.installed(num_devices=0), pytest.raises(DeviceError, match="current npu"):
        select_device("npu")


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="this machine has torch_npu")
def test_a_missing_runtime_is_named() -> None:
    """No torch_npu on this machine: a DeviceError, not an ImportError from the depth."""
    with pytest.raises(DeviceError, match="torch_npu"):
        select_device("npu")


def test_an_unknown_kind_of_device_is_named() -> None:
    """With the kinds that would do."""
    with pytest.raises(ConfigError, match=r"'tpu'.*cpu, cuda, npu"):
        select_device("tpu")
