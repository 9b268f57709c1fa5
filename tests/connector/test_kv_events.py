"""KV events about the pool are those that vLLM's own block pool tells of the same blocks: real requests, real event classes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed import kv_events
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.connectors import kv_events as ours
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.planner.pool_keys import group_hashes
from vllm_mooncake_ascend.pool import actions
from vllm_mooncake_ascend.types import RequestId
from vllm_mooncake_ascend.wire.pool_steps import GroupBlocks, SaveOrder

HASH_TOKENS = 4
BLOCK_TOKENS = (4, 8)
"""Of each group."""


@pytest.fixture(autouse=True)
def none_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hash starts from a seed, as in an engine; afterwards it is as before."""
    for name in ("NONE_HASH", "_NONE_HASH_SEED"):
        if hasattr(kv_cache_utils, name):
            monkeypatch.setattr(kv_cache_utils, name, getattr(kv_cache_utils, name))
    kv_cache_utils.init_none_hash(sha256)


def make_request(**options: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=list(range(100, 126)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(HASH_TOKENS, sha256),
        **options,
    )


def events() -> ours.KvEvents:
    layouts = tuple(
        GroupLayout(tokens_per_block=tokens, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False)
        for tokens in BLOCK_TOKENS
    )
    return ours.KvEvents(layouts, HASH_TOKENS)


def save(request: Request, *positions: int, group_index: int = 0, save_id: int = 1) -> actions.OrderSave:
    """An order for the blocks at these positions."""
    names = group_hashes(request.block_hashes, BLOCK_TOKENS[group_index] // HASH_TOKENS)
    hashes = tuple(names[position] for position in positions)
    group = GroupBlocks(group_index=group_index, block_ids=tuple(range(1, 1 + len(hashes))), hashes=hashes)
    order = SaveOrder(save_id=save_id, chain=1, request_id=RequestId("r"), namespace="n", groups=(group,))
    return actions.OrderSave(order=order)


def vllms_own(request: Request, first: int, end: int, group_index: int) -> Any:
    """What vLLM's block pool tells when it caches these blocks of the request itself."""
    tokens = BLOCK_TOKENS[group_index]
    pool = BlockPool(num_gpu_blocks=16, enable_caching=True, hash_block_size=HASH_TOKENS, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(end)
    pool.cache_full_blocks(request, blocks, first, end, tokens, group_index)
    (event,) = pool.take_events()
    return event


@pytest.mark.parametrize("group_index", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cache_salt": "salt"},
        {"lora_request": LoRARequest(lora_name="adapter", lora_int_id=7, lora_path="/adapter")},
        {
            "mm_features": [
                MultiModalFeatureSpec(
                    data=None, modality="image", identifier="image", mm_position=PlaceholderRange(offset=6, length=5)
                )
            ]
        },
    ],
    ids=["plain", "salt", "adapter", "image"],
)
def test_a_stored_event_is_that_of_vllms_own_cache(options: dict[str, Any], group_index: int) -> None:
    """Goal: routers read ours like vLLM's. Method: the same blocks of one request through both; all fields but whose memory it
    is are equal."""
    request = make_request(**options)
    for first, end in ((0, 2), (1, 3)):
        told = events()
        told.note(save(request, *range(first, end), group_index=group_index), request)
        told.note(actions.Stored(save_id=1))
        (event,) = told.take()

        ignored = {"medium", "ownership"}
        fields = [name for name in event.__struct_fields__ if name not in ignored]
        expected = vllms_own(request, first, end, group_index)
        assert [(name, getattr(expected, name)) for name in fields] == [(name, getattr(event, name)) for name in fields]
        assert kv_events.MEDIUM_CPU == event.medium


def test_blocks_apart_are_told_apart() -> None:
    """Goal: tokens and hashes of an event belong together. Method: a save that leaves out a block, as windows do."""
    request = make_request()
    told = events()
    told.note(save(request, 0, 1, 3), request)
    told.note(actions.Stored(save_id=1))

    assert [list(range(100, 108)), list(range(112, 116))] == [event.token_ids for event in told.take()]


def test_only_saves_that_succeeded_are_told() -> None:
    """Goal: nobody is sent for what is not there, and nothing is kept of it. Method: two saves, one of them fails."""
    request = make_request()
    told = events()
    told.note(save(request, 0), request)
    told.note(save(request, 1, save_id=2), request)
    told.note(actions.NotStored(save_id=1))
    told.note(actions.Stored(save_id=2))

    assert [list(range(104, 108))] == [event.token_ids for event in told.take()]
    assert [] == told.take()
    told.note(actions.Stored(save_id=1))
    assert [] == told.take()


def test_a_save_of_a_request_that_is_not_known_any_more_is_not_told() -> None:
    """Goal: no event without its tokens. Method: the order comes without a request; so does its end."""
    told = events()
    told.note(save(make_request(), 0))
    told.note(actions.Stored(save_id=1))

    assert [] == told.take()


def test_an_order_of_other_tokens_tells_nothing() -> None:
    """Goal: hashes and tokens never mix. Method: the request of the order's id is another one."""
    told = events()
    told.note(save(make_request(cache_salt="other"), 0, 1), make_request())
    told.note(actions.Stored(save_id=1))

    assert [] == told.take()


def test_what_is_gone_is_removed_group_by_group() -> None:
    """Goal: a router forgets exactly what was told. Method: more blocks of two groups than one event holds."""
    many = [number.to_bytes(32, "big") for number in range(limits.MAX_HASHES_PER_EVENT + 1)]
    told = events()
    told.note(actions.Gone(blocks=((1, many[0]), *((0, one) for one in many))))
    removed = told.take()

    assert [(0, limits.MAX_HASHES_PER_EVENT), (0, 1), (1, 1)] == [(one.group_idx, len(one.block_hashes)) for one in removed]
    converted = [kv_cache_utils.maybe_convert_block_hash(one) for one in many]
    assert converted == removed[0].block_hashes + removed[1].block_hashes
    assert {kv_events.MEDIUM_CPU} == {one.medium for one in removed}


def test_vllms_publisher_can_encode_them() -> None:
    """Goal: events reach subscribers. Method: vLLM's own batch, encoded and decoded as its publisher does."""
    request = make_request(cache_salt="salt")
    told = events()
    told.note(save(request, 0, 1), request)
    told.note(actions.Stored(save_id=1))
    told.note(actions.Gone(blocks=((0, request.block_hashes[0]),)))
    batch = kv_events.KVEventBatch(ts=1.0, events=told.take())

    decoded = msgspec.msgpack.Decoder(kv_events.KVEventBatch).decode(msgspec.msgpack.Encoder().encode(batch))
    assert [event.block_hashes for event in batch.events] == [event.block_hashes for event in decoded.events]


def test_events_are_wanted_when_vllm_publishes_them() -> None:
    """Goal: no work for nobody. Method: vLLM's configuration without and with events."""
    config = VllmConfig()
    without = ours.are_wanted(config)
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")

    assert (False, True) == (without, ours.are_wanted(config))
