"""The installed Mooncake answers as the version we wrote `engines.codes` for."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_mooncake_ascend.engines import build
from vllm_mooncake_ascend.testing import observed_codes

RECORDED = Path(__file__).with_name("observed_codes.json")


@pytest.mark.engine
def test_mooncake_answers_with_the_recorded_codes(mooncake_environment: None) -> None:
    """Every question of `observed_codes` is asked again; a version without a record, or another answer, is named."""
    version = build.installed_build().version
    recorded = observed_codes.read_recorded(RECORDED)
    assert version in recorded, f"Mooncake {version} has no record; look at what {observed_codes.__name__} finds and add it"
    assert recorded[version]["tcp"] == observed_codes.observe("tcp")
