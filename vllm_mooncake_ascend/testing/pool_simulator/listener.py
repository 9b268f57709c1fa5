"""Somebody who believes the KV events of a simulated engine, and notices when they cannot be true."""

from __future__ import annotations

from collections.abc import Callable

from vllm_mooncake_ascend.pool import actions
from vllm_mooncake_ascend.pool.known import BlockName
from vllm_mooncake_ascend.wire.pool_steps import SaveOrder

Check = Callable[[bool, str], None]


class Listener:
    """`believed` are the blocks it takes for loadable."""

    def __init__(self) -> None:
        self.believed: set[BlockName] = set()
        self.orders: dict[int, SaveOrder] = {}
        """Saves of which it has not been told yet whether they are in the pool."""

    def hear(self, action: actions.SchedulerAction, check: Check) -> None:
        """One action; only those about saves and events mean something to it."""
        match action:
            case actions.OrderSave():
                self.orders[action.order.save_id] = action.order
            case actions.Stored() | actions.NotStored():
                order = self.orders.pop(action.save_id, None)
                check(order is not None, f"save {action.save_id} was told twice, or never ordered")
                if order is not None and isinstance(action, actions.Stored):
                    self.believed |= {(group.group_index, one) for group in order.groups for one in group.hashes}
            case actions.Gone():
                check(set(action.blocks) <= self.believed, "blocks are told to be gone that were not told to be there")
                self.believed -= set(action.blocks)
            case _:
                pass
