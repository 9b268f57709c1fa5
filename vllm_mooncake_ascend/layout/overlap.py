"""Whether planes share bytes. Exact for memory cut into nested runs, which is what tensors are.

Works from outside in: planes whose extents do not touch cannot collide. Where extents do touch, all planes of the cluster
must have the same outermost stride, and one step of it must be long enough for everything inside; then the step is peeled
off and what is inside is looked at in the same way. Anything that cannot be shown to be apart counts as a collision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from vllm_mooncake_ascend.layout.plane import Plane


class _Box(msgspec.Struct, frozen=True, kw_only=True):
    """A plane with its dimensions in one list: (stride, extent) of each, outermost first; counts of 1 are left out."""

    name: str
    base_address: int
    length_bytes: int
    dimensions: tuple[tuple[int, int], ...]
    """(stride in bytes, bytes from the first to the last step)."""

    @property
    def end_address(self) -> int:
        return self.base_address + sum(extent for _, extent in self.dimensions) + self.length_bytes


def extent(plane: Plane) -> tuple[int, int]:
    """First address of the plane and the one behind its last byte; strides must not be negative."""
    box = _box(plane)
    return box.base_address, box.end_address


def block_length_bytes(plane: Plane) -> int:
    """Bytes from the first to the last byte of one block, gaps included."""
    return (
        (plane.tokens_per_block - 1) * plane.token_stride_bytes
        + (plane.num_heads - 1) * plane.head_stride_bytes
        + plane.bytes_per_token_head
    )


def collision(planes: Iterable[Plane]) -> tuple[str, str] | None:
    """Names of two planes (or twice of one) that share bytes or cannot be shown not to, or None."""
    waiting = [[_box(plane) for plane in planes]]
    while waiting:
        cluster_of_any = waiting.pop()
        for cluster in _touching(cluster_of_any):
            if len(cluster) == 1 and not cluster[0].dimensions:
                continue
            step_bytes = _common_step(cluster)
            inner = [msgspec.structs.replace(box, dimensions=box.dimensions[1:]) for box in cluster]
            span_bytes = max(box.end_address for box in inner) - min(box.base_address for box in inner)
            if span_bytes > step_bytes:
                return cluster[0].name, cluster[-1].name
            assert all(len(after.dimensions) < len(before.dimensions) for after, before in zip(inner, cluster, strict=True))
            waiting.append(inner)
    return None


def _box(plane: Plane) -> _Box:
    steps = (
        (plane.block_stride_bytes, plane.num_blocks),
        (plane.token_stride_bytes, plane.tokens_per_block),
        (plane.head_stride_bytes, plane.num_heads),
    )
    return _Box(
        name=plane.name,
        base_address=plane.base_address,
        length_bytes=plane.bytes_per_token_head,
        dimensions=tuple(sorted(((stride, stride * (count - 1)) for stride, count in steps if count > 1), reverse=True)),
    )


def _touching(boxes: list[_Box]) -> Iterator[list[_Box]]:
    """Clusters of boxes whose extents overlap in a chain."""
    cluster: list[_Box] = []
    end_address = 0
    for box in sorted(boxes, key=lambda box: box.base_address):
        if cluster and box.base_address >= end_address:
            yield cluster
            cluster = []
        cluster.append(box)
        end_address = max(end_address, box.end_address) if len(cluster) > 1 else box.end_address
    if cluster:
        yield cluster


def _common_step(cluster: list[_Box]) -> int:
    """The outermost stride that all have, or 0: nothing fits into a step of 0 bytes."""
    strides = {box.dimensions[0][0] if box.dimensions else 0 for box in cluster}
    return strides.pop() if len(strides) == 1 else 0
