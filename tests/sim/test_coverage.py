"""Every move the laws allow is made in some simulated world, but for those named here, which have tests of their own.

When a theme changes, other seeds make the rare moves: `python -m vllm_mooncake_ascend.testing.simulator --machines
transfer --coverage --seeds 8000` lists them.
"""

from __future__ import annotations

from vllm_mooncake_ascend.testing.seeds import Move
from vllm_mooncake_ascend.testing.simulator.runner import Coverage, run_seeds

RARE_SEEDS = (
    509,
    520,
    526,
    536,
    556,
    646,
    656,
    676,
    857,
    924,
    1005,
    1089,
    1130,
    1154,
    1213,
    1233,
    1406,
    1427,
    1560,
    1800,
    1814,
    1817,
    1963,
    3224,
    3438,
    3830,
    4252,
    5258,
    5474,
    6358,
)

NOT_SIMULATED: set[Move] = {
    # A producer always answers a Subscribe: only the loss of every one of 240 of them would come to this.
    ("FetchState", "ASKING", "LATE", "SPENT"),
    ("FetchState", "ASKING", "LATE", "DOOMED"),
    # Orders without a call, or cancelled before they came, are made by planners and shells, not by the simulated workers.
    ("ReadState", "UNKNOWN", "PLANNED", "UNKNOWN"),
    # A rank that holds nothing of one part holds nothing of any; tests/pure/test_streaming.py plays the others.
    ("ReadState", "WAITING", "PLANNED", "WAITING"),
    ("ReadState", "QUEUED", "PLANNED", "WAITING"),
    ("ReadState", "QUEUED", "PLANNED", "UNKNOWN"),
    ("ReadState", "STOPPING", "REFUSED", "STOPPING"),
    ("FetchState", "READY", "OFFERED_READY", "SPENT"),
    # Bounds of thousands are not filled in a world of a few requests.
    ("TransferState", "UNKNOWN", "SUBSCRIBED", "UNKNOWN"),
    ("TransferState", "UNKNOWN", "RELEASED", "UNKNOWN"),
}


def test_every_move_of_the_laws_is_made_in_some_world() -> None:
    """Goal: no rule of the machines stays untried. Method: the first 500 seeds and those that make rare moves."""
    coverage = Coverage()

    failures = list(run_seeds([*range(500), *RARE_SEEDS], coverage.machines))

    assert [] == failures
    assert NOT_SIMULATED == coverage.unreached()
