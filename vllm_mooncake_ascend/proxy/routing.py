"""Which instance gets the next request: round robin over those not known to be broken.

    seen of an instance                                          taken as
    connection refused or reset, answer broken off               broken: no request for limits.COOL_DOWN_S
    500 or above, silence, an answer that is none                suspect: from the third in a row on it is broken
    nothing, because this proxy is exhausted                     nothing
    any other answer                                             sound: the row of suspect answers ends
    probe refused, or answered with an error                     broken
    probe unanswered                                             suspect, counted apart from requests
    probe answered well                                          sound, for probes

What is sound does not end a cool-down: an API server may answer while its engine fails. Time alone does, and a probe that
fails prolongs it. Requests and probes have rows of their own for the same reason.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from typing import Literal

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.proxy.exchange import LossReason

Source = Literal["request", "probe"]


class Finding(enum.Enum):
    """What one request or probe showed of its instance."""

    SOUND = "sound"
    SUSPECT = "suspect"
    BROKEN = "broken"


def finding_of_status(status: int) -> Finding:
    """What an answered request shows."""
    return Finding.SUSPECT if status >= 500 else Finding.SOUND


_FINDINGS: dict[LossReason, Finding | None] = {
    "unreachable": Finding.BROKEN,
    "reset": Finding.BROKEN,
    "silent": Finding.SUSPECT,
    "malformed": Finding.SUSPECT,
    "exhausted": None,
}


def finding_of_loss(reason: LossReason) -> Finding | None:
    """What a request without an answer shows; None: nothing about the instance.

    Silence is only suspect: a proxy under a burst may be too slow itself to see what has come.
    """
    return _FINDINGS[reason]


class _Instance:
    """What is known of one instance."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.broken_until_s = float("-inf")
        self.suspect_in_a_row: dict[Source, int] = {"request": 0, "probe": 0}


class Routing:
    """The instances of one role. Names are their URLs, in the order of the configuration."""

    def __init__(self, urls: tuple[str, ...]) -> None:
        assert urls, "a role has at least one instance"
        assert len(set(urls)) == len(urls), "an instance stands once in its role"
        self._instances = {url: _Instance(url) for url in urls}
        self._urls = urls
        self._next_index = 0

    @property
    def urls(self) -> tuple[str, ...]:
        return self._urls

    def choose(self, avoid: Collection[str], now_s: float) -> str | None:
        """The next instance in turn, or None when all are broken or to be avoided."""
        for step in range(len(self._urls)):
            index = (self._next_index + step) % len(self._urls)
            url = self._urls[index]
            if url not in avoid and self.is_usable(url, now_s):
                self._next_index = (index + 1) % len(self._urls)
                return url
        return None

    def is_usable(self, url: str, now_s: float) -> bool:
        """Whether requests go to the instance now."""
        return now_s >= self._instances[url].broken_until_s

    def learn(self, url: str, source: Source, finding: Finding | None, now_s: float) -> None:
        """Take in what a request to the instance, or a probe of it, showed; None: nothing about the instance."""
        if finding is None:
            return
        instance = self._instances[url]
        row = instance.suspect_in_a_row[source] + 1 if finding is Finding.SUSPECT else 0
        if finding is Finding.BROKEN or row >= limits.FAILURES_TO_COOL_DOWN:
            instance.broken_until_s = now_s + limits.COOL_DOWN_S
        instance.suspect_in_a_row[source] = row
