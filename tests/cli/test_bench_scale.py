"""cli.bench.scale: the fleet serves as production does, and the command measures every series. Tiny sizes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli import main
from vllm_mooncake_ascend.cli.bench import scale_cases, scale_loads, scale_profile
from vllm_mooncake_ascend.cli.bench.report import Report
from vllm_mooncake_ascend.cli.bench.scale_fleet import Counts, Fleet, Prompt, ScaleFailed
from vllm_mooncake_ascend.wire.steps import ReadOrder

SIZES = scale_loads.Sizes(chunk_tokens=32, num_layers=1, base_tokens=64, block_tokens=16, sample_s=0.0)


def fleet(*, streams: bool, num_prefills: int = 1, num_decodes: int = 1) -> Fleet:
    return Fleet(num_prefills=num_prefills, num_decodes=num_decodes, streams=streams, block_tokens=16, num_layers=1)


def prompt(num_tokens: int) -> Prompt:
    return Prompt.made(num_tokens, block_tokens=16, chunk_tokens=32)


@pytest.mark.parametrize(
    ("streams", "parts"),
    [(False, [(0, 100, True)]), (True, [(0, 32, False), (32, 64, False), (64, 96, False), (96, 100, True)])],
)
def test_a_request_is_read_as_its_mode_says(streams: bool, parts: list[tuple[int, int, bool]]) -> None:
    """Goal: after_prefill reads once, stream reads each chunk when it is written. Method: the orders of 100 tokens."""
    world = fleet(streams=streams)
    orders: list[ReadOrder] = []
    world.on_order = orders.append
    world.serve([(world.prefills[0], world.decodes[0], prompt(100))])
    assert parts == [(order.first_token, order.end_token, order.is_last) for order in orders]


def test_a_request_takes_four_messages_and_two_more_for_each_chunk() -> None:
    """Goal: what is counted is what is sent. Method: between engines that have met; Subscribe, Offer, ReadDone, Verdict."""
    counted = []
    for streams in (False, True):
        world = fleet(streams=streams)
        for _ in range(2):
            world.counts = Counts()
            world.serve([(world.prefills[0], world.decodes[0], prompt(128))])
        counted.append(world.counts.messages)
    assert [4, 8] == counted


def test_requests_at_once_are_under_way_at_once() -> None:
    """Goal: "at once" is no row of requests one after the other. Method: look at the consumer when orders come."""
    world = fleet(streams=True)
    num_loads: list[int] = []
    world.on_order = lambda _: num_loads.append(world.decodes[0].consumer.num_loads)
    world.serve([(world.prefills[0], world.decodes[0], prompt(64)) for _ in range(5)])
    assert {5} == set(num_loads)


def test_a_request_that_is_not_served_ends_the_run() -> None:
    """Goal: nothing is measured that does not work. Method: a prefill that has fewer blocks than its tokens need."""
    world = fleet(streams=False)
    short = Prompt(num_tokens=100, written=(), block_ids=((1, 2),), block_tokens=16)
    with pytest.raises(ScaleFailed, match="not served"):
        world.serve([(world.prefills[0], world.decodes[0], short)])


def test_prefill_remembers_as_many_as_are_asked_for() -> None:
    """Goal: the number of ended requests is steady. Method: look at the producer's table after many more."""
    (load, _) = scale_loads.remembered_loads(SIZES, (20,))
    for _ in range(100):
        load.serve()
    assert 20 == pytest.approx(len(load.fleet.prefills[0].machine._table), abs=1)


def test_engines_have_met_before_they_are_measured() -> None:
    """Goal: handshakes are in the series of first requests alone. Method: messages of a request in either."""

    def num_messages(load: scale_loads.Load) -> float:
        load.renew_state()
        load.fleet.counts = Counts()
        load.serve()
        return load.fleet.counts.messages / load.num_requests

    loads = scale_loads.engine_loads(SIZES, (6,))[:3]
    assert [4, 4, 4] == [num_messages(load) for load in loads]
    assert [6] == [num_messages(load) for load in scale_loads.first_loads(SIZES, (6,))]


def test_slopes_tell_a_line_from_a_square() -> None:
    """Goal: what grows faster than the prompt shows. Method: points on a line, and on a parabola."""
    line = scale_cases.slope_text([(1024, 200.0), (2048, 300.0), (4096, 500.0)])
    square = scale_cases.slope_text([(1024, 100.0), (2048, 400.0), (4096, 1600.0)])
    assert "100 us and 100.0 us for each 1,024 tokens" in line
    assert "100.0 us between the two shortest, 100.0 us between the two longest" in line
    assert "300.0 us between the two shortest, 600.0 us between the two longest" in square


def test_a_profile_names_what_is_dear() -> None:
    """Goal: calls and names of the product's functions. Method: profile one request between engines that have met."""
    world = fleet(streams=False)
    pair = (world.prefills[0], world.decodes[0], prompt(64))
    world.serve([pair])
    costs = scale_profile.profiled(lambda: world.serve([pair]), 1)
    handled = next(cost for name, cost in costs.items() if name.startswith("p2p/producer.py") and name.endswith(" handle"))
    assert (4, True) == (round(handled.calls), handled.is_ours)
    assert 0 < scale_profile.num_calls(costs) < sum(cost.calls for cost in costs.values())


def test_the_command_measures_every_series(tmp_path: Path) -> None:
    """Goal: every series with its ends compared, in both modes. Method: one round of tiny sizes."""
    words = [
        "bench",
        "scale",
        "--rounds",
        "2",
        "--seed",
        "1",
        "--json",
        str(tmp_path / "scale.json"),
        "--layers",
        "1",
        "--base-tokens",
        "64",
    ]
    words += ["--chunk-tokens", "32", "--block-tokens", "16", "--sample-s", "0"]
    for option, sizes in (("tokens", (64, 128, 256)), ("at-once", (1, 3)), ("remembered", (2, 4)), ("engines", (2, 5))):
        words += [word for size in sizes for word in (f"--{option}", str(size))]
    result = CliRunner().invoke(main.build_app(), words)
    assert 0 == result.exit_code, result.output
    made = msgspec.json.decode((tmp_path / "scale.json").read_bytes(), type=Report)
    series = {
        "request, by its prompt",
        "request, by those at once",
        "request, by those ended",
        "request, by engines",
        "first of a pair, by engines",
        "renewal, by those waiting",
    }
    series |= {f"{name}, calls" for name in series}
    assert series == {figure.measure.name for figure in made.figures}
    assert {f"{mode}, caches emptied" for mode in (scale_loads.AT_END, scale_loads.STREAM)} <= {
        figure.measure.subject for figure in made.figures
    }
    assert series == {ratio.comparison.above.name for ratio in made.ratios}
    assert {"us", "messages", "actions", "calls"} == {figure.measure.unit for figure in made.figures}
    assert 2 == sum(note.startswith("Slope") for note in made.notes)


def test_an_unknown_part_is_refused() -> None:
    """Goal: a slip does not measure nothing."""
    assert 2 == CliRunner().invoke(main.build_app(), ["bench", "scale", "--part", "prompt"]).exit_code
