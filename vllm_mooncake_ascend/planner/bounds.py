"""Bounds that shape a plan, as one value, so that a test can plan with small ones."""

from __future__ import annotations

import msgspec

from vllm_mooncake_ascend import limits


class CopyBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Upper bounds on descriptors and engine calls; the product's own by default."""

    max_merged_bytes: int = limits.MAX_MERGED_DESCRIPTOR_BYTES
    max_call_bytes: int = limits.MAX_CALL_BYTES
    max_call_descriptors: int = limits.MAX_CALL_DESCRIPTORS
    max_request_descriptors: int = limits.MAX_DESCRIPTORS_PER_REQUEST
