"""The bench commands that need real Mooncake, with tiny sizes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from vllm_mooncake_ascend.cli.bench.report import Report

pytest.importorskip("mooncake")

pytestmark = pytest.mark.engine


def bench(out: Path, *words: str) -> Report:
    """Run the command in a process of its own, as users do, and read its JSON."""
    command = [sys.executable, "-m", "vllm_mooncake_ascend.cli.main", "bench", *words, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert 0 == done.returncode, done.stdout[-2000:] + done.stderr[-2000:]
    return msgspec.json.decode(out.read_bytes(), type=Report)


def test_transfer_reads_by_every_way(tmp_path: Path) -> None:
    """Goal: two processes, four ways, the right bytes (the command compares them itself). Method: two rounds of 2 MiB."""
    made = bench(tmp_path / "transfer.json", "transfer", "--size", "2", "--rounds", "2", "--seed", "4")
    cases = {"2 MiB, 16 merged runs", "2 MiB, 32 scattered runs"}
    found = {(figure.measure.case, figure.measure.subject) for figure in made.figures}
    ways = ("ours", "raw Mooncake", "memcpy")
    assert {(case, way) for case in cases for way in ways} | {("2 MiB, 16 merged runs", "socket")} == found
    assert cases == {ratio.comparison.above.case for ratio in made.ratios}
    assert all(figure.spread.median > 0 for figure in made.figures)


def test_hooks_are_measured_beside_those_of_vllm(tmp_path: Path) -> None:
    """Goal: real schedulers with four connectors, a request that goes and one that comes. Method: two rounds of two running."""
    pytest.importorskip("vllm")
    made = bench(tmp_path / "hooks.json", "micro", "--part", "hooks", "--running", "2", "--rounds", "2")
    found = {(figure.measure.name, figure.measure.subject) for figure in made.figures}
    of_a_step = {("hooks of a step", who) for who in ("no-op connector", "ours, P2P", "ours, pool", "vLLM's store")}
    of_a_newcomer = {("hooks of a newcomer of 8 blocks", who) for who in ("no-op connector", "ours, P2P", "ours, pool")}
    assert of_a_step | of_a_newcomer == found
    assert all(len(figure.samples) == 2 and figure.spread.median > 0 for figure in made.figures)
    assert ["ours, pool"] == [ratio.comparison.above.subject for ratio in made.ratios]


def test_pool_puts_gets_and_looks_up(tmp_path: Path) -> None:
    """Goal: a master, another process' memory, every client, the right bytes (the command compares them itself). Method: two
    rounds of 2 MiB."""
    made = bench(tmp_path / "pool.json", "pool", "--size", "2", "--keys", "10", "--rounds", "2")
    found = {(figure.measure.name, figure.measure.case, figure.measure.subject) for figure in made.figures}
    ours, raw, unsealed = "ours", "raw Mooncake", "ours, without seals"
    apart, together = "ours, reads_apart", "ours, reads_apart off"
    assert {
        *(("put", "2 MiB into the own segment", who) for who in (ours, unsealed, raw)),
        *(("get", "2 MiB from own segment", who) for who in (together, apart, raw)),
        *(("get", "2 MiB from other process", who) for who in (ours, unsealed, raw)),
        *(("lookup", "10 keys", who) for who in (ours, raw)),
    } == found
    assert all(len(figure.samples) == 2 and figure.spread.median > 0 for figure in made.figures)
