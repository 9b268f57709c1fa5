"""A stand-in for `torch.npu` and `torch_npu`: exactly the calls `devices` makes, and nothing else.

Strict: any other attribute raises, the current device belongs to a thread (device 0 where none was set, as on the real
runtime), an index that does not exist raises, and what each thread set is kept for tests to look at.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator


class FakeNpu:
    """What `torch.npu` is after `import torch_npu`."""

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._thread = threading.local()
        self.bound_threads: dict[str, int] = {}
        """Thread name -> device it made current last."""

    def current_device(self) -> int:
        if self._num_devices == 0:
            raise RuntimeError("fake npu: no device on this machine")
        return int(getattr(self._thread, "device", 0))

    def set_device(self, device: int) -> None:
        if not 0 <= device < self._num_devices:
            raise RuntimeError(f"fake npu: device {device} of {self._num_devices}")
        self._thread.device = device
        self.bound_threads[threading.current_thread().name] = device


class _Strict(types.ModuleType):
    """A module that has what was put into it and complains about anything else by name."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"{self.__name__}.{name} is not part of the fake; is it really needed?")


@contextlib.contextmanager
def installed(num_devices: int) -> Iterator[FakeNpu]:
    """While this lasts, `import torch` and `import torch_npu` find the fake."""
    npu = FakeNpu(num_devices)
    torch = _Strict("torch")
    torch.npu = npu  # type: ignore[attr-defined]
    fakes: dict[str, types.ModuleType] = {"torch": torch, "torch_npu": _Strict("torch_npu")}
    before = {name: sys.modules.get(name) for name in fakes}
    sys.modules.update(fakes)
    try:
        yield npu
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
