"""What `bench pool` puts and gets: blocks of 1 MiB in 16 buffers, named so that everybody knows which bytes they have."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_mooncake_ascend.cli.bench import transfer_memory
from vllm_mooncake_ascend.cli.bench.transfer_memory import STEP_BYTES, Bytes
from vllm_mooncake_ascend.engines.base import KVStore
from vllm_mooncake_ascend.engines.native_store import StoreSettings
from vllm_mooncake_ascend.engines.sealed_store import SealedStore
from vllm_mooncake_ascend.engines.store import MooncakeStore
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.planner.pool_keys import Shard, shards
from vllm_mooncake_ascend.runtime.pool_orders import PlannedCall, PoolOrders
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.pool_steps import GroupBlocks, LoadOrder, SaveOrder

NAMESPACE = "b" * 32
SEALED, UNSEALED = "sealed", "unsealed"


class PoolMemory:
    """Two halves of blocks: those that are put, with bytes of their own, and those that gets fill."""

    def __init__(self, num_blocks: int, *, seed: int) -> None:
        self.num_blocks = num_blocks
        self.bytes: Bytes = transfer_memory.make_memory((2 * num_blocks + 1) * STEP_BYTES, seed=seed)
        self.layout: RankLayout = transfer_memory.layout_of(transfer_memory.region_of(self.bytes), "")
        self.shards: tuple[Shard, ...] = shards([self.layout])
        self._orders = PoolOrders(self.layout)
        self._orders.learn(self.shards)

    @property
    def put_ids(self) -> range:
        return range(1, self.num_blocks + 1)

    @property
    def got_ids(self) -> range:
        return range(self.num_blocks + 1, 2 * self.num_blocks + 1)

    def save(self, save_id: int, family: str, num_blocks: int) -> SaveOrder:
        """Put the first blocks under the names of a family."""
        groups = self._groups(family, self.put_ids[:num_blocks])
        return SaveOrder(save_id=save_id, chain=save_id, request_id=RequestId("r"), namespace=NAMESPACE, groups=groups)

    def load(self, load_id: int, family: str, num_blocks: int) -> LoadOrder:
        """Get what is put under the names of a family."""
        groups = self._groups(family, self.got_ids[:num_blocks])
        return LoadOrder(load_id=load_id, request_id=RequestId("r"), namespace=NAMESPACE, groups=groups)

    def put_calls(self, family: str, num_blocks: int) -> list[PlannedCall]:
        """The calls in which a worker carries such an order out."""
        return self._orders.save(self.save(1, family, num_blocks))

    def get_calls(self, family: str, num_blocks: int) -> list[PlannedCall]:
        """The same of a load."""
        return self._orders.load(self.load(1, family, num_blocks))

    def forget_got(self) -> None:
        """Make the blocks that gets fill wrong."""
        self._planes[:, self.num_blocks + 1 :] = 0

    def got_equals_put(self, num_blocks: int) -> bool:
        """Whether the first got blocks have the bytes of the first put ones."""
        planes, first = self._planes, self.num_blocks + 1
        return bool((planes[:, first : first + num_blocks] == planes[:, 1 : num_blocks + 1]).all())

    @property
    def _planes(self) -> Bytes:
        """`[layers, blocks, bytes]`."""
        view: Bytes = self.bytes.reshape(transfer_memory.NUM_LAYERS, 2 * self.num_blocks + 1, transfer_memory.BLOCK_BYTES)
        return view

    def _groups(self, family: str, block_ids: Sequence[int]) -> tuple[GroupBlocks, ...]:
        hashes = tuple(f"{family}/{index}".encode() for index in range(len(block_ids)))
        return (GroupBlocks(group_index=0, block_ids=tuple(block_ids), hashes=hashes),)


def make_store(master_address: str, *, segment_bytes: int, is_sealed: bool, reads_apart: bool = True) -> KVStore:
    """A client as our workers have it on this kind of machine, or without seals."""
    settings = StoreSettings(
        host="127.0.0.1",
        protocol="tcp",
        master_address=master_address,
        segment_bytes=segment_bytes,
        reads_apart=reads_apart,
    )
    store = MooncakeStore(settings)
    return SealedStore(store) if is_sealed else store
