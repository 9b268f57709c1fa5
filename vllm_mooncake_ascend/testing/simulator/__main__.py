"""Command line of the simulator: `python -m vllm_mooncake_ascend.testing.simulator --seeds 100000 --jobs 2`."""

from __future__ import annotations

import argparse
import sys
import time

from vllm_mooncake_ascend.testing.simulator.runner import Coverage, explain, fails, first_seeds, run_many, shrink
from vllm_mooncake_ascend.testing.simulator.themes import draw
from vllm_mooncake_ascend.testing.simulator.world import Machines


def main(arguments: list[str] | None = None) -> int:
    """Run seeds; 1 when one fails, which is then shrunk and told in full. `arguments`: None for the process's own."""
    parser = argparse.ArgumentParser(description="run the transfer machines in simulated worlds, one a seed")
    parser.add_argument("--seeds", type=int, default=500, help="how many worlds")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--trace", action="store_true", help="print every event of the first seed and stop")
    parser.add_argument("--coverage", action="store_true", help="print the seeds that are the first to make each move")
    options = parser.parse_args(arguments)
    if options.coverage:
        sys.stdout.write(_coverage(options.seeds))
        return 0
    if options.trace:
        sys.stdout.write(explain(draw(options.start), Machines()) + "\n")
        return 0
    started_s = time.monotonic()
    failure = run_many(options.start, options.seeds, options.jobs)
    if failure is None:
        seconds = time.monotonic() - started_s
        sys.stdout.write(f"{options.seeds} seeds from {options.start} clean, {options.seeds / seconds:.0f} seeds/s\n")
        return 0
    plan = draw(failure.seed)
    assert fails(plan, Machines()), "a seed that failed fails again"
    sys.stdout.write(
        f"seed {failure.seed} failed: {failure.text}\nshrunk to:\n{explain(shrink(plan, Machines()), Machines())}\n"
    )
    return 1


def _coverage(num_seeds: int) -> str:
    found = first_seeds(num_seeds)
    unreached = Coverage().unreached() - set(found)
    lines = [f"{seed:7} {' '.join(move)}" for move, seed in sorted(found.items(), key=lambda item: item[1])]
    return "\n".join([*lines, *(f"  never {' '.join(move)}" for move in sorted(unreached)), ""])


if __name__ == "__main__":
    sys.exit(main())
