"""Plans of the simulated pool: what happens in one world, as data, and how seeds draw it."""

from __future__ import annotations

import dataclasses
import random

from vllm_mooncake_ascend.testing.pool_simulator.store import StoreFaults


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One request. Prompts of one `family` begin alike."""

    at_s: float
    request_id: str
    family: int
    num_blocks: int
    is_aborted_after_s: float | None = None
    """At whatever stage it is then."""
    is_preempted_after_s: float | None = None
    """If it runs then."""
    is_careless: bool = False
    """vLLM drops the match, or allocates less than it was offered."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolPlan:
    """One world; a value, so that a failing one can be told and repeated."""

    seed: int
    num_ranks: int
    num_blocks: int
    max_saved_blocks: int
    max_queued_blocks: int
    reports_unknown_at_once: bool
    jobs: tuple[Job, ...]
    faults: StoreFaults
    clears_cache_at_s: tuple[float, ...] = ()
    """When the local prefix cache is emptied (and the pool is not)."""
    resets_at_s: tuple[float, ...] = ()
    crowded_s: tuple[float, float] = (0.0, 0.0)
    """No request is admitted from, to: vLLM asks again and again."""
    is_gentle: bool = False
    """No faults: every load must come, and every whole block of a finished prompt must be in the pool."""


THEMES = ("gentle", "wild", "dead", "slow", "reset")


def draw(seed: int, theme: str = "") -> PoolPlan:
    """The plan of a seed; without a theme, seeds take turns."""
    theme = theme or THEMES[seed % len(THEMES)]
    rng = random.Random(f"{theme} {seed}")
    jobs = _jobs(rng, is_gentle=theme == "gentle")
    last_s = max(job.at_s for job in jobs)
    is_gentle = theme == "gentle"
    start_s = rng.uniform(0, last_s)
    has_reset = theme == "reset" or (theme in ("wild", "slow") and rng.random() < 0.3)
    crowded_s = rng.choice((0.5, 3.0) if theme == "reset" else (0.0, 0.0, 0.05, 1.0, 45.0))
    return PoolPlan(
        seed=seed,
        num_ranks=rng.choice((1, 1, 2)),
        num_blocks=200 if is_gentle else rng.choice((20, 30, 60)),
        max_saved_blocks=200 if is_gentle else rng.choice((6, 15, 60)),
        max_queued_blocks=200 if is_gentle else rng.choice((4, 20)),
        reports_unknown_at_once=rng.random() < 0.6,
        jobs=jobs,
        faults=_faults(rng, theme, last_s),
        clears_cache_at_s=tuple(rng.uniform(0, last_s) for _ in range(rng.randint(1, 5))),
        resets_at_s=(start_s + rng.uniform(0, crowded_s if theme == "reset" else 30.0),) if has_reset else (),
        crowded_s=(start_s, start_s + crowded_s),
        is_gentle=is_gentle,
    )


def _jobs(rng: random.Random, *, is_gentle: bool) -> tuple[Job, ...]:
    spread_s = rng.choice((0.2, 3.0, 30.0))
    jobs = []
    for number in range(rng.randint(3, 10)):
        is_disturbed = not is_gentle and rng.random() < 0.5
        jobs.append(
            Job(
                at_s=rng.uniform(0, spread_s),
                request_id=f"r{rng.randrange(4) if not is_gentle else number}",
                family=rng.randrange(2),
                num_blocks=rng.randint(1, 12),
                is_aborted_after_s=_moment(rng) if is_disturbed and rng.random() < 0.6 else None,
                is_preempted_after_s=_moment(rng) if is_disturbed else None,
                is_careless=not is_gentle and rng.random() < 0.1,
            )
        )
    return tuple(sorted(jobs, key=lambda job: job.at_s))


def _moment(rng: random.Random) -> float:
    return rng.choice((rng.uniform(0, 0.01), rng.uniform(0, 0.1), rng.uniform(0, 20.0)))


def _faults(rng: random.Random, theme: str, last_s: float) -> StoreFaults:
    match theme:
        case "gentle":
            return StoreFaults()
        case "dead":
            start_s = rng.uniform(0, last_s)
            return StoreFaults(outage=(start_s, start_s + rng.uniform(0.5, 20.0)), slow_lookup=0.1)
        case "reset":
            return StoreFaults(slow_lookup=0.05)
        case "slow":
            return StoreFaults(
                slow=rng.uniform(0, 0.3), slow_lookup=rng.uniform(0, 0.5), unknown=rng.uniform(0, 0.1), unfenced=0.3
            )
    return StoreFaults(
        slow_lookup=rng.uniform(0, 0.2),
        failed=rng.uniform(0, 0.1),
        unknown=rng.uniform(0, 0.1),
        full=rng.uniform(0, 0.3),
        unplannable=rng.uniform(0, 0.05),
        lost=rng.uniform(0, 0.2),
        unfenced=0.3,
    )
