"""What `bench pd` measures, by name, and what each is compared with. Pure."""

from __future__ import annotations

from typing import Literal

from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure
from vllm_mooncake_ascend.cli.bench.samples import Goal

STREAM = "ours, stream"
AFTER_PREFILL = "ours, after_prefill"
COLOCATED = "colocated"

LONG_PROMPT = 2_000
"""Goals of the time to the first token are for prompts of at least so many tokens."""
BURST = 4
"""Prompts at once."""
NUM_RUNNING = 2
"""Requests that run on decode while KV arrives."""

_TTFT_GOALS = {STREAM: Goal(limit=1.10, is_ceiling=True), AFTER_PREFILL: Goal(limit=1.25, is_ceiling=True)}
_BURST_GOAL = Goal(limit=1.15, is_ceiling=True)
_GAP_GOAL = Goal(limit=1.05, is_ceiling=True)
_FIRST_GOAL = Goal(limit=1.5, is_ceiling=True)
_CPU_GOAL = Goal(limit=0.3, is_ceiling=True)

_KINDS = (
    "first request",
    "time to first",
    "time to all",
    "mean time between tokens",
    "longest time between tokens",
    "CPU of all",
    "CPU of decode",
    "CPU of decode above",
)
"""In the order of the tables, by how their names begin."""

Gap = Literal["mean", "longest"]
Moment = Literal["idle", "newcomer"]


def beside(subject: str) -> str:
    """The plain engine, as measured in turns with this subject."""
    return f"{COLOCATED} beside {subject}"


def is_ours(subject: str) -> bool:
    return subject in _TTFT_GOALS


def place(measure: Measure) -> tuple[int, int, str, str]:
    """Where it stands in a table, as a sort key: by kind, length of the prompt, subject."""
    kinds = [kind for kind in _KINDS if measure.name.startswith(kind)]
    return _KINDS.index(max(kinds, key=len)), len(measure.case), measure.case, measure.subject


def first_token(num_tokens: int, subject: str) -> Measure:
    return Measure(name="time to first token", case=f"{num_tokens:,} tokens", subject=subject, unit="ms", clock="wall")


def all_first_tokens(num_tokens: int, subject: str) -> Measure:
    case = f"{BURST} x {num_tokens:,} tokens at once"
    return Measure(name="time to all first tokens", case=case, subject=subject, unit="ms", clock="wall")


def first_ever(num_tokens: int, subject: str) -> Measure:
    """Of a fresh set of engines, by how much the first request takes longer than the second."""
    goal = _FIRST_GOAL if is_ours(subject) else None
    case = f"{num_tokens:,} tokens"
    return Measure(name="first request ever, above the second", case=case, subject=subject, unit="s", clock="wall", goal=goal)


def gap(kind: Gap, moment: Moment, num_tokens: int, subject: str) -> Measure:
    """Time between two tokens of a running request."""
    name = f"{kind} time between tokens, {moment}"
    case = f"{NUM_RUNNING} running, {num_tokens:,} tokens come"
    return Measure(name=name, case=case, subject=subject, unit="ms", clock="wall")


def cpu_of_all(num_tokens: int, subject: str) -> Measure:
    return _cpu("CPU of all engines", num_tokens, subject)


def cpu_of_decode(num_tokens: int, subject: str) -> Measure:
    return _cpu("CPU of decode", num_tokens, subject)


def cpu_above_local_hit(num_tokens: int, subject: str) -> Measure:
    """CPU seconds of decode less those for the same prompt from its own cache: what waiting and reading cost."""
    return _cpu("CPU of decode above a local hit", num_tokens, subject, _CPU_GOAL if is_ours(subject) else None)


def _cpu(name: str, num_tokens: int, subject: str, goal: Goal | None = None) -> Measure:
    case = f"a request of {num_tokens:,} tokens"
    return Measure(name=name, case=case, subject=subject, unit="s", clock="cpu", goal=goal)


def first_token_ratio(num_tokens: int, subject: str) -> Comparison:
    goal = _TTFT_GOALS.get(subject) if num_tokens >= LONG_PROMPT else None
    return Comparison(above=first_token(num_tokens, subject), below=first_token(num_tokens, beside(subject)), goal=goal)


def all_first_tokens_ratio(num_tokens: int, subject: str) -> Comparison:
    above, below = all_first_tokens(num_tokens, subject), all_first_tokens(num_tokens, beside(subject))
    return Comparison(above=above, below=below, goal=_BURST_GOAL if is_ours(subject) else None)


def cpu_ratio(num_tokens: int, subject: str) -> Comparison:
    return Comparison(above=cpu_of_all(num_tokens, subject), below=cpu_of_all(num_tokens, beside(subject)))


def gap_ratio(kind: Gap, num_tokens: int, subject: str) -> Comparison:
    """A newcomer's effect on who runs."""
    goal = _GAP_GOAL if kind == "mean" and is_ours(subject) else None
    return Comparison(above=gap(kind, "newcomer", num_tokens, subject), below=gap(kind, "idle", num_tokens, subject), goal=goal)
