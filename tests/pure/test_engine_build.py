"""Which build of Mooncake can serve which protocol."""

from __future__ import annotations

import pytest

from vllm_mooncake_ascend.engines.build import Build, objection

CPU = Build(version="0.3.13.post1", is_importable=True, has_ascend=False, num_rdma_devices=0)
RDMA = Build(version="0.3.13.post1", is_importable=True, has_ascend=False, num_rdma_devices=2)
NPU = Build(version="0.3.13.post1", is_importable=True, has_ascend=True, num_rdma_devices=0)
NONE = Build(version="", is_importable=False, has_ascend=False, num_rdma_devices=0)


@pytest.mark.parametrize(("build", "protocol"), [(CPU, "tcp"), (RDMA, "tcp"), (RDMA, "rdma"), (NPU, "ascend"), (NPU, "tcp")])
def test_a_build_that_serves_the_protocol_meets_no_objection(build: Build, protocol: str) -> None:
    """TCP is in every build."""
    assert objection(build, protocol=protocol) is None


@pytest.mark.parametrize(
    ("build", "protocol", "word"),
    [
        (CPU, "ascend", "ascend_transport.so"),
        (CPU, "rdma", "RDMA adapter"),
        (NPU, "rdma", "build for Ascend"),
        (NONE, "tcp", "not installed"),
        (CPU, "hccl", "'hccl'"),
    ],
)
def test_what_is_missing_is_named_with_a_way_out(build: Build, protocol: str, word: str) -> None:
    """Mooncake itself would take another transport without a word."""
    text = objection(build, protocol=protocol)
    assert text is not None
    assert word in text
