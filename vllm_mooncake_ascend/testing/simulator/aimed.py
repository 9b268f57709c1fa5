"""Aimed themes: worlds that seek what chance alone would seldom hit. Each function draws one plan; `themes` weighs them."""

from __future__ import annotations

import random

from vllm_mooncake_ascend.testing.simulator.plan import Accident, AccidentKind, Child, Hog, Job, Network, Plan, ReadFaults


def streaming(rng: random.Random, num_engines: int) -> tuple[int, ...]:
    """Engines that stream: none, all, or one that meets others which do not."""
    return rng.choice(((), (), tuple(range(num_engines)), tuple(range(num_engines)), (rng.randrange(num_engines),)))


def successor(seed: int, rng: random.Random) -> Plan:
    """A producer dies while it is read, and another engine soon serves in its place, perhaps with the same transfer."""
    first = Job(
        at_s=0.0,
        prefill=0,
        num_tokens=rng.randrange(9, 13),
        mode="sequential",
        children=(Child(decode=1, delay_s=rng.random() * 0.05),),
        transfer_id="t0",
        step_s=0.01,
    )
    retry = Job(
        at_s=5.0 + rng.random() * 3.0,
        prefill=0,
        num_tokens=rng.randrange(1, 13),
        mode=rng.choice(("sequential", "concurrent")),
        children=(Child(decode=1, delay_s=rng.random() * 9.0),),
        transfer_id="t0",
        step_s=0.01,
    )
    hog = Hog(at_s=0.0, engine=1, num_blocks=11, seconds=rng.random() * 20.0)
    is_deaf = rng.random() < 0.4
    deafness = (Accident(kind="partition", at_s=0.05 + rng.random(), engine=0, other=1, seconds=30.0),) if is_deaf else ()
    return Plan(
        seed=seed,
        num_engines=2,
        num_ranks=1,
        num_blocks=12,
        max_pinned_blocks=11,
        lease_ttl_s=30.0,
        lease_max_s=300.0,
        fails_on_load_error=rng.random() < 0.3,
        reports_unknown_at_once=rng.random() < 0.7,
        streaming=(),
        is_lazy=False,
        jobs=(first, retry),
        accidents=(Accident(kind="kill", at_s=0.06 + rng.random() * 4.0, engine=0, seconds=5.0), *deafness),
        hogs=(hog,) if rng.random() < 0.3 else (),
        reads=ReadFaults(slow=0.9),
    )


def deaf(seed: int, rng: random.Random) -> Plan:
    """Decode reads while it cannot hear, or is not heard, and the producer's lease ends one way or another."""
    job = Job(
        at_s=0.0,
        prefill=0,
        num_tokens=rng.randrange(5, 13),
        mode=rng.choice(("sequential", "concurrent")),
        children=tuple(Child(decode=1, delay_s=rng.random() * 0.1) for _ in range(rng.choice((1, 1, 2)))),
        transfer_id="t0",
        step_s=rng.choice((0.01, 0.5)),
    )
    start_s = rng.random() * rng.choice((0.5, 0.5, 4.0))
    rival = Job(
        at_s=start_s + rng.random() * 5.0,
        prefill=0,
        num_tokens=rng.randrange(5, 13),
        mode="sequential",
        children=(),
        transfer_id=None,
        step_s=0.01,
    )
    is_frozen = rng.random() < 0.3
    source, target = (1, 0) if is_frozen else rng.choice(((0, 1), (1, 0)))
    cut = Accident(
        kind="freeze" if is_frozen else "partition",
        at_s=start_s,
        engine=source,
        other=target,
        seconds=rng.choice((6.0, 6.0, 20.0)),
    )
    accidents = [cut]
    if rng.random() < 0.4:
        accidents.append(Accident(kind="revoke", at_s=start_s + rng.random() * 6.0, engine=0))
    return Plan(
        seed=seed,
        num_engines=2,
        num_ranks=1,
        num_blocks=rng.choice((7, 40)),
        max_pinned_blocks=rng.choice((3, 6)),
        lease_ttl_s=rng.choice((2.0, 4.0, 4.0, 30.0)),
        lease_max_s=300.0,
        fails_on_load_error=False,
        reports_unknown_at_once=rng.random() < 0.7,
        streaming=(),
        is_lazy=False,
        jobs=(job, rival),
        accidents=tuple(accidents),
        network=Network(loss=0.4) if is_frozen else Network(),
        reads=ReadFaults(slow=0.9, slow_s=5.0),
    )


def shared(seed: int, rng: random.Random) -> Plan:
    """n>1: several requests of one engine, or of two, read one transfer; nothing is wrong, so all must succeed."""
    num_children = rng.choice((2, 2, 3))
    job = Job(
        at_s=0.0,
        prefill=0,
        num_tokens=rng.randrange(1, 13),
        mode="concurrent",
        children=tuple(Child(decode=rng.choice((1, 2)), delay_s=0.0) for _ in range(num_children)),
        transfer_id="t0",
        step_s=rng.choice((0.3, 4.0)),
    )
    return Plan(
        seed=seed,
        num_engines=3,
        num_ranks=rng.choice((1, 2)),
        num_blocks=40,
        max_pinned_blocks=20,
        lease_ttl_s=30.0,
        lease_max_s=300.0,
        fails_on_load_error=rng.random() < 0.5,
        reports_unknown_at_once=rng.random() < 0.5,
        streaming=streaming(rng, 2),
        is_lazy=False,
        jobs=(job,),
        network=Network(delay_s=0.05, reorders=True, duplication=0.1),
        reads=ReadFaults(slow=0.5),
        is_gentle=True,
    )


def revisit(seed: int, rng: random.Random) -> Plan:
    """A second request to a producer that was just forgotten, or just not; nothing is wrong, so all must succeed."""
    jobs = tuple(
        Job(
            at_s=at_s,
            prefill=0,
            num_tokens=rng.randrange(1, 13),
            mode="sequential",
            children=tuple(Child(decode=1, delay_s=0.0) for _ in range(rng.choice((1, 2)))),
            transfer_id=None,
            step_s=0.01,
        )
        for at_s in (0.0, 296.0 + rng.random() * 12.0)
    )
    return Plan(
        seed=seed,
        num_engines=2,
        num_ranks=1,
        num_blocks=40,
        max_pinned_blocks=39,
        lease_ttl_s=30.0,
        lease_max_s=300.0,
        fails_on_load_error=rng.random() < 0.5,
        reports_unknown_at_once=True,
        streaming=(),
        is_lazy=rng.random() < 0.7,
        jobs=jobs,
        reads=ReadFaults(slow=0.5),
        is_gentle=all(len(job.children) == 1 for job in jobs),
    )


def mutual(seed: int, rng: random.Random) -> Plan:
    """Two engines prefill for each other, with hardly any room: each holds what the other waits for."""
    jobs = tuple(
        Job(
            at_s=rng.random() * 0.2,
            prefill=number % 2,
            num_tokens=rng.randrange(5, 13),
            mode=rng.choice(("sequential", "concurrent")),
            children=(Child(decode=1 - number % 2, delay_s=0.0),),
            transfer_id=f"t{number}",
            step_s=0.02,
        )
        for number in range(rng.choice((2, 4, 4)))
    )
    return Plan(
        seed=seed,
        num_engines=2,
        num_ranks=1,
        num_blocks=rng.choice((5, 8)),
        max_pinned_blocks=rng.choice((3, 4, 7)),
        lease_ttl_s=rng.choice((10.0, 30.0)),
        lease_max_s=rng.choice((40.0, 40.0, 100.0)),
        fails_on_load_error=False,
        reports_unknown_at_once=rng.random() < 0.7,
        streaming=streaming(rng, 2),
        is_lazy=rng.random() < 0.3,
        jobs=jobs,
        reads=ReadFaults(unknown=rng.choice((0.0, 0.2))),
    )


def streamed(seed: int, rng: random.Random) -> Plan:
    """Long prompts that are read while they are computed, preempted, revoked, aborted or lost at any block."""
    num_jobs = rng.choice((1, 1, 2))
    step_s = rng.choice((0.01, 0.05, 0.3, 30.0))
    jobs = tuple(_streamed_job(rng, number, step_s) for number in range(num_jobs))
    kind: AccidentKind = rng.choice(("kill", "freeze", "stop", "partition", "clog", "revoke", "disconnect"))
    accident = Accident(
        kind=kind, at_s=rng.random() * step_s * 14, engine=rng.randrange(2), other=1, seconds=rng.choice((1.0, 20.0))
    )
    return Plan(
        seed=seed,
        num_engines=2,
        num_ranks=rng.choice((1, 2)),
        num_blocks=rng.choice((16, 40)),
        max_pinned_blocks=rng.choice((6, 15)),
        lease_ttl_s=rng.choice((4.0, 30.0)),
        lease_max_s=300.0,
        fails_on_load_error=rng.random() < 0.4,
        reports_unknown_at_once=rng.random() < 0.6,
        streaming=rng.choice(((0, 1), (0, 1), (0,), (1,))),
        is_lazy=rng.random() < 0.3,
        jobs=jobs,
        accidents=(accident,) if rng.random() < 0.5 else (),
        network=Network(
            delay_s=rng.choice((0.001, 0.1)), loss=rng.choice((0.0, 0.1)), duplication=0.1, reorders=rng.random() < 0.5
        ),
        reads=ReadFaults(
            slow=rng.choice((0.0, 0.5)),
            slow_s=rng.choice((0.2, 9.0)),
            unknown=rng.choice((0.0, 0.0, 0.1)),
            unplannable=rng.choice((0.0, 0.0, 0.4)),
        ),
        hogs=(Hog(at_s=0.0, engine=1, num_blocks=40, seconds=rng.random() * step_s * 20),) if rng.random() < 0.3 else (),
        lying_engine=0 if rng.random() < 0.15 else None,
    )


def _streamed_job(rng: random.Random, number: int, step_s: float) -> Job:
    child = Child(
        decode=1,
        delay_s=rng.random() * step_s * 8,
        num_local_blocks=rng.choice((0, 0, 2)),
        leaves_at_s=rng.random() * step_s * 14 if rng.random() < 0.3 else None,
    )
    return Job(
        at_s=rng.random() * step_s,
        prefill=0,
        num_tokens=rng.randrange(20, 45),
        mode="concurrent",
        children=(child,),
        transfer_id=f"t{number}",
        step_s=step_s,
        end=rng.choice(("kv", "kv", "kv", "aborted")),
        lingers=rng.random() < 0.3,
        is_preempted_after=rng.choice((None, rng.randrange(1, 10))),
    )
