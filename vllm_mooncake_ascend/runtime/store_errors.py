"""StoreErrors: what the store complains of, as counters by code and as a line for the operator now and then."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.engines.base import StoreAnswer
from vllm_mooncake_ascend.metrics import names
from vllm_mooncake_ascend.runtime.clock import boot_s

logger = logging.getLogger(__name__)


class StoreErrors:
    """Notes from any thread. `count`: adds to a counter (name, label, amount)."""

    def __init__(self, count: Callable[[str, str, float], None]) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._quiet_until_s: dict[str, float] = {}

    def note(self, what: str, answer: StoreAnswer) -> None:
        """Look at the answer of one call; `what` it was, of a handful, has one line in `limits.BREAKER_NOTE_S`."""
        bad = [result for result in answer.results if result.reason]
        if not bad:
            return
        for code, num_keys in collections.Counter(result.code for result in bad).items():
            self._count(names.POOL_STORE_ERRORS, str(code), num_keys)
        now = boot_s()
        with self._lock:
            if now < self._quiet_until_s.get(what, 0.0):
                return
            self._quiet_until_s[what] = now + limits.BREAKER_NOTE_S
        logger.warning("pool %s: %d of %d keys failed: %s", what, len(bad), len(answer.results), bad[0].reason)
