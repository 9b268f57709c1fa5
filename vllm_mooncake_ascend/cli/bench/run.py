"""One run of a bench command: what its measurements share, from the seed to the tables."""

from __future__ import annotations

import datetime
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer
from rich.console import Console

from vllm_mooncake_ascend.cli.bench import machine, plot, report, rounds, tables
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure, Report
from vllm_mooncake_ascend.cli.bench.samples import NoiseRules, Sample

ROUNDS = typer.Option(15, min=1, help="Samples of each figure.")
SEED = typer.Option(None, help="Of the order of the samples; drawn and printed when not given.")
JSON = typer.Option(None, "--json", help="Write everything, samples included, to this file.", dir_okay=False)
PLOTS = typer.Option(None, "--plots", help="Write SVG plots into this folder; needs the extra `bench`.", file_okay=False)
FOREIGN_CORES = typer.Option(
    NoiseRules().max_foreign_cores, min=0.0, help="A sample on the wall clock beside more foreign CPU is not quiet."
)


class Run:
    """Collects samples; `finish` makes the report and shows it."""

    def __init__(self, command: str, *, num_rounds: int, seed: int | None, max_foreign_cores: float) -> None:
        self.console = Console(stderr=True)
        self.seed = secrets.randbelow(1 << 31) if seed is None else seed
        self._command = command
        self.num_rounds = num_rounds
        self._rules = NoiseRules(max_foreign_cores=max_foreign_cores, min_quiet=min(NoiseRules().min_quiet, num_rounds))
        self._order = random.Random(self.seed)
        self._started = datetime.datetime.now(datetime.timezone.utc)
        self._started_s = time.monotonic()
        self._machine = machine.machine_here()
        self._samples: dict[Measure, Sequence[Sample]] = {}
        self._comparisons: list[Comparison] = []
        self._notes: list[str] = []

    def measure(self, probes: Sequence[rounds.Probe], comparisons: Sequence[Comparison] = ()) -> None:
        """Take samples of these in turns."""
        total = len(probes) * self.num_rounds
        with self.console.status("warming up") as status:
            num_done = 0

            def show(measure: Measure) -> None:
                nonlocal num_done
                num_done += 1
                status.update(f"{measure.name}, {measure.case}: {num_done} of {total} samples")

            found = rounds.take_rounds(probes, num_rounds=self.num_rounds, order=self._order, on_sample=show)
        self.add(found, comparisons)

    def add(self, samples: Mapping[Measure, Sequence[Sample]], comparisons: Sequence[Comparison] = ()) -> None:
        """Samples that were taken in turns."""
        assert not self._samples.keys() & samples.keys(), "measured before"
        self._samples.update(samples)
        self._comparisons += comparisons

    def note(self, text: str) -> None:
        """What a reader must know."""
        self._notes.append(text)

    def report(self) -> Report:
        """Of all that was measured so far."""
        return Report(
            command=self._command,
            seed=self.seed,
            started_utc=self._started.isoformat(timespec="seconds"),
            seconds=time.monotonic() - self._started_s,
            versions=machine.versions_here(),
            machine=self._machine,
            rules=self._rules,
            figures=tuple(report.figures_of(self._samples, self._rules)),
            ratios=tuple(report.ratios_of(self._comparisons, self._samples, self._rules, seed=self.seed)),
            notes=tuple(self._notes),
        )

    def finish(self, json_path: Path | None, plot_folder: Path | None) -> None:
        """Show the report, and write it where it is wanted."""
        made = self.report()
        tables.print_report(made, Console())
        if json_path is not None:
            report.write(made, json_path)
        if plot_folder is not None:
            try:
                paths = plot.write_plots(made, plot_folder)
            except plot.PlotMissing as error:
                typer.echo(f"error: {error}", err=True)
                raise typer.Exit(2) from error
            typer.echo("\n".join(str(path) for path in paths))
