"""Planted bugs: the real machines with one mistake each. The simulator must find every one, or it has lost its power.

Each entry says what the mistake is, in which themes it shows, and within how many seeds it must be found. The laws are off
here (`planted_law`): it is the world that has to notice. Mistakes that were once real are marked so.
"""

from __future__ import annotations

import dataclasses
import functools

from vllm_mooncake_ascend.testing import planted_consumers as consumers
from vllm_mooncake_ascend.testing import planted_producers as producers
from vllm_mooncake_ascend.testing.planted_consumers import with_reads
from vllm_mooncake_ascend.testing.simulator.world import Machines


@dataclasses.dataclass(frozen=True, slots=True)
class PlantedBug:
    """One mistake."""

    name: str
    machines: Machines
    theme: str
    """The theme whose seeds show it best."""
    max_seeds: int
    """It must be found within so many of them."""


_machines = functools.partial(Machines, producer=producers.LawlessProducer, consumer=consumers.LawlessConsumer)

PLANTED_BUGS = (
    PlantedBug("failed read reported as received", _machines(consumer=with_reads(consumers.FailedReadReceived)), "wild", 500),
    PlantedBug("expired lease read", _machines(consumer=with_reads(consumers.Unconfirmed)), "deaf", 1_000),
    PlantedBug("silence taken for held", _machines(consumer=with_reads(consumers.UnansweredIsFine)), "deaf", 2_000),
    PlantedBug(
        "time rule trusts the lease alone", _machines(consumer=with_reads(consumers.LeaseAloneIsTrusted)), "successor", 1_000
    ),
    PlantedBug("verdict not looked at", _machines(consumer=with_reads(consumers.LostIsHeld)), "deaf", 1_000),
    PlantedBug("blocks reused after unknown", _machines(consumer=with_reads(consumers.NoQuarantine)), "wild", 500),
    PlantedBug("no deadline on decode", _machines(consumer=consumers.NoDeadline), "wild", 1_500),
    PlantedBug("forgotten verdict", _machines(producer=producers.ForgottenVerdict), "gentle", 500),
    PlantedBug("double report", _machines(consumer=consumers.DoubleReport), "wild", 500),
    PlantedBug("pin leaked on preemption", _machines(producer=producers.PinLeakedOnPreemption), "wild", 500),
    PlantedBug("lost renewal counted", _machines(consumer=consumers.LostRenewalCounts), "deaf", 2_000),
    PlantedBug("first of two readers frees", _machines(producer=producers.FirstReaderFrees), "shared", 500),
    PlantedBug(
        "port reused by another engine",
        _machines(producer=producers.AnyExpected, consumer=consumers.AnyIncarnation),
        "successor",
        2_000,
    ),
    PlantedBug("stop treated as failure", _machines(treats_stop_as_failure=True), "gentle", 500),
    PlantedBug("layout forgotten after it was shared again", Machines(forgets_what_is_shared_again=True), "revisit", 500),
    PlantedBug("progress of a scheduled step published", _machines(publishes_scheduled_steps=True), "wild", 500),
    PlantedBug("digest not compared", _machines(consumer=consumers.AnyDigest), "wild", 500),
    PlantedBug("abort forgets the read", _machines(consumer=with_reads(consumers.AbortForgets)), "wild", 1_000),
    PlantedBug("abort does not wait for the ranks", _machines(consumer=with_reads(consumers.AbortDoesNotWait)), "wild", 1_000),
    PlantedBug("overdue rank taken for ended", _machines(consumer=with_reads(consumers.OverdueIsEnded)), "wild", 2_500),
    PlantedBug("revocation breaks a promise", _machines(producer=producers.RevokesPromises), "deaf", 500),
    PlantedBug("pressure breaks a promise", _machines(producer=producers.PressureBreaksPromises), "deaf", 500),
    PlantedBug(
        "preemption of a streamed prefill ignored", _machines(consumer=with_reads(consumers.GenerationIgnored)), "wild", 3_000
    ),
    PlantedBug("preemption of a streamed prefill not told", _machines(producer=producers.PreemptionNotTold), "wild", 3_000),
    PlantedBug("first part taken for the last", _machines(consumer=with_reads(consumers.EveryPartIsTheLast)), "gentle", 500),
    PlantedBug("read ends with its first part", _machines(reader=producers.FirstPartIsAll), "gentle", 500),
    PlantedBug(
        "blocks told before a preemption left out", _machines(producer=producers.ToldBeforeThePreemption), "wild", 3_000
    ),
    PlantedBug("tables of a part taken for whole", _machines(consumer=with_reads(consumers.TablesFromTheStart)), "gentle", 500),
    PlantedBug("progress offered without pins", _machines(producer=producers.ProgressNotPinned), "gentle", 500),
    PlantedBug("progress of a scheduled step offered", _machines(publishes_scheduled_progress=True), "gentle", 500),
    PlantedBug("lease expires with the prefill", _machines(producer=producers.ExpiresWhileRunning), "gentle", 500),
    PlantedBug("silence counted from an answered message", _machines(consumer=consumers.OldSilence), "gentle", 1_000),
    PlantedBug("own silence taken for the peer's", _machines(consumer=consumers.OwnSilence), "gentle", 1_000),
    PlantedBug("alarms taken all at once", Machines(consumer=consumers.AllDueAtOnce), "deaf", 3_000),
    PlantedBug("revoked transfer without a reason", Machines(producer=producers.GoneWithoutReason), "wild", 2_000),
)
