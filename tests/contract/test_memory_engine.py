"""The in-memory engine beyond the contract: its faults, and where it is stricter than Mooncake."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from vllm_mooncake_ascend.engines.base import ReadResult
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.testing.memory import Bytes, address_of, batch_of, pattern, region_of
from vllm_mooncake_ascend.testing.memory_engine import (
    LATE_WINDOW_S,
    Fails,
    LandsLate,
    MemoryNetwork,
    MemoryTransferEngine,
    WaitsFor,
)
from vllm_mooncake_ascend.types import Outcome

NUM_RUNS, RUN_BYTES = 4, 64
NUM_BYTES = NUM_RUNS * RUN_BYTES


class Pair:
    """Two engines of one network: `reader` has `local` registered, `source` serves `remote`."""

    def __init__(self, *, has_fence: bool = True) -> None:
        self.network = MemoryNetwork()
        self.reader: MemoryTransferEngine = self.network.engine(has_fence=has_fence)
        self.source = self.network.engine()
        self.local: Bytes = np.zeros(2 * NUM_BYTES, dtype=np.uint8)
        self.remote = pattern(1, NUM_BYTES)
        self.reader.register([region_of(self.local)])
        self.source.register([region_of(self.remote)])

    def read(self, *, local_offset: int = 0) -> ReadResult:
        """All of `remote` in four runs."""
        local, remote = address_of(self.local) + local_offset, address_of(self.remote)
        offsets = range(0, NUM_BYTES, RUN_BYTES)
        return self.reader.read(self.source.session, batch_of([(local + o, remote + o, RUN_BYTES) for o in offsets]))

    def num_landed(self) -> int:
        """Runs of the first half of `local` that have been written."""
        return int(self.local[:NUM_BYTES].reshape(NUM_RUNS, RUN_BYTES).any(axis=1).sum())


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.UNKNOWN])
def test_an_ordered_failure_leaves_the_ordered_part(outcome: Outcome) -> None:
    """The last run first, and nothing more however much time passes."""
    pair = Pair()
    pair.network.inject(pair.source.session, Fails(outcome=outcome, num_landed=1))
    assert outcome is pair.read().outcome
    pair.network.advance(LATE_WINDOW_S)
    assert pair.num_landed() == 1
    assert pair.local[NUM_BYTES - 1] == pair.remote[-1]


def test_faults_strike_once_each_in_order() -> None:
    """Two are ordered; the third read is good."""
    pair = Pair()
    pair.network.inject(pair.source.session, Fails(outcome=Outcome.FAILED), Fails(outcome=Outcome.REFUSED))
    outcomes = [pair.read().outcome for _ in range(3)]
    assert [Outcome.FAILED, Outcome.REFUSED, Outcome.DONE] == outcomes


def test_late_bytes_land_when_they_are_due() -> None:
    """Not a moment before; and then all of them."""
    pair = Pair()
    pair.network.inject(pair.source.session, LandsLate(after_s=20.0, num_landed=1))
    assert Outcome.UNKNOWN is pair.read().outcome
    landed = []
    for seconds in (0.0, 19.9, 0.2):
        pair.network.advance(seconds)
        landed.append(pair.num_landed())
    assert [1, 1, 4] == landed


def test_a_fence_keeps_late_bytes_away_for_ever() -> None:
    """The same, fenced."""
    pair = Pair()
    pair.network.inject(pair.source.session, LandsLate(after_s=20.0))
    pair.read()
    assert pair.reader.fence()
    pair.network.advance(LATE_WINDOW_S)
    assert pair.num_landed() == 0


def test_an_engine_without_a_fence_says_so_and_lets_them_land() -> None:
    """As on Ascend."""
    pair = Pair(has_fence=False)
    pair.network.inject(pair.source.session, LandsLate(after_s=20.0))
    pair.read()
    assert not pair.reader.fence()
    pair.network.advance(20.0)
    assert pair.num_landed() == 4


def test_a_stopped_peer_serves_late_but_not_after_the_window() -> None:
    """It resumes just before the end of what the product endures, or just after."""
    landed = []
    for seconds in (LATE_WINDOW_S - 1.0, LATE_WINDOW_S + 1.0):
        pair = Pair()
        pair.read()
        pair.local[:] = 0
        pair.network.stop(pair.source.session)
        assert Outcome.UNKNOWN is pair.read().outcome
        pair.network.advance(seconds)
        pair.network.resume(pair.source.session)
        landed.append(pair.num_landed())
    assert [4, 1] == landed


def test_a_killed_peer_sends_nothing_late() -> None:
    """What it was asked for dies with it."""
    pair = Pair()
    pair.network.inject(pair.source.session, LandsLate(after_s=1.0))
    pair.read()
    pair.network.kill(pair.source.session)
    pair.network.advance(2.0)
    assert pair.num_landed() == 0


def test_a_slow_read_ends_when_its_gate_opens() -> None:
    """It blocks its thread, close waits for it, and it is DONE in the end."""
    pair = Pair()
    gate = WaitsFor(gate=threading.Event(), entered=threading.Event())
    pair.network.inject(pair.source.session, gate)
    results: list[ReadResult] = []
    reader = threading.Thread(target=lambda: results.append(pair.read()))
    reader.start()
    assert gate.entered.wait(10.0)
    closer = threading.Thread(target=pair.reader.close)
    closer.start()
    assert [] == results
    gate.gate.set()
    reader.join(10.0)
    closer.join(10.0)
    assert [Outcome.DONE] == [result.outcome for result in results]
    assert Outcome.REFUSED is pair.read().outcome


def test_two_reads_at_once_are_our_bug() -> None:
    """One transfer thread owns an engine."""
    pair = Pair()
    gate = WaitsFor(gate=threading.Event(), entered=threading.Event())
    pair.network.inject(pair.source.session, gate)
    reader = threading.Thread(target=pair.read)
    reader.start()
    assert gate.entered.wait(10.0)
    with pytest.raises(LocalProtocolError, match="two reads"):
        pair.read()
    gate.gate.set()
    reader.join(10.0)


def test_targets_that_overlap_are_our_bug() -> None:
    """Two runs of a batch that share a byte."""
    pair = Pair()
    local, remote = address_of(pair.local), address_of(pair.remote)
    with pytest.raises(LocalProtocolError, match="overlap"):
        pair.reader.read(pair.source.session, batch_of([(local, remote, 64), (local + 63, remote + 64, 64)]))


def test_reusing_an_unresolved_target_is_our_bug() -> None:
    """Its late bytes would overwrite the new ones; other targets may be read, and after the fence this one, too."""
    pair = Pair()
    pair.network.inject(pair.source.session, LandsLate(after_s=20.0))
    pair.read()
    with pytest.raises(LocalProtocolError, match="earlier one that is UNKNOWN"):
        pair.read()
    assert Outcome.DONE is pair.read(local_offset=NUM_BYTES).outcome
    assert pair.reader.fence()
    assert Outcome.DONE is pair.read().outcome
