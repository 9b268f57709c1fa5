"""How close two blocks are, by what their bytes stand for."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm_mooncake_ascend.connectors.pool_verifier import difference


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_is_close_and_wrong_bytes_are_not(dtype: str) -> None:
    """One value of a block off by half a percent of the largest, and the values of the block in another order."""
    values = np.linspace(-2.0, 2.0, 64, dtype=np.float32)
    nudged = values.copy()
    nudged[5] += 0.01
    assert [True, False] == [
        difference(encoded(other, dtype), encoded(values, dtype), dtype)[1] for other in (nudged, values[::-1].copy())
    ]


def test_the_largest_difference_is_found() -> None:
    """In float32, where it is exact."""
    values = np.ones(8, dtype=np.float32)
    other = values.copy()
    other[3], other[6] = 0.75, 1.125
    assert (0.25, False) == difference(encoded(other, "float32"), encoded(values, "float32"), "float32")


def test_bytes_of_other_types_have_no_difference() -> None:
    """An 8-bit type of its own scale."""
    block = np.arange(16, dtype=np.uint8)
    assert (None, False) == difference(block, block[::-1].copy(), "fp8_e4m3")


def encoded(values: np.ndarray, dtype: str) -> np.ndarray:
    """As bytes; bfloat16 by cutting off the lower half."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)
