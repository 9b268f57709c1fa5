"""Themes: how plans are drawn from seeds. One seed is one plan for ever, as long as this module stays as it is.

`gentle` has few faults, all within what the protocol promises to hide; `wild` has everything that can go wrong. The rest
aim at what chance alone would seldom hit: `successor` puts another engine in the place of a producer that is being read,
`deaf` cuts one direction of a conversation while the producer's leases end, `mutual` lets two engines wait for each
other, `shared` lets several requests read one transfer.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from vllm_mooncake_ascend.testing.simulator.plan import (
    FOREVER_S,
    Accident,
    AccidentKind,
    Child,
    Hog,
    Job,
    Network,
    Plan,
    ReadFaults,
)

_ACCIDENTS: tuple[AccidentKind, ...] = (
    "kill",
    "kill",
    "freeze",
    "stop",
    "partition",
    "partition",
    "clog",
    "revoke",
    "disconnect",
)


def draw(seed: int, theme: str = "") -> Plan:
    """The plan of one seed, of one theme if it is named."""
    rng = random.Random(seed)
    chosen = rng.choices(tuple(THEMES), weights=(26, 50, 6, 8, 5, 5))[0]
    return THEMES[theme or chosen](seed, rng)


def _gentle(seed: int, rng: random.Random) -> Plan:
    """Few faults, all within what the protocol promises to hide."""
    num_jobs = rng.randrange(1, 3)
    is_lossy = rng.random() < 0.7
    jobs = tuple(_gentle_job(rng, number) for number in range(num_jobs))
    return Plan(
        seed=seed,
        num_engines=2,
        num_ranks=rng.choice((1, 1, 2)),
        num_blocks=40,
        max_pinned_blocks=20,
        lease_ttl_s=rng.choice((10.0, 30.0)),
        lease_max_s=300.0,
        fails_on_load_error=rng.random() < 0.3,
        reports_unknown_at_once=True,
        pins_on_progress=rng.random() < 0.3,
        is_lazy=rng.random() < 0.3,
        jobs=jobs,
        network=Network(
            delay_s=rng.choice((0.001, 0.1)),
            loss=0.3 if is_lossy else 0.0,
            losses_left=4,
            duplication=0.2 if is_lossy else 0.0,
            reorders=is_lossy,
        ),
        reads=ReadFaults(slow=rng.choice((0.0, 0.3))),
        is_gentle=True,
    )


def _gentle_job(rng: random.Random, number: int) -> Job:
    child = Child(decode=1, delay_s=rng.random() * 0.5, num_local_blocks=rng.choice((0, 0, 1)))
    return Job(
        at_s=rng.random() * 3.0,
        prefill=0,
        num_tokens=rng.randrange(1, 13),
        mode=rng.choice(("sequential", "concurrent")),
        children=(child,),
        transfer_id=f"t{number}",
        step_s=rng.choice((0.01, 0.2, 4.0)),
        admitted_after_s=rng.choice((0.0, 0.0, 1.0, 20.0)),
        is_preempted_after=rng.choice((None, None, 1)),
    )


def _wild(seed: int, rng: random.Random) -> Plan:
    num_engines = rng.choice((2, 2, 3))
    num_jobs = rng.choice((1, 1, 2, 2, 3))
    is_pair = rng.random() < 0.3
    num_blocks = rng.choice((8, 14, 40))
    return Plan(
        seed=seed,
        num_engines=num_engines,
        num_ranks=rng.choice((1, 1, 2)),
        num_blocks=num_blocks,
        max_pinned_blocks=rng.choice((4, (num_blocks - 1) // 2, num_blocks - 1)),
        lease_ttl_s=rng.choice((4.0, 30.0, 30.0)),
        lease_max_s=rng.choice((40.0, 300.0)),
        fails_on_load_error=rng.random() < 0.4,
        reports_unknown_at_once=rng.random() < 0.6,
        pins_on_progress=rng.random() < 0.3,
        is_lazy=rng.random() < 0.3,
        jobs=tuple(_wild_job(rng, number, num_engines, is_pair=is_pair) for number in range(num_jobs)),
        hogs=tuple(_hog(rng, num_engines, num_blocks) for _ in range(rng.choice((0, 0, 1, 2)))),
        read_wait_s=rng.choice((60.0, 60.0, 2.0)),
        odd_engine=2 if num_engines == 3 and rng.random() < 0.2 else None,
        lying_engine=0 if rng.random() < 0.03 else None,
        num_strangers=rng.choice((0, 0, 0, 6)),
        accidents=tuple(_accident(rng, num_engines) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))),
        network=_network(rng),
        reads=_read_faults(rng),
    )


def _wild_job(rng: random.Random, number: int, num_engines: int, *, is_pair: bool) -> Job:
    prefill = rng.randrange(num_engines) if is_pair else 0
    num_children = rng.choice((1, 1, 1, 2))
    return Job(
        at_s=rng.random() * rng.choice((0.1, 3.0)),
        prefill=prefill,
        num_tokens=rng.randrange(1, 13),
        mode=rng.choice(("sequential", "concurrent")),
        children=tuple(_wild_child(rng, num_engines, prefill) for _ in range(num_children)),
        transfer_id=rng.choice((None, f"t{number}", f"t{number}", "t0")),
        step_s=rng.choice((0.01, 0.01, 0.01, 0.2, 3.0, 3.0, 70.0)),
        end=rng.choice(("kv", "kv", "kv", "kv", "kv", "aborted", "never")),
        admitted_after_s=rng.choice((0.0, 0.0, 0.0, 1.0, 45.0)),
        is_preempted_after=rng.choice((None, None, None, 1, 2)),
        same_prompt_as=0 if number and rng.random() < 0.3 else None,
        proxy_leaves_at_s=_moment(rng) if rng.random() < 0.1 else None,
    )


def _wild_child(rng: random.Random, num_engines: int, prefill: int) -> Child:
    decode = rng.randrange(num_engines)
    if decode == prefill and rng.random() < 0.9:
        decode = (prefill + 1) % num_engines
    is_careless = rng.random() < 0.03
    return Child(
        decode=decode,
        delay_s=rng.choice((0.0, rng.random() * 0.2, rng.random() * 40.0 if rng.random() < 0.2 else 0.0)),
        num_local_blocks=rng.choice((0, 0, 1, 3)),
        is_other_prompt=rng.random() < 0.08,
        leaves_at_s=_moment(rng) if rng.random() < 0.25 else None,
        is_preempted_at_s=_moment(rng) if rng.random() < 0.1 else None,
        is_careless=is_careless,
        drops_match=rng.random() < (0.5 if is_careless else 0.03),
    )


def _moment(rng: random.Random) -> float:
    """Some time of a request's life; most of it is over within a fraction of a second, some lasts minutes."""
    return rng.random() * rng.choice((0.02, 0.2, 0.2, 2.0, 15.0, 70.0))


def _accident(rng: random.Random, num_engines: int) -> Accident:
    kind: AccidentKind = rng.choice(
        ("kill", "kill", "freeze", "partition", "partition", "clog", "revoke", "disconnect", "stop")
    )
    engine = rng.randrange(num_engines)
    seconds = rng.choice((0.5, 6.0, 6.0, 20.0, 45.0))
    return Accident(
        kind=kind,
        at_s=_moment(rng) + rng.choice((0.0, 0.0, 1.0)),
        engine=engine,
        other=(engine + rng.randrange(1, num_engines)) % num_engines,
        seconds=FOREVER_S if kind == "kill" and rng.random() < 0.3 else seconds,
    )


def _hog(rng: random.Random, num_engines: int, num_blocks: int) -> Hog:
    return Hog(
        at_s=_moment(rng),
        engine=rng.randrange(num_engines),
        num_blocks=rng.randrange(1, num_blocks),
        seconds=rng.choice((1.0, 10.0, 60.0, 400.0)),
    )


def _network(rng: random.Random) -> Network:
    if rng.random() < 0.35:
        return Network(delay_s=rng.choice((0.001, 0.1)))
    return Network(
        delay_s=rng.choice((0.001, 0.1, 0.4)),
        loss=rng.choice((0.0, 0.1, 0.4)),
        duplication=rng.choice((0.0, 0.2)),
        reorders=rng.random() < 0.7,
        tail=rng.choice((0.0, 0.1)),
        tail_s=rng.choice((1.0, 8.0, 30.0)),
    )


def _read_faults(rng: random.Random) -> ReadFaults:
    def share() -> float:
        return rng.choice((0.0, 0.0, 0.0, 0.15, 0.5))

    return ReadFaults(
        slow=share(),
        refused=share() / 3,
        failed=share() / 3,
        failed_landed=share() / 3,
        unknown=share(),
        unplannable=share() / 5,
        stuck=rng.choice((0.0, 0.0, 0.0, 0.2)),
    )


def _successor(seed: int, rng: random.Random) -> Plan:
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
        pins_on_progress=False,
        is_lazy=False,
        jobs=(first, retry),
        accidents=(Accident(kind="kill", at_s=0.06 + rng.random() * 4.0, engine=0, seconds=5.0), *deafness),
        hogs=(hog,) if rng.random() < 0.3 else (),
        reads=ReadFaults(slow=0.9),
    )


def _deaf(seed: int, rng: random.Random) -> Plan:
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
        pins_on_progress=False,
        is_lazy=False,
        jobs=(job, rival),
        accidents=tuple(accidents),
        network=Network(loss=0.4) if is_frozen else Network(),
        reads=ReadFaults(slow=0.9, slow_s=5.0),
    )


def _shared(seed: int, rng: random.Random) -> Plan:
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
        pins_on_progress=rng.random() < 0.3,
        is_lazy=False,
        jobs=(job,),
        network=Network(delay_s=0.05, reorders=True, duplication=0.1),
        reads=ReadFaults(slow=0.5),
        is_gentle=True,
    )


def _mutual(seed: int, rng: random.Random) -> Plan:
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
        pins_on_progress=rng.random() < 0.3,
        is_lazy=rng.random() < 0.3,
        jobs=jobs,
        reads=ReadFaults(unknown=rng.choice((0.0, 0.2))),
    )


THEMES: dict[str, Callable[[int, random.Random], Plan]] = {
    "gentle": _gentle,
    "wild": _wild,
    "successor": _successor,
    "deaf": _deaf,
    "mutual": _mutual,
    "shared": _shared,
}
"""By name; `draw` weighs them."""
