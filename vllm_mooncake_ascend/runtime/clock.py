"""The two clocks of the product. Shells read them and hand the numbers on; nobody else does."""

from __future__ import annotations

import time


def boot_s() -> float:
    """Seconds since this machine started, counted on while it sleeps, never set back: for every wait and every lease.

    Linux has it as CLOCK_BOOTTIME; elsewhere the monotonic clock stands in, which stops while the machine sleeps.
    """
    return time.clock_gettime(_BOOT_CLOCK)


def wall_s() -> float:
    """Seconds of the wall clock: only for what two machines compare, the age of signed kv_transfer_params."""
    return time.time()


_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
