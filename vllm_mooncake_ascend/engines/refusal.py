"""What an engine refuses to read before anything is asked of anyone. Shared by every implementation; pure."""

from __future__ import annotations

import re

import numpy as np

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.register import MemoryRegister
from vllm_mooncake_ascend.planner.batch import CopyBatch

_SESSION = re.compile(r"[!-~]+:[0-9]{1,5}")
"""`host:port` in printable ASCII: a session comes from a peer, and Mooncake takes it for a C string."""


def refusal(session: str, batch: CopyBatch, register: MemoryRegister) -> str | None:
    """Why `batch` must not be read from `session` into the memory in `register`; None if it may."""
    if len(session) > limits.MAX_ID_CHARS or _SESSION.fullmatch(session) is None:
        return "this is not a session of the form host:port; the peer sent a bad layout"
    if len(batch) > limits.MAX_CALL_DESCRIPTORS:
        return f"{len(batch)} descriptors in one call, the limit is {limits.MAX_CALL_DESCRIPTORS}"
    if batch.num_bytes > limits.MAX_CALL_BYTES:
        return f"{batch.num_bytes} bytes in one call, the limit is {limits.MAX_CALL_BYTES}"
    index = register.first_outside(batch.local_addresses, batch.lengths_bytes)
    if index is not None:
        return (
            f"target run {index} [{int(batch.local_addresses[index]):#x}, +{int(batch.lengths_bytes[index])} bytes] is not "
            "inside one registered region"
        )
    if np.any(batch.remote_addresses < 1):
        return "a remote address is not one; the peer sent a bad layout"
    return None
