"""cli.bench: rounds, noise from /proc, the report as JSON, and its tables."""

from __future__ import annotations

import io
import random
import sys
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli import cpu_use, main
from vllm_mooncake_ascend.cli.bench import foreign_cpu, plot, report, rounds, run, tables
from vllm_mooncake_ascend.cli.bench.report import Comparison, Measure, Report
from vllm_mooncake_ascend.cli.bench.samples import Goal


def measure(subject: str, *, goal: Goal | None = None, name: str = "read") -> Measure:
    return Measure(name=name, case="1 MB", subject=subject, unit="ms", clock="cpu", goal=goal)


def made_run(values: dict[str, list[float]]) -> run.Run:
    """A run in which each subject's samples have these values."""
    made = run.Run("bench nothing", num_rounds=len(next(iter(values.values()))) - 1, seed=5, max_foreign_cores=1e9)
    goal = Goal(limit=2.0, is_ceiling=True)
    probes = [rounds.Probe(measure=measure(one, goal=goal), take=iter(found).__next__) for one, found in values.items()]
    first, second = (probe.measure for probe in probes[:2])
    made.measure(probes, [Comparison(above=first, below=second, goal=Goal(limit=0.9, is_ceiling=False))])
    return made


def printed(made: Report) -> str:
    out = io.StringIO()
    tables.print_report(made, Console(file=out, width=160))
    return out.getvalue()


def test_rounds_take_each_probe_once_in_an_order_that_changes() -> None:
    """Goal: interleaved, in random order, the first call not counted. Method: write down who was called."""
    called: list[str] = []
    probes = [
        rounds.Probe(measure=measure(name), take=lambda name=name: float(called.append(name) or len(called)))
        for name in ("a", "b", "c")
    ]
    found = rounds.take_rounds(probes, num_rounds=20, order=random.Random(1))
    of_round = [tuple(called[3 * number : 3 * number + 3]) for number in range(1, 21)]
    assert ["a", "b", "c"] == called[:3]
    assert {("a", "b", "c")} == {tuple(sorted(order)) for order in of_round}
    assert len(set(of_round)) >= 4
    assert [20] * 3 == [len(samples) for samples in found.values()]


def test_the_order_is_the_seed_s() -> None:
    """Goal: a run can be repeated in its order."""

    def order(seed: int) -> list[str]:
        called: list[str] = []
        probes = [
            rounds.Probe(measure=measure(name), take=lambda name=name: float(called.append(name) or 1)) for name in "abcd"
        ]
        rounds.take_rounds(probes, num_rounds=5, order=random.Random(seed))
        return called

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_the_text_of_proc_stat_is_read_right() -> None:
    """Goal: idle, waiting for a disk and guests do not count as busy. Method: one tick more in each field than in the last."""
    stat = "cpu  1 2 3 400 500 6 7 8 900 1000\ncpu0 1 2 3 4 5 6 7 8 9 10\n"
    ticks_per_s = 1 / foreign_cpu.busy_seconds("cpu 1 0 0 0 0 0 0 0 0 0")
    assert pytest.approx((1 + 2 + 3 + 6 + 7 + 8) / ticks_per_s) == foreign_cpu.busy_seconds(stat)


def test_what_we_do_ourselves_is_not_foreign() -> None:
    """Goal: our own load is no noise. Method: burn half a second here; the machine's total grows by it, and so does ours."""
    before_s = cpu_use.total_cpu_seconds(cpu_use.os.getpid())
    started_s = time.thread_time()
    while time.thread_time() - started_s < 0.5:
        pass
    assert 0.4 < cpu_use.total_cpu_seconds(cpu_use.os.getpid()) - before_s


def test_a_report_survives_json(tmp_path: Path) -> None:
    """Goal: `--json` has all, samples included. Method: write, read, compare."""
    made = made_run({"ours": [1.0, 1.0, 1.1, 1.0], "raw": [1.0, 1.0, 1.0, 1.0]}).report()
    report.write(made, tmp_path / "folder" / "run.json")
    read = msgspec.json.decode((tmp_path / "folder" / "run.json").read_bytes(), type=Report)
    assert made == read
    assert [1.0, 1.1, 1.0] == [sample.value for sample in read.figures[0].samples]
    assert {"vllm", "mooncake", "torch", "python", "vllm-mooncake-ascend"} <= set(read.versions)
    assert {"cpu", "cores", "memory"} <= set(read.machine)


def test_tables_show_results_and_mark_noise() -> None:
    """Goal: what is noise is never shown as a number of its own. Method: one steady subject, one that jumps."""
    text = printed(made_run({"steady": [9.0] + [1.25] * 8, "wild": [9.0, 1.0, 8.0, 1.0, 8.0, 1.0, 8.0, 1.0, 8.0]}).report())
    steady = next(line for line in text.splitlines() if " steady " in line and "/" not in line)
    wild = next(line for line in text.splitlines() if " wild " in line and "/" not in line)
    ratio = next(line for line in text.splitlines() if "steady / wild" in line)
    assert ("1.25" in steady, "met" in steady, "≤ 2" in steady) == (True, True, True)
    assert ("noise" in wild, "4.5" in wild) == (True, False)
    assert "noise" in ratio
    assert "seed 5" in text


def test_notes_are_told() -> None:
    """Goal: what was left out is said."""
    made = made_run({"a": [1.0] * 4, "b": [1.0] * 4})
    made.note("the peer does not start here")
    assert "the peer does not start here" in printed(made.report())


@pytest.mark.parametrize(("value", "text"), [(0.01234, "0.0123"), (1.2345, "1.23"), (99.96, "100"), (12345.6, "12,346")])
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """Goal: no digit that means nothing."""
    assert text == tables.number(value)


def test_plots_ask_for_their_library_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the product does not need pygal, and says what to install. Method: make it impossible to import."""
    monkeypatch.setitem(sys.modules, "pygal", None)
    with pytest.raises(plot.PlotMissing, match="bench"):
        plot.write_plots(made_run({"a": [1.0] * 4, "b": [1.0] * 4}).report(), tmp_path)


def test_a_plot_for_each_thing_measured(tmp_path: Path) -> None:
    """Goal: SVG with every subject, without what is noise. Method: a steady subject and a wild one."""
    made = made_run({"steady": [1.0] * 9, "wild": [9.0, 1.0, 8.0, 1.0, 8.0, 1.0, 8.0, 1.0, 8.0]}).report()
    (path,) = plot.write_plots(made, tmp_path)
    text = path.read_text()
    assert ("bench-nothing-read-ms.svg", True, True, False) == (path.name, "<svg" in text, "steady" in text, "wild" in text)


def test_micro_runs_with_tiny_sizes(tmp_path: Path) -> None:
    """Goal: all of `bench micro` that needs no vLLM. Method: two rounds of tiny sizes; every figure is in the JSON."""
    out = tmp_path / "micro.json"
    words = ["bench", "micro", "--rounds", "2", "--blocks", "16", "--layers", "2", "--lookup-blocks", "8", "--json", str(out)]
    words += ["--seed", "1", "--part", "planner", "--part", "codec", "--part", "lookups"]
    result = CliRunner().invoke(main.build_app(), words)
    assert 0 == result.exit_code, result.output
    made = msgspec.json.decode(out.read_bytes(), type=Report)
    assert {"plan a read", "plan a save", "encode a message", "decode a message", "look into the pool, scheduler thread"} == {
        figure.measure.name for figure in made.figures
    }
    assert all(len(figure.samples) == 2 and figure.spread.median > 0 for figure in made.figures)


def test_a_page_shows_results_and_no_number_for_noise(tmp_path: Path) -> None:
    """Goal: the documentation's tables are what was measured. Method: a report, and its page with a plot."""
    made = made_run({"steady": [9.0] + [1.25] * 8, "wild": [9.0, 1.0, 8.0, 1.0, 8.0, 1.0, 8.0, 1.0, 8.0]})
    made.note("the peer does not start here")
    report.write(made.report(), tmp_path / "run.json")
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "bench-nothing-read-ms.svg").write_text("<svg/>")
    words = ["bench", "page", str(tmp_path / "run.json"), "--out", str(tmp_path / "page.md")]
    result = CliRunner().invoke(main.build_app(), [*words, "--plots", str(tmp_path / "plots")])
    assert 0 == result.exit_code, result.output
    lines = (tmp_path / "page.md").read_text().splitlines()
    assert "| read | 1 MB | steady | 1.25 | 1.25 - 1.25 | ms CPU | ≤ 2 | met | 0.00 |" in [
        line.rpartition("|")[0].rpartition("|")[0] + "| 0.00 |" for line in lines if "steady" in line
    ]
    assert any(line.startswith("| read | 1 MB | wild |  |  | ms CPU | ≤ 2 | noise |") for line in lines)
    assert "| read | 1 MB | steady / wild |  |  | ≥ 0.9 | noise |" in lines
    assert "- the peer does not start here" in lines
    assert "![bench-nothing-read-ms](plots/bench-nothing-read-ms.svg)" in lines


def test_a_page_of_what_is_no_report_is_refused(tmp_path: Path) -> None:
    """Goal: no traceback for a wrong file."""
    (tmp_path / "other.json").write_text("{}")
    words = ["bench", "page", str(tmp_path / "other.json"), "--out", str(tmp_path / "page.md")]
    assert 2 == CliRunner().invoke(main.build_app(), words).exit_code


def test_an_unknown_part_is_refused() -> None:
    """Goal: a slip does not measure nothing."""
    result = CliRunner().invoke(main.build_app(), ["bench", "micro", "--part", "palnner"])
    assert 2 == result.exit_code


def test_all_of_it_goes_into_one_folder(tmp_path: Path) -> None:
    """Goal: one command, reports, plots and a page; nothing of an earlier run. Method: a part that needs nothing, of it the
    smallest."""
    (tmp_path / "micro.json").write_text("{}")
    words = ["bench", "all", "--part", "micro", "--out", str(tmp_path), "--", "--part", "codec", "--rounds", "3"]
    result = CliRunner().invoke(main.build_app(), words)
    assert 0 == result.exit_code, result.output
    made = msgspec.json.decode((tmp_path / "micro.json").read_bytes(), type=Report)
    lines = (tmp_path / "page.md").read_text().splitlines()
    plots = sorted(path.name for path in (tmp_path / "plots").glob("*.svg"))
    assert ("bench micro", True) == (made.command, bool(plots))
    assert plots == sorted(line.partition("(plots/")[2].rstrip(")") for line in lines if line.startswith("!["))
    assert "## bench micro" in lines


def test_a_part_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what did not run is not shown as if it had. Method: a part without its model, beside a report of an earlier run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hits.json").write_text("{}")
    result = CliRunner().invoke(main.build_app(), ["bench", "all", "--part", "hits", "--out", str(tmp_path)])
    assert (1, True) == (result.exit_code, "bench hits ended with 2, and without a report" in result.output)
    assert [] == list(tmp_path.iterdir())


def test_a_part_that_writes_nothing_is_told(tmp_path: Path) -> None:
    """Goal: a slip behind the -- is no success. Method: ask the part for its help."""
    result = CliRunner().invoke(main.build_app(), ["bench", "all", "--part", "micro", "--out", str(tmp_path), "--", "--help"])
    assert (1, True) == (result.exit_code, "bench micro ended with 0, and without a report" in result.output)


def test_all_of_an_unknown_part_is_refused(tmp_path: Path) -> None:
    """Goal: no run of an hour without what was meant."""
    words = ["bench", "all", "--part", "nothing", "--out", str(tmp_path / "out")]
    assert 2 == CliRunner().invoke(main.build_app(), words).exit_code
    assert not (tmp_path / "out").exists()
