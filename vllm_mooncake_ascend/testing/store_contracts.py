"""What every `engines.base.KVStore` must do, as checks that run against any implementation in its world.

A check takes a `store_world.StoreWorld`, states one behaviour in its name and fails with an AssertionError. Checks know no
implementation; `memory_store_world` and `mooncake_store_world` provide the worlds, `tests/contract/test_kv_store.py` runs
each check in each.
"""

from __future__ import annotations

from vllm_mooncake_ascend.testing import store_contract_data, store_contract_faults, store_contract_seals
from vllm_mooncake_ascend.testing.store_world import StoreCheck

KV_STORE_CHECKS: tuple[StoreCheck, ...] = store_contract_data.CHECKS + store_contract_faults.CHECKS
SEALED_STORE_CHECKS: tuple[StoreCheck, ...] = KV_STORE_CHECKS + store_contract_seals.CHECKS
"""What a `SealedStore` must do."""
