"""runtime.inbox: order kept, nothing lost, nothing beyond the bound, waiters woken."""

from __future__ import annotations

import threading

from vllm_mooncake_ascend.runtime.inbox import Inbox


def test_values_come_out_once_and_in_order() -> None:
    """Goal: actions are carried out in order, once. Method: put three, drain twice."""
    inbox: Inbox[int] = Inbox(capacity=8)
    for value in (1, 2, 3):
        inbox.put(value)
    assert [[1, 2, 3], []] == [inbox.drain(), inbox.drain()]


def test_a_full_inbox_says_no() -> None:
    """Goal: never growth. Method: one value more than the capacity."""
    inbox: Inbox[int] = Inbox(capacity=2)
    assert [True, True, False] == [inbox.put(value) for value in (1, 2, 3)]


def test_an_inbox_is_crowded_before_it_is_full() -> None:
    """Goal: what can wait stays away early. Method: watch the sign while filling."""
    inbox: Inbox[int] = Inbox(capacity=4)
    seen = []
    for value in range(4):
        seen.append(inbox.is_crowded)
        inbox.put(value)
    assert [False, False, True, True] == seen


def test_waiting_ends_when_another_thread_puts() -> None:
    """Goal: the waiter wakes at once. Method: wait long in this thread, put from another."""
    inbox: Inbox[int] = Inbox(capacity=2)
    other = threading.Thread(target=inbox.put, args=(7,))
    other.start()
    woken = inbox.wait(30.0)
    other.join()
    assert (True, [7]) == (woken, inbox.drain())


def test_waiting_for_nothing_ends_in_time() -> None:
    """Goal: no wait without a bound. Method: an empty inbox, a drained one."""
    inbox: Inbox[int] = Inbox(capacity=2)
    inbox.put(1)
    inbox.drain()
    assert not inbox.wait(0.0)


def test_many_threads_lose_nothing() -> None:
    """Goal: hand-over is safe. Method: four threads put a thousand values each while this one drains."""
    inbox: Inbox[int] = Inbox(capacity=8_000)
    threads = [threading.Thread(target=lambda: [inbox.put(value) for value in range(1_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    while len(taken) < 4_000 and inbox.wait(30.0):
        taken += inbox.drain()
    for thread in threads:
        thread.join()
    assert sorted(list(range(1_000)) * 4) == sorted(taken)
