"""Command line of the simulators: `python -m vllm_mooncake_ascend.testing.simulator --seeds 100000 --jobs 2`.

Runs the machines of a transfer and those of the pool, each in as many worlds as seeds are asked for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from vllm_mooncake_ascend.testing.pool_simulator import runner as pool_runner
from vllm_mooncake_ascend.testing.seeds import Simulator, run_many
from vllm_mooncake_ascend.testing.simulator import runner

SIMULATORS = (runner.SIMULATOR, pool_runner.SIMULATOR)


def main(arguments: list[str] | None = None, simulators: Sequence[Simulator] = SIMULATORS) -> int:
    """Run seeds; 1 when one fails, which is then told with its replay and shrunk. `arguments`: None for the process's own."""
    parser = argparse.ArgumentParser(
        description="run the machines of a transfer and of the pool in simulated worlds, one a seed"
    )
    parser.add_argument("--machines", choices=[one.name for one in simulators], help="only these machines")
    parser.add_argument("--seeds", type=int, default=500, help="how many worlds of each")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--trace", action="store_true", help="print every event of the first seed and stop")
    parser.add_argument("--coverage", action="store_true", help="print the seeds that are the first to make each move")
    options = parser.parse_args(arguments)
    num_failed = 0
    for simulator in simulators:
        if options.machines not in (None, simulator.name):
            continue
        if options.coverage:
            sys.stdout.write(simulator.coverage(options.seeds))
        elif options.trace:
            sys.stdout.write(simulator.story(options.start) + "\n")
        else:
            num_failed += not _is_clean(simulator, options)
    return 1 if num_failed else 0


def _is_clean(simulator: Simulator, options: argparse.Namespace) -> bool:
    """Run one simulator, and tell how it went."""
    started_s = time.monotonic()
    failure = run_many(simulator.first_failure, options.start, options.seeds, options.jobs)
    if failure is None:
        rate = options.seeds / (time.monotonic() - started_s)
        sys.stdout.write(f"{simulator.name}: {options.seeds} seeds from {options.start} clean, {rate:.0f} seeds/s\n")
        return True
    replay = f"{__package__} --machines {simulator.name} --trace --start {failure.seed}"
    sys.stdout.write(
        f"{simulator.name}: seed {failure.seed} failed: {failure.text}\n"
        f"replay: python -m {replay}\n"
        f"shrunk to:\n{simulator.shrunk_story(failure.seed)}\n"
    )
    return False


if __name__ == "__main__":
    sys.exit(main())
