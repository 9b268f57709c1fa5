"""What every `engines.base.TransferEngine` must do, as checks that run against any implementation in its world.

A check takes a `contract_world.World`, states one behaviour in its name and fails with an AssertionError. Checks know no
implementation; `memory_world` and `mooncake_world` provide the worlds, `tests/contract/test_transfer_engine.py` runs each
check in each.
"""

from __future__ import annotations

from vllm_mooncake_ascend.testing import contract_faults, contract_memory
from vllm_mooncake_ascend.testing.contract_world import Check

TRANSFER_ENGINE_CHECKS: tuple[Check, ...] = contract_memory.CHECKS + contract_faults.CHECKS
