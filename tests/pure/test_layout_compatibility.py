"""layout.compatibility: two engines that do not fit are told every difference in an operator's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.compatibility import differences, fingerprint
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.testing.layouts import EngineShape, LayerShape, Storage, lay_out
from vllm_mooncake_ascend.testing.strategies import Transfer, spoiled_ranks, transfers

_IDENTITY = {"model": "sha256:1234", "model dtype": "bfloat16"}
_STORAGE = Storage(
    kernel_tokens=16,
    kernel_blocks_per_block=1,
    num_blocks=4,
    window_tokens=0,
    has_recurrent_state=False,
    order="tokens_major",
    packing="apart",
    is_interleaved=False,
    padding_bytes=(0, 0, 0),
)
_LAYER = LayerShape(name="layer0", group_index=0, kind="attention", total_heads=4, key_bytes=8, value_bytes=8)
_ENGINE = EngineShape(
    name="engine", tp_size=1, layers_per_stage=(2,), storages=(_STORAGE,), base_address=4096, has_common_region=False
)


def _ranks(
    *, engine: dict[str, Any] | None = None, storage: dict[str, Any] | None = None, layer: dict[str, Any] | None = None
) -> tuple[RankLayout, ...]:
    """Two layers of one kind; changes against the plain engine above."""
    storages = (msgspec.structs.replace(_STORAGE, **(storage or {})),)
    shape = msgspec.structs.replace(_ENGINE, storages=storages, **(engine or {}))
    first = msgspec.structs.replace(_LAYER, **(layer or {}))
    return lay_out([first, msgspec.structs.replace(first, name=first.name + "b")], shape)


def _differences(
    local: Sequence[RankLayout], remote: Sequence[RankLayout], remote_identity: dict[str, str] | None = None
) -> tuple[str, ...]:
    remote_table = fingerprint(remote_identity or _IDENTITY, remote, protocol_version=1)
    return differences(fingerprint(_IDENTITY, local, protocol_version=1), local, remote_table, remote)


def test_equal_engines_do_not_differ() -> None:
    """Goal: the ordinary case. Method: the same shape at other addresses, with more blocks and other padding."""
    remote = _ranks(engine={"base_address": 1 << 30}, storage={"num_blocks": 99, "padding_bytes": (0, 8, 0)})
    assert () == _differences(_ranks(), remote)


def test_differences_of_the_model_are_named_with_both_values() -> None:
    """Goal: an operator sees what to change. Method: another dtype, a value only one side tells."""
    assert (
        "model dtype: bfloat16 here, float16 there",
        "rope: not told here, yarn there",
    ) == _differences(_ranks(), _ranks(), {"model": "sha256:1234", "model dtype": "float16", "rope": "yarn"})


def test_another_protocol_version_is_a_difference() -> None:
    """Goal: versions are compared like everything else. Method: version 2 there."""
    ranks = _ranks()
    found = differences(
        fingerprint(_IDENTITY, ranks, protocol_version=1), ranks, fingerprint(_IDENTITY, ranks, protocol_version=2), ranks
    )
    assert ("protocol version: 1 here, 2 there",) == found


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"storage": {"kernel_tokens": 8}}, "block size: 16 here, 8 there (unequal values are not supported yet)"),
        ({"storage": {"window_tokens": 64}}, "sliding window: none here, 64 there"),
        ({"engine": {"tp_size": 2}}, "tensor parallel size: 1 here, 2 there (unequal values are not supported yet)"),
        (
            {"engine": {"layers_per_stage": (1, 1)}},
            "pipeline parallel size: 1 here, 2 there (unequal values are not supported yet)",
        ),
        ({"layer": {"total_heads": 2}}, "KV heads 4 here, 2 there: layer0/k and 3 more"),
        ({"layer": {"key_bytes": 16}}, "bytes per token and head 8 here, 16 there: layer0/k and 1 more"),
        ({"layer": {"name": "other"}}, "KV cache planes only here: layer0/k and 3 more"),
        ({"layer": {"name": "other"}}, "KV cache planes only there: other/k and 3 more"),
    ],
)
def test_differences_of_the_caches_are_named(changes: dict[str, Any], expected: str) -> None:
    """Goal: every kind of unequal cache has its words. Method: one change at a time on the remote side."""
    assert expected in _differences(_ranks(), _ranks(**changes))


def test_rows_of_other_sizes_are_a_difference() -> None:
    """Goal: an opaque cache never meets another kernel block size. Method: 16 tokens in one kernel block, or in two."""
    opaque = {"kind": "opaque"}
    halved = {"kernel_tokens": 8, "kernel_blocks_per_block": 2}
    assert ("tokens per row 16 here, 8 there: layer0/kv and 1 more",) == _differences(
        _ranks(layer=opaque), _ranks(layer=opaque, storage=halved)
    )


def test_what_is_not_supported_yet_is_named_though_both_sides_are_equal() -> None:
    """Goal: no silent half support. Method: an attention group and a state group on both sides."""
    state = msgspec.structs.replace(_STORAGE, has_recurrent_state=True)
    shape = msgspec.structs.replace(_ENGINE, storages=(_STORAGE, state))
    ranks = lay_out([_LAYER, msgspec.structs.replace(_LAYER, name="ssm", group_index=1, kind="state")], shape)
    assert (
        "several KV cache groups (2): not supported yet",
        "recurrent state (KV cache group 1): not supported yet",
    ) == _differences(ranks, ranks)


def test_heads_that_no_rank_holds_are_named() -> None:
    """Goal: an engine that announces too little is refused. Method: the second of two ranks repeats the heads of the first."""
    local = _ranks(engine={"tp_size": 2})
    liar = msgspec.structs.replace(local[0], tp_rank=1)
    assert ("KV cache planes with KV heads that no rank there holds: layer0/k and 3 more",) == _differences(
        local, (local[0], liar)
    )


def test_an_unusable_layout_is_a_difference_and_its_table_is_still_compared() -> None:
    """Goal: a peer with another protocol may have a layout we do not understand; the reason must still show."""
    local = _ranks()
    plane = msgspec.structs.replace(local[0].planes[0], token_stride_bytes=-8)
    remote = (msgspec.structs.replace(local[0], planes=(plane, *local[0].planes[1:])),)
    found = differences(
        fingerprint(_IDENTITY, local, protocol_version=1), local, fingerprint(_IDENTITY, local, protocol_version=2), remote
    )
    assert "protocol version: 1 here, 2 there" in found
    assert any(words.startswith("unusable layout there: ") and "token_stride_bytes is -8" in words for words in found)


def test_a_peer_without_ranks_differs() -> None:
    """Goal: no exception for an empty announcement. Method: an empty list of ranks under a good table."""
    ranks = _ranks()
    table = fingerprint(_IDENTITY, ranks, protocol_version=1)
    assert ("unusable layout there: 0 ranks, must be 1 to 1024",) == differences(table, ranks, table, ())


def test_the_number_of_differences_is_bounded() -> None:
    """Goal: a hostile peer fills no log. Method: two hundred values that nobody knows."""
    noise = {f"key {number}": "x" * 5000 for number in range(200)}
    found = _differences(_ranks(), _ranks(), noise)
    assert limits.MAX_DIFFERENCES == len(found)
    assert "and more, not listed" == found[-1]
    assert max(len(words) for words in found) < 300


@settings(max_examples=200)
@given(transfers(), st.data())
def test_odd_layouts_end_as_words_never_as_exceptions(transfer: Transfer, data: st.DataObject) -> None:
    """Goal: a peer may send anything that decodes. Method: odd numbers in any field of a good layout."""
    remote = data.draw(spoiled_ranks(transfer.remote_ranks))
    local = transfer.local_ranks
    table = fingerprint(_IDENTITY, local, protocol_version=1)
    found = differences(table, local, fingerprint(_IDENTITY, transfer.remote_ranks, protocol_version=1), remote)
    assert all(isinstance(words, str) for words in found)
