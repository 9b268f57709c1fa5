"""Our lines in vLLM's log: vLLM gives handlers to its own logger alone, so those of other packages end at WARNING, and bare."""

from __future__ import annotations

import logging

_OURS = "vllm_mooncake_ascend"
_THEIRS = "vllm"


class _ToVllm(logging.Handler):
    """Hands lines on to vLLM's logger as it is configured then; up to a process's first request that changes several times."""

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger(_THEIRS)
        if not logging.getLogger().handlers and theirs.isEnabledFor(record.levelno):
            theirs.handle(record)


def join_vllms_log() -> None:
    """Write our lines where vLLM writes its own, unless somebody has decided about them. Twice is as good as once."""
    ours = logging.getLogger(_OURS)
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.addHandler(_ToVllm())
    ours.setLevel(logging.INFO)
