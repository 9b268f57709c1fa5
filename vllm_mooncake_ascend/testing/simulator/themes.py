"""Themes: how plans are drawn from seeds. One seed is one plan for ever, as long as this module stays as it is.

`gentle` has few faults, all within what the protocol promises to hide; `wild` has everything that can go wrong. The others,
in `aimed`, seek what chance alone would seldom hit.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from vllm_mooncake_ascend.testing.simulator import aimed
from vllm_mooncake_ascend.testing.simulator.aimed import streaming
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
    chosen = rng.choices(tuple(THEMES), weights=(24, 42, 6, 8, 5, 4, 2, 9))[0]
    return THEMES[theme or chosen](seed, rng)


def _gentle(seed: int, rng: random.Random) -> Plan:
    """Few faults, all within what the protocol promises to hide."""
    num_jobs = rng.randrange(1, 3)
    is_lossy = rng.random() < 0.5
    kind: AccidentKind = rng.choice(("partition", "partition", "freeze"))
    engine = rng.randrange(2)
    accident = Accident(
        kind=kind,
        at_s=rng.random() * rng.choice((1.0, 15.0)),
        engine=engine,
        other=1 - engine,
        seconds=6.0 if kind == "freeze" and engine == 1 else 2.0,
    )
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
        streaming=streaming(rng, 2),
        is_lazy=rng.random() < 0.3,
        jobs=jobs,
        accidents=() if is_lossy else (accident,),
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
        streaming=streaming(rng, num_engines),
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


THEMES: dict[str, Callable[[int, random.Random], Plan]] = {
    "gentle": _gentle,
    "wild": _wild,
    "successor": aimed.successor,
    "deaf": aimed.deaf,
    "mutual": aimed.mutual,
    "shared": aimed.shared,
    "revisit": aimed.revisit,
    "streamed": aimed.streamed,
}
"""By name; `draw` weighs them."""
