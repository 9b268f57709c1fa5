"""The installed Mooncake Store answers as the version we wrote `engines.store_codes` for."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_mooncake_ascend.engines import build
from vllm_mooncake_ascend.testing import observed_store_codes
from vllm_mooncake_ascend.testing.observed_codes import read_recorded

RECORDED = Path(__file__).with_name("observed_store_codes.json")


@pytest.mark.engine
def test_mooncake_store_answers_with_the_recorded_codes(mooncake_environment: None) -> None:
    """Every question of `observed_store_codes` is asked again; a version without a record, or another answer, is named."""
    version = build.installed_build().version
    recorded = read_recorded(RECORDED)
    assert version in recorded, f"Mooncake {version} has no record; let {observed_store_codes.__name__} add one, and read it"
    assert recorded[version]["tcp"] == observed_store_codes.observe()
