"""metrics: statistics add up whatever the order, label sets stay bounded, export never raises into the engine."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_mooncake_ascend.engines import store_codes
from vllm_mooncake_ascend.metrics import names, stats
from vllm_mooncake_ascend.metrics.prometheus import Exporter
from vllm_mooncake_ascend.p2p import counters
from vllm_mooncake_ascend.pool import counters as pool_counters
from vllm_mooncake_ascend.testing import metrics_page

_amounts = st.integers(1, 1000).map(float)
_events = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.sampled_from([m.name for m in names.METRICS if m.kind == "counter"]), _amounts),
        st.tuples(st.just("observe"), st.sampled_from([m.name for m in names.METRICS if m.kind == "histogram"]), _amounts),
    ),
    max_size=12,
)


def collected(events: list[tuple[str, str, float]]) -> stats.Data:
    """The data of some counted events."""
    collector = stats.Stats()
    for kind, name, amount in events:
        if kind == "count":
            collector.count(name, amount=amount)
        else:
            collector.observe(name, amount)
    return collector.take()


def exporter(registry: CollectorRegistry, label_names: list[str]) -> Exporter:
    """An exporter into a registry of its own."""

    def bound(metric_class: Any) -> Any:
        return lambda **options: metric_class(registry=registry, **options)

    return Exporter(
        gauge_class=bound(Gauge), counter_class=bound(Counter), histogram_class=bound(Histogram), label_names=label_names
    )


@given(_events, _events, _events)
def test_merging_is_associative_and_loses_nothing(
    first: list[tuple[str, str, float]], second: list[tuple[str, str, float]], third: list[tuple[str, str, float]]
) -> None:
    """Goal: ranks and steps may be merged in any grouping. Method: two groupings against all events in one."""
    one, two, three = collected(first), collected(second), collected(third)
    left = stats.merge(stats.merge(one, two), three)
    assert collected(first + second + third) == left == stats.merge(one, stats.merge(two, three))


@given(_events)
def test_statistics_cross_process_borders(events: list[tuple[str, str, float]]) -> None:
    """Goal: vLLM may pickle or encode the data. Method: both round trips."""
    data = collected(events)
    assert (data, data) == (pickle.loads(pickle.dumps(data)), json.loads(json.dumps(data)))


def test_what_was_taken_is_not_taken_again() -> None:
    """Goal: nothing is counted twice. Method: take twice."""
    collector = stats.Stats()
    collector.count("kv_reads_total", "done")
    collector.set_gauge("leases_open", 2)
    assert [{"counters": {"kv_reads_total": {"done": 1.0}}, "gauges": {"leases_open": 2}}, {}] == [
        collector.take(),
        collector.take(),
    ]


def test_a_gauge_is_told_when_it_changes() -> None:
    """Goal: an idle step carries no statistics. Method: set the same value, then another."""
    collector = stats.Stats()
    collector.set_gauge("leases_open", 2)
    collector.take()
    collector.set_gauge("leases_open", 2)
    unchanged = collector.take()
    collector.set_gauge("leases_open", 0)
    assert ({}, {"gauges": {"leases_open": 0}}) == (unchanged, collector.take())


def test_the_later_gauge_stands() -> None:
    """Goal: merging over time shows the present. Method: two values in order."""
    assert {"gauges": {"leases_open": 1}} == stats.merge({"gauges": {"leases_open": 5}}, {"gauges": {"leases_open": 1}})


def test_a_label_value_nobody_declared_counts_as_other() -> None:
    """Goal: no peer can make series grow. Method: count under a made-up reason."""
    collector = stats.Stats()
    collector.count("load_failures_total", "made up by a client")
    assert {"counters": {"load_failures_total": {"other": 1.0}}} == collector.take()


def test_observations_are_bounded() -> None:
    """Goal: a long interval costs bounded memory. Method: merge more observations than are kept."""
    many = {"histograms": {"kv_read_duration_seconds": [0.1] * stats.MAX_OBSERVATIONS}}
    merged = stats.merge(many, many)
    assert stats.MAX_OBSERVATIONS == len(merged["histograms"]["kv_read_duration_seconds"])


def test_the_summary_fits_one_log_line() -> None:
    """Goal: the operator reads sums, not series. Method: counters with and without label, gauge and histogram."""
    collector = stats.Stats()
    collector.count("kv_reads_total", "done", 2)
    collector.count("kv_read_bytes_total", amount=1024)
    collector.observe("kv_read_duration_seconds", 0.1)
    collector.observe("kv_read_duration_seconds", 0.3)
    collector.set_gauge("leases_open", 1)
    expected = {
        "kv_reads_total[done]": 2,
        "kv_read_bytes_total": 1024,
        "kv_read_duration_seconds_mean": 0.2,
        "kv_read_duration_seconds_max": 0.3,
        "leases_open": 1,
    }
    assert expected == stats.summary(collector.take())


def test_export_writes_each_metric_under_vllms_labels() -> None:
    """Goal: dashboards see model and engine. Method: export one of each kind and read the registry."""
    registry = CollectorRegistry()
    made = exporter(registry, ["model_name", "engine"])
    collector = stats.Stats()
    collector.count("kv_reads_total", "done", 2)
    collector.observe("kv_read_duration_seconds", 0.3)
    collector.set_gauge("leases_open", 4)
    made.observe(collector.take(), ["m", 0])
    labels = {"model_name": "m", "engine": "0"}
    read = [
        registry.get_sample_value("mooncake_ascend:kv_reads_total", {**labels, "outcome": "done"}),
        registry.get_sample_value("mooncake_ascend:kv_read_duration_seconds_count", labels),
        registry.get_sample_value("mooncake_ascend:leases_open", labels),
    ]
    assert [2.0, 1.0, 4.0] == read


@pytest.mark.parametrize(
    "data", [{"counters": 7}, {"histograms": {"kv_read_duration_seconds": ["x"]}}, {"gauges": {"leases_open": "y"}}]
)
def test_export_of_damaged_data_is_told_once_and_never_raises(data: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Goal: metrics never stop the engine. Method: data of a wrong shape, twice."""
    made = exporter(CollectorRegistry(), [])
    with caplog.at_level(logging.WARNING):
        made.observe(data, [])
        made.observe(data, [])
    assert 1 == len(caplog.records)


@pytest.mark.parametrize("room", [counters, pool_counters], ids=["p2p", "pool"])
def test_whatever_a_machine_counts_has_a_metric(room: Any) -> None:
    """Goal: no count of a machine is lost. Method: every counter name of the machines' own list."""
    counted = {value for name, value in vars(room).items() if name.isupper() and value.endswith("_total")}
    assert counted == counted & {metric.name for metric in names.METRICS if metric.kind == "counter"}


def test_whatever_reason_the_pool_gives_is_exported() -> None:
    """Goal: no reason of a machine becomes `other`. Method: every reason of the machines' own list, at one metric."""
    reasons = [
        value for name, value in vars(pool_counters).items() if name.isupper() and not value.endswith("_total") and value
    ]
    loads = names.BY_NAME[pool_counters.LOADS_ENDED]
    assert reasons == [loads.bounded(reason) for reason in reasons]


def test_the_codes_of_a_label_are_those_of_the_store() -> None:
    """Goal: an operator can look up each code that is exported. Method: both lists, and words for each code."""
    assert sorted(store_codes.ERROR_CODES) == sorted(names.STORE_CODES)
    assert [] == [code for code in names.STORE_CODES if not store_codes.explain(code)]


def test_names_follow_the_conventions() -> None:
    """Goal: units and kinds can be read off a name. Method: all names."""
    wrong = [
        metric.name
        for metric in names.METRICS
        if (metric.kind == "counter") != metric.name.endswith("_total")
        or (metric.kind == "histogram") != bool(metric.buckets)
        or bool(metric.label) != bool(metric.values)
    ]
    assert (names.METRICS, []) == (tuple(names.BY_NAME.values()), wrong)


def test_the_metrics_page_is_current() -> None:
    """Goal: docs/metrics.md never falls behind. Method: compare with what the names print."""
    told = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert metrics_page.page() == told, "run: make docs"
