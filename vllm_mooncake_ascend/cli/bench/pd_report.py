"""All sets of a run of `bench pd`, one after the other, and what is said of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from vllm_mooncake_ascend.cli.bench import pd_measures, pd_subjects, peers, peers_install
from vllm_mooncake_ascend.cli.bench.pd_sets import Outcome, Plan, measure_subject
from vllm_mooncake_ascend.cli.bench.pd_subjects import Options, Subject
from vllm_mooncake_ascend.cli.bench.peers_install import PeerMissing
from vllm_mooncake_ascend.cli.bench.run import Run
from vllm_mooncake_ascend.cli.local_cluster import ServerFailed


def nixl() -> Subject:
    """NIXL's connector, installed if it is not.

    Raises:
        PeerMissing: it cannot be installed.
    """
    folder = peers_install.install_nixl()
    return peers.nixl(folder, peers_install.NIXL_VERSION, os.environ.get("PYTHONPATH", ""))


MAKERS: Mapping[str, Callable[[], Subject]] = {
    "after_prefill": pd_subjects.after_prefill,
    "stream": pd_subjects.stream,
    "in_tree": peers.in_tree,
    "nixl": nixl,
}


def measure_all(run: Run, subjects: Sequence[str], options: Options, plan: Plan) -> list[str]:
    """Measure these, and add to the run's notes. Returns what must not be: where ours failed or answered wrongly."""
    problems: list[str] = []
    for key in subjects:
        try:
            subject = MAKERS[key]()
        except PeerMissing as error:
            run.note(f"{key}: not measured: {error}")
            continue
        try:
            outcome = measure_subject(run, subject, options, plan)
        except ServerFailed as error:
            run.note(f"{subject.name}: not measured, a server did not start: {str(error).splitlines()[0]}")
            problems += [f"{subject.name}: {error}"] if subject.is_ours else []
            continue
        run.add(
            {measure: outcome.samples[measure] for measure in sorted(outcome.samples, key=pd_measures.place)},
            sorted(outcome.comparisons, key=lambda one: pd_measures.place(one.above)),
        )
        for text in notes_of(subject, outcome):
            run.note(text)
        if subject.is_ours:
            problems += [f"{subject.name}: {text}" for text in faults_of(outcome)]
    run.note(
        f"Model {options.model.name}, {options.dtype}, chunks of {pd_subjects.MAX_BATCHED_TOKENS} tokens, one compute thread "
        "an engine; every prompt is new; on few cores each decode engine, of a peer too, is kept to the upper half of them."
    )
    return problems


def notes_of(subject: Subject, outcome: Outcome) -> Iterator[str]:
    """What a reader must know of one set."""
    for remark in subject.remarks:
        yield f"{subject.name}: {remark}"
    for name, tally in outcome.tallies.items():
        num_compared = tally.num_equal + tally.num_near_ties + tally.num_different
        yield (
            f"{name}: of {num_compared} answers {tally.num_equal} equal the plain engine's, {tally.num_near_ties} part where "
            f"its two best tokens are a near tie, {tally.num_different} are different; {tally.num_failed} samples failed"
            f"{': ' + tally.last_failure if tally.last_failure else ''}."
        )
        if tally.partings:
            yield f"{name}: where answers parted, and the margins of both there: {'; '.join(tally.partings)}."
    if outcome.moved is not None:
        came = outcome.moved.missing or "all came"
        yield f"{subject.name}: decode was to read KV of {outcome.moved.expected_tokens:,} tokens; {came}."
    for text in (outcome.broken and f"broke off: {outcome.broken}", outcome.cut_short and f"cut short: {outcome.cut_short}"):
        if text:
            yield f"{subject.name}: {text}"


def faults_of(outcome: Outcome) -> Iterator[str]:
    """What ours must never do."""
    if outcome.broken:
        yield outcome.broken
    for name, tally in outcome.tallies.items():
        if tally.num_different:
            remedy = "--dtype float32 tells rounding from wrong KV"
            yield f"{tally.num_different} answers of {name} differ from the plain engine's; {remedy}"
    if outcome.moved is not None and outcome.moved.missing:
        yield f"KV did not move as it should: {outcome.moved.missing}"
