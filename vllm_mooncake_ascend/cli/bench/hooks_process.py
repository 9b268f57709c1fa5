"""A process that measures scheduler hooks: ours, those of a connector that does nothing, and vLLM's own store connector.

    python -m vllm_mooncake_ascend.cli.bench.hooks_process '{"nums_running": [1], ...}'

Its last line on stdout is JSON: pairs of a measure and its samples. A process of its own, because vLLM and its connectors
keep threads and sockets for as long as their process lives, and some wait for ever at its end.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import msgspec

from vllm_mooncake_ascend.cli.bench import bare_engine
from vllm_mooncake_ascend.cli.bench.bare_engine import BareEngine, ConnectorChoice
from vllm_mooncake_ascend.cli.bench.report import Measure
from vllm_mooncake_ascend.cli.bench.rounds import Probe, take_rounds
from vllm_mooncake_ascend.cli.bench.samples import Goal, Sample

STEPS_PER_SAMPLE = 5
STEPS_PER_SAMPLE_OF_FEW = 40
"""Up to FEW_RUNNING: their steps take a millisecond or less."""
FEW_RUNNING = 64
STEPS_PER_NEWCOMER = 24
"""At the most, but for a machine that does not answer."""
LOOKUP_S = 0.01
"""A newcomer's look into the pool is over by then. A model's step takes as long; without one vLLM would ask on and on."""
PROMPT_TOKENS = 24
"""Less than a block: vLLM's store connector would ask its workers about more, and there are none."""
NEWCOMER_BLOCKS = 8
MAX_WAIT_S = 60.0
STEP_PAUSE_S = 0.001
"""Between steps that wait: whoever is waited for needs the core too."""
SAVE_PAUSES_S = tuple(min(LOOKUP_S * 2**doubled, 4.0) for doubled in range(STEPS_PER_NEWCOMER - 4))
"""Between steps that wait for a save, fifty seconds in all: few steps, as each lengthens what runs."""
STEP_GOAL_US = 50.0
GOAL_RUNNING = 1_024

NULL = "no-op connector"
P2P = "ours, P2P"
POOL = "ours, pool"
PEER = "vLLM's store"

Found = list[tuple[Measure, list[Sample]]]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure."""

    nums_running: tuple[int, ...]
    num_rounds: int
    seed: int
    master_address: str


class StuckEngine(RuntimeError):
    """A request does not get to run."""


def choices(master_address: str) -> dict[str, ConnectorChoice]:
    return {
        NULL: ConnectorChoice(name="NullConnector", module="vllm_mooncake_ascend.testing.null_connector", role="kv_consumer"),
        P2P: ConnectorChoice(
            name="MooncakeConnectorV1",
            module="vllm_mooncake_ascend",
            role="kv_both",
            extra={"side_channel_host": "127.0.0.1", "tame_queue_spin": False},
        ),
        POOL: ConnectorChoice(
            name="MooncakeStoreConnectorV1",
            module="vllm_mooncake_ascend",
            role="kv_both",
            extra={
                "transfer_host": "127.0.0.1",
                "master_address": master_address,
                "segment_bytes": "256MB",
                "tame_queue_spin": False,
            },
        ),
        PEER: ConnectorChoice(name="MooncakeStoreConnector", module="", role="kv_both", has_workers=False),
    }


def measure(order: Order, model: Path) -> Found:
    """All connectors in turns, for each number of running requests."""
    found: Found = []
    kept = []
    for num_running in order.nums_running:
        engines = {
            subject: _filled_engine(model, choice, num_running, order.num_rounds)
            for subject, choice in choices(order.master_address).items()
        }
        kept.append(engines)
        probes = [_step_probe(engine, subject, num_running) for subject, engine in engines.items()]
        probes += [_newcomer_probe(engines[subject], subject, num_running) for subject in (NULL, P2P, POOL)]
        found += take_rounds(probes, num_rounds=order.num_rounds, order=random.Random(order.seed)).items()
        for subject in (NULL, P2P, POOL):
            engines[subject].close()
    return found


def _filled_engine(model: Path, choice: ConnectorChoice, num_running: int, num_rounds: int) -> BareEngine:
    num_steps = (num_rounds + 2) * (_steps_per_sample(num_running) + STEPS_PER_NEWCOMER)
    blocks_each = 2 + (PROMPT_TOKENS + num_steps) // bare_engine.BLOCK_TOKENS
    # And for newcomers, and what they leave in the cache.
    num_blocks = num_running * blocks_each + 64 * NEWCOMER_BLOCKS
    engine = BareEngine(model, choice, max_requests=num_running, num_blocks=num_blocks)
    for _ in range(num_running):
        engine.add(PROMPT_TOKENS)
    _step_until_all_run(engine)
    return engine


def _steps_per_sample(num_running: int) -> int:
    return STEPS_PER_SAMPLE_OF_FEW if num_running <= FEW_RUNNING else STEPS_PER_SAMPLE


def _step_until_all_run(engine: BareEngine) -> None:
    deadline_s = time.monotonic() + MAX_WAIT_S
    while engine.step() < len(engine.running) or engine.scheduler.waiting:
        if time.monotonic() > deadline_s:
            raise StuckEngine(f"{len(engine.running)} requests did not all run within {MAX_WAIT_S:g} s")
        time.sleep(STEP_PAUSE_S)


def _step_until_saved(engine: BareEngine) -> None:
    for pause_s in SAVE_PAUSES_S:
        if not engine.has_unfinished_saves:
            return
        time.sleep(pause_s)
        engine.step()
    raise StuckEngine(f"a save did not end within {sum(SAVE_PAUSES_S):g} s")


def _step_probe(engine: BareEngine, subject: str, num_running: int) -> Probe:
    num_steps = _steps_per_sample(num_running)

    def take() -> float:
        engine.hooks.seconds = 0.0
        for _ in range(num_steps):
            engine.step()
        return 1e6 * engine.hooks.seconds / num_steps

    is_bound = num_running == GOAL_RUNNING and subject in (P2P, POOL)
    return Probe(
        measure=Measure(
            name="hooks of a step",
            case=f"{num_running:,} running",
            subject=subject,
            unit="us",
            clock="cpu",
            goal=Goal(limit=STEP_GOAL_US, is_ceiling=True) if is_bound else None,
        ),
        take=take,
    )


def _newcomer_probe(engine: BareEngine, subject: str, num_running: int) -> Probe:
    """One request leaves, one comes with a prompt that nobody has, runs, and is saved where that is done."""

    def take() -> float:
        engine.hooks.seconds = 0.0
        engine.end(engine.running[0])
        engine.add(NEWCOMER_BLOCKS * bare_engine.BLOCK_TOKENS)
        time.sleep(LOOKUP_S)
        _step_until_all_run(engine)
        _step_until_saved(engine)
        return 1e6 * engine.hooks.seconds

    return Probe(
        measure=Measure(
            name=f"hooks of a newcomer of {NEWCOMER_BLOCKS} blocks",
            case=f"{num_running:,} running",
            subject=subject,
            unit="us",
            clock="cpu",
        ),
        take=take,
    )


def main() -> None:
    order = msgspec.json.decode(sys.argv[1], type=Order)
    bare_engine.prepare_process()
    with bare_engine.process_groups() as model:
        found = measure(order, model)
    sys.stdout.write("\n" + msgspec.json.encode(found).decode() + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
