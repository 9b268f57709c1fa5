"""Time between tokens of running requests, from the moments their tokens came. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import msgspec


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between tokens, in a window."""

    mean_s: float
    longest_s: float


def idle_gaps(streams: Sequence[Sequence[float]], start_s: float, end_s: float) -> Gaps | None:
    """Of all gaps that ended in the window; None: no token came.

    Args:
        streams: of each running request when its tokens came.
    """
    return _gaps([found for stream in streams for found, ended_s in _all_gaps(stream) if start_s < ended_s <= end_s])


def newcomer_gaps(streams: Sequence[Sequence[float]], asked_s: float, first_token_s: float, idle: Gaps) -> Gaps | None:
    """From the moment a newcomer was asked for to its first token.

    The step that makes this token is the newcomer's own work and lasts longer whoever brought the KV: the mean leaves it out,
    the longest gap does not. Of each request at least one gap counts, for KV that arrives within a step. None: no token came.
    """
    before_s = first_token_s - idle.mean_s / 2
    counted: list[float] = []
    longest: list[float] = []
    for stream in streams:
        gaps = [(gap_s, ended_s) for gap_s, ended_s in _all_gaps(stream) if ended_s > asked_s]
        counted += [gap_s for index, (gap_s, ended_s) in enumerate(gaps) if index == 0 or ended_s <= before_s]
        longest += [gap_s for gap_s, ended_s in gaps if ended_s <= first_token_s + idle.mean_s / 2]
    mean = _gaps(counted)
    return None if mean is None else Gaps(mean_s=mean.mean_s, longest_s=max((*longest, mean.longest_s)))


def _all_gaps(stream: Sequence[float]) -> list[tuple[float, float]]:
    """Length and end of each."""
    return [(after_s - before_s, after_s) for before_s, after_s in itertools.pairwise(stream)]


def _gaps(found: Sequence[float]) -> Gaps | None:
    return Gaps(mean_s=statistics.fmean(found), longest_s=max(found)) if found else None
