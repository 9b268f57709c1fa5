"""The oracle for plans: imagined memories, and a copy that moves one byte at a time. Shares no code with the planner.

It knows only what a plane says of itself: where token t of head h in block b lies. Every row of the model's KV has a content
of its own, so that any byte in a wrong place is seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from vllm_mooncake_ascend.layout.plane import Plane, RankLayout
from vllm_mooncake_ascend.planner.batch import CopyBatch


class Memory:
    """The registered memory of one rank, every byte with a value of its own address at first."""

    def __init__(self, rank: RankLayout, seed: int) -> None:
        self.bytes = {
            address: (address * 167 + seed) & 0xFF
            for region in rank.regions
            for address in range(region.base_address, region.base_address + region.length_bytes)
        }
        self.region_of = {
            address: index
            for index, region in enumerate(rank.regions)
            for address in range(region.base_address, region.base_address + region.length_bytes)
        }

    def array(self, end_address: int) -> npt.NDArray[np.uint8]:
        """The memory as one array with address 0 at index 0, long enough for `end_address`."""
        whole = np.zeros(max(end_address, max(self.bytes) + 1), np.uint8)
        whole[list(self.bytes)] = list(self.bytes.values())
        return whole

    def take(self, whole: npt.NDArray[np.uint8]) -> None:
        """Take back what `array` gave out."""
        self.bytes = {address: int(whole[address]) for address in self.bytes}


def content(name: str, row: int, head: int, index: int) -> int:
    """The byte that belongs to a plane's row (named by its first token), global head and place."""
    return zlib.crc32(f"{name} {row} {head} {index}".encode()) & 0xFF


def rows(rank: RankLayout, plane: Plane, block_ids: tuple[int, ...], end_token: int) -> Iterator[tuple[int, int]]:
    """(first token, address of head 0) of each row of a request; rows of a state are named by their distance from the newest
    one, 0 for that."""
    group = rank.groups[plane.group_index]
    for position, block_id in enumerate(block_ids):
        if block_id == 0:
            continue
        for kernel in range(group.kernel_blocks_per_block):
            kernel_block = block_id * group.kernel_blocks_per_block + kernel
            for row in range(plane.tokens_per_block):
                address = plane.base_address + kernel_block * plane.block_stride_bytes + row * plane.token_stride_bytes
                if group.has_recurrent_state:
                    yield position - (end_token - 1) // group.tokens_per_block, address
                else:
                    size = group.tokens_per_block // group.kernel_blocks_per_block // plane.tokens_per_block
                    token = position * group.tokens_per_block + (kernel * plane.tokens_per_block + row) * size
                    yield token, address


def fill(memory: Memory, rank: RankLayout, tables: tuple[tuple[int, ...], ...], end_token: int) -> None:
    """Write a request's KV where the rank's planes say it belongs."""
    for plane in rank.planes:
        for token, address in rows(rank, plane, tables[plane.group_index], end_token):
            for head in range(plane.num_heads):
                for index in range(plane.bytes_per_token_head):
                    memory.bytes[address + head * plane.head_stride_bytes + index] = content(
                        plane.name, token, plane.first_head + head, index
                    )


def copied(calls: Iterable[tuple[str, CopyBatch]], remotes: dict[str, Memory]) -> dict[int, tuple[str, int]]:
    """Which remote byte each local byte comes from: local address -> (session, remote address); refuses to write twice."""
    origin: dict[int, tuple[str, int]] = {}
    for session, batch in calls:
        for local, remote, length in zip(
            batch.local_addresses.tolist(), batch.remote_addresses.tolist(), batch.lengths_bytes.tolist(), strict=True
        ):
            regions = {remotes[session].region_of.get(remote + index) for index in range(length)}
            assert len(regions) == 1, "a descriptor is in two source regions"
            assert None not in regions, "a descriptor leaves its source region"
            for index in range(length):
                assert local + index not in origin, "a byte is written twice"
                origin[local + index] = (session, remote + index)
    return origin


def carried_out(calls: Iterable[tuple[str, CopyBatch]], memory: Memory, remotes: dict[str, Memory]) -> None:
    """Perform engine calls on the memories."""
    for address, (session, remote_address) in copied(calls, remotes).items():
        assert address in memory.bytes, "a descriptor leaves its target region"
        memory.bytes[address] = remotes[session].bytes[remote_address]


def problems(
    before: Memory, after: Memory, rank: RankLayout, local_block_ids: tuple[tuple[int, ...], ...], span: tuple[int, int]
) -> list[str]:
    """What is wrong with `after` as the result of reading tokens [first, end) = `span`.

    Each byte must hold the KV that belongs there (of wanted rows), its old value (of all else), or either of the two
    (behind the range in the last block, outside a window).
    """
    allowed = {address: {value} for address, value in before.bytes.items()}
    for plane in rank.planes:
        for token, address in rows(rank, plane, local_block_ids[plane.group_index], span[1]):
            is_old_right, is_new_right = _verdict(rank, plane, token, span)
            for head in range(plane.num_heads):
                for index in range(plane.bytes_per_token_head):
                    at = address + head * plane.head_stride_bytes + index
                    old = {before.bytes[at]} if is_old_right else set()
                    new = {content(plane.name, token, plane.first_head + head, index)} if is_new_right else set()
                    allowed[at] = old | new
    return [
        f"byte {address:#x} is {value}, not in {allowed[address]}"
        for address, value in after.bytes.items()
        if value not in allowed[address]
    ]


def _verdict(rank: RankLayout, plane: Plane, token: int, span: tuple[int, int]) -> tuple[bool, bool]:
    """(row may keep what it held, row may hold the request's KV) for the row that starts with `token`."""
    first_token, end_token = span
    group = rank.groups[plane.group_index]
    if first_token == end_token or token < (0 if group.has_recurrent_state else first_token):
        return True, False
    if group.has_recurrent_state:
        return (False, True) if token == 0 else (True, False)
    if token >= end_token:
        return True, True
    # Blocks are filled whole, so everything in the block of the window's first token must come.
    seen_token = max(0, end_token - group.window_tokens + 1) if group.window_tokens else 0
    is_outside_window = token < seen_token // group.tokens_per_block * group.tokens_per_block
    return is_outside_window, True
