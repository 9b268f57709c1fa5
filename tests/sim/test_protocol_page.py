"""docs/protocol.md is what the machines' laws and the limits print."""

from __future__ import annotations

from pathlib import Path

from vllm_mooncake_ascend.testing.protocol_page import page


def test_the_protocol_page_is_current() -> None:
    """Goal: the documented tables are the checked ones. Method: print anew, compare; `make docs` mends."""
    assert page() == (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
