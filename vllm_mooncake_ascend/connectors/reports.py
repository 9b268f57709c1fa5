"""What vLLM is told of receives in one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vllm_mooncake_ascend.wire.steps import Report


@dataclasses.dataclass(frozen=True)
class StepReports:
    """Received requests; failed ones are among them. The scheduler-role side has decided each of them exactly once."""

    received: frozenset[str]
    failed: frozenset[str]
    invalid_block_ids: frozenset[int]


_NONE = StepReports(received=frozenset(), failed=frozenset(), invalid_block_ids=frozenset())


def step_reports(reports: Sequence[Report]) -> StepReports:
    """In vLLM's terms."""
    if not reports:
        return _NONE
    failed = [report for report in reports if not report.ok]
    return StepReports(
        received=frozenset(str(report.request_id) for report in reports),
        failed=frozenset(str(report.request_id) for report in failed),
        invalid_block_ids=frozenset(block_id for report in failed for block_id in report.block_ids),
    )
