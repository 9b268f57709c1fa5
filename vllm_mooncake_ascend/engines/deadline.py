"""A bound for a foreign call that has none of its own.

The one place outside `runtime` that starts a thread: the call cannot be interrupted, so all that can be done is not to wait
for it any longer. Whoever uses this must not touch what the call holds afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def call_with_deadline(call: Callable[[], int], *, timeout_s: float) -> int | None:
    """The result of `call`, or None when it took longer than `timeout_s`; it then ends by itself, unheard.

    An exception of `call` is raised here.
    """
    results: list[int] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="mooncake-open", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failures:
        raise failures[0]
    return results[0] if results else None
