"""Reads Prometheus text."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def totals_of(text: str) -> dict[str, float]:
    """Every sample of a `/metrics` page by its name, summed over its labels."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals
