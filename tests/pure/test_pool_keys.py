"""Keys of the prefix pool: two caches that differ in anything that changes bytes or hashes never share one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pure.oracle import Memory, content
from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout
from vllm_mooncake_ascend.planner import pool_keys
from vllm_mooncake_ascend.planner.pool_keys import Hashing, NamespaceFacts, PoolKey
from vllm_mooncake_ascend.planner.store_batch import StoreBatch, object_template, store_batch
from vllm_mooncake_ascend.testing.strategies import Transfer, transfers

HASHING = Hashing(algorithm="sha256", seed="0", dialect="0.31", block_tokens=16, lookahead_tokens=0)
FACTS = NamespaceFacts(identity={"model": "m", "dtype": "bf16"}, hashing=HASHING, tenant="", generation="", is_sealed=True)
NAMES = st.text(max_size=4)
HASHES = st.builds(
    Hashing, algorithm=NAMES, seed=NAMES, dialect=NAMES, block_tokens=st.integers(1, 3), lookahead_tokens=st.integers(0, 2)
)
ALL_FACTS = st.builds(
    NamespaceFacts,
    identity=st.dictionaries(NAMES, NAMES, max_size=3),
    hashing=HASHES,
    tenant=NAMES,
    generation=NAMES,
    is_sealed=st.booleans(),
)


def rank(tp_rank: int = 0, tp_size: int = 1, planes: tuple[Plane, ...] | None = None, **group: Any) -> RankLayout:
    """A rank with one group and, if nothing else is said, two layers of K and V, tokens major."""
    layout = {"tokens_per_block": 4, "kernel_blocks_per_block": 1, "window_tokens": 0, "has_recurrent_state": False} | group
    made = tuple(
        plane(f"layer{layer}/{part}", 1_000 * (2 * layer + index)) for layer in range(2) for index, part in enumerate("kv")
    )
    return RankLayout(
        tp_rank=tp_rank,
        tp_size=tp_size,
        pp_rank=0,
        pp_size=1,
        session="s",
        groups=(GroupLayout(**layout),),
        planes=made if planes is None else planes,
        regions=(),
    )


def plane(name: str, base_address: int = 0, **changed: Any) -> Plane:
    """Two of four heads of 8 bytes, tokens major, five blocks of four tokens."""
    numbers = {
        "group_index": 0,
        "num_blocks": 5,
        "tokens_per_block": 4,
        "first_head": 0,
        "num_heads": 2,
        "total_heads": 4,
        "bytes_per_token_head": 8,
        "block_stride_bytes": 64,
        "token_stride_bytes": 16,
        "head_stride_bytes": 8,
    }
    return Plane(name=name, base_address=base_address, **(numbers | changed))


@given(ALL_FACTS, ALL_FACTS)
def test_namespaces_are_equal_exactly_when_all_facts_are(one: NamespaceFacts, other: NamespaceFacts) -> None:
    """Goal: no fact is left out, none runs into another. Method: random pairs, alike enough to be equal now and then."""
    assert (one == other) == (pool_keys.namespace(one) == pool_keys.namespace(other))


def test_the_order_of_facts_does_not_matter() -> None:
    """Goal: two engines that collect the same facts in another order share. Method: turn the dictionary round."""
    turned = msgspec.structs.replace(FACTS, identity=dict(reversed(list(FACTS.identity.items()))))
    assert pool_keys.namespace(FACTS) == pool_keys.namespace(turned)


@pytest.mark.parametrize("field", Hashing.__struct_fields__)
def test_every_part_of_hashing_is_in_the_namespace(field: str) -> None:
    """Goal: engines whose hashes are not comparable share nothing. Method: change one field after the other."""
    value = getattr(HASHING, field)
    other = msgspec.structs.replace(HASHING, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert pool_keys.namespace(FACTS) != pool_keys.namespace(msgspec.structs.replace(FACTS, hashing=other))


@given(st.integers(0, 63), st.binary(min_size=1, max_size=64))
def test_a_key_comes_back_from_its_text(group_index: int, block_hash: bytes) -> None:
    """Goal: `pool verify` can read what it finds. Method: print, parse, compare."""
    key = PoolKey(
        namespace=pool_keys.namespace(FACTS),
        group_index=group_index,
        shard=pool_keys.shard_name(rank(), 0),
        block_hash=block_hash,
    )
    assert key == pool_keys.parse_key(str(key))


@settings(max_examples=40)
@given(st.text(max_size=80) | st.from_regex(r"[0-9a-f/]{90,130}"))
def test_what_is_not_a_key_is_refused(text: str) -> None:
    """Goal: foreign keys in a shared pool do no harm. Method: any text gives our error or a round trip."""
    try:
        parsed = pool_keys.parse_key(text)
    except LocalProtocolError:
        return
    assert text == str(parsed)


def test_keys_of_blocks_are_prefix_and_hash() -> None:
    """Goal: the fast way to many keys is the same as the readable one. Method: two hashes."""
    key = PoolKey(namespace="n", group_index=2, shard="s", block_hash=b"\x01\xff")
    assert [str(key), "n/2/s/00"] == pool_keys.keys_of(pool_keys.key_prefix("n", 2, "s"), [b"\x01\xff", b"\x00"])


def test_the_hash_of_a_larger_block_is_its_last_one() -> None:
    """Goal: a group with blocks of two hashes is named by what covers all its tokens. Method: five hashes, two whole blocks."""
    assert [b"1", b"3"] == pool_keys.group_hashes([b"0", b"1", b"2", b"3", b"4"], 2)
    assert [b"0", b"1"] == pool_keys.group_hashes([b"0", b"1"], 1)


CHANGES: dict[str, RankLayout] = {
    "block size": rank(tokens_per_block=8, kernel_blocks_per_block=2),
    "window": rank(window_tokens=8),
    "other heads": rank(planes=(plane("layer0/k", first_head=2),)),
    "fewer heads": rank(planes=(plane("layer0/k", num_heads=1),)),
    "heads in all": rank(planes=(plane("layer0/k", total_heads=8),)),
    "bytes": rank(planes=(plane("layer0/k", bytes_per_token_head=4),)),
    "another layer": rank(planes=(plane("layer1/k"),)),
    "heads major": rank(planes=(plane("layer0/k", token_stride_bytes=8, head_stride_bytes=32),)),
    "rows": rank(planes=(plane("layer0/k", tokens_per_block=2),)),
    "one more layer": rank(planes=(plane("layer0/k"), plane("layer1/k"))),
    "other order": rank(planes=(plane("layer1/k"), plane("layer0/k"))),
    "k and v in one another": rank(
        planes=(
            plane("layer0/k", 0, token_stride_bytes=32, block_stride_bytes=128, head_stride_bytes=16),
            plane("layer0/v", 8, token_stride_bytes=32, block_stride_bytes=128, head_stride_bytes=16),
        )
    ),
    "k and v apart": rank(planes=(plane("layer0/k", 0), plane("layer0/v", 1_000))),
    "state": rank(planes=(plane("layer0/k", tokens_per_block=1),), has_recurrent_state=True),
    "as it is": rank(planes=(plane("layer0/k"),)),
}


def test_whatever_changes_bytes_changes_the_shard() -> None:
    """Goal: no two layouts that put other bytes, or the same in another order, share an object. Method: all pairs differ."""
    names = {name: pool_keys.shard_name(layout, 0) for name, layout in CHANGES.items()}
    assert len(names) == len(set(names.values()))


def test_what_changes_no_bytes_does_not_change_the_shard() -> None:
    """Goal: instances with another memory size, place or padding share. Method: move, pad and enlarge everything."""
    moved = tuple(
        msgspec.structs.replace(
            one, base_address=7 * one.base_address + 3, num_blocks=99, block_stride_bytes=80, token_stride_bytes=20
        )
        for one in rank().planes
    )
    assert pool_keys.shard_name(rank(), 0) == pool_keys.shard_name(rank(planes=moved), 0)


def test_replicated_planes_are_one_shard_whatever_the_parallel_size() -> None:
    """Goal: MLA latents are stored once. Method: engines of one and of four ranks that all hold the one head."""
    latent = (plane("layer0/latent", num_heads=1, total_heads=1),)
    (alone,) = pool_keys.shards([rank(planes=latent)])
    (shared,) = pool_keys.shards([rank(tp_rank=index, tp_size=4, planes=latent) for index in range(4)])
    assert (alone.name, (0, 1, 2, 3)) == (shared.name, shared.ranks)


def test_each_block_has_one_writer_among_its_holders() -> None:
    """Goal: a replicated block is put once, and the work is shared. Method: all last bytes of a hash over three ranks."""
    shard = pool_keys.Shard(group_index=0, name="s", ranks=(1, 4, 5))
    writers = [shard.writer(bytes([9, last])) for last in range(6)]
    assert [1, 4, 5, 1, 4, 5] == writers


def object_of(memory: Memory, batch: StoreBatch) -> bytes:
    """What a put of one block hands over."""
    runs = zip(batch.pointers()[0], batch.sizes()[0], strict=True)
    return bytes(memory.bytes[address + index] for address, length in runs for index in range(length))


def write(memory: Memory, batch: StoreBatch, value: bytes) -> None:
    """What a get of one block does."""
    places = [
        address + index
        for address, length in zip(batch.pointers()[0], batch.sizes()[0], strict=True)
        for index in range(length)
    ]
    assert len(places) == len(set(places)) == len(value)
    for address, byte in zip(places, value, strict=True):
        assert address in memory.bytes, "an object leaves the registered memory"
        memory.bytes[address] = byte


def block_rows(layout: RankLayout, group_index: int, block_id: int) -> dict[tuple[str, int, int, int], list[int]]:
    """The addresses of each row's bytes in one block by (plane, kernel block, row, global head), from what planes say."""
    kernels = layout.groups[group_index].kernel_blocks_per_block
    return {
        (one.name, kernel, row, one.first_head + head): [
            one.base_address
            + (block_id * kernels + kernel) * one.block_stride_bytes
            + row * one.token_stride_bytes
            + head * one.head_stride_bytes
            + index
            for index in range(one.bytes_per_token_head)
        ]
        for one in layout.planes
        if one.group_index == group_index
        for kernel in range(kernels)
        for row in range(one.tokens_per_block)
        for head in range(one.num_heads)
    }


@settings(max_examples=60)
@given(transfers())
def test_what_one_rank_puts_another_of_the_same_shard_gets_right(drawn: Transfer) -> None:
    """Goal: equal keys mean equal bytes. Method: every pair of ranks of two engines with one shard name moves one block, from
    memory filled by the oracle's rule to memory checked by it."""
    for source in drawn.remote_ranks + drawn.local_ranks:
        for target in drawn.local_ranks:
            for group_index in range(len(target.groups)):
                from_template, to_template = object_template(source, group_index), object_template(target, group_index)
                if from_template is None or to_template is None:
                    continue
                if pool_keys.shard_name(source, group_index) != pool_keys.shard_name(target, group_index):
                    continue
                source_memory, target_memory = Memory(source, 1), Memory(target, 2)
                for (name, kernel, row, head), places in block_rows(source, group_index, 1).items():
                    for index, address in enumerate(places):
                        source_memory.bytes[address] = content(f"{name} {kernel}", row, head, index)
                value = object_of(source_memory, store_batch(from_template, [1]))
                target_id = to_template.num_blocks - 1
                write(target_memory, store_batch(to_template, [target_id]), value)
                for (name, kernel, row, head), places in block_rows(target, group_index, target_id).items():
                    expected = [content(f"{name} {kernel}", row, head, index) for index in range(len(places))]
                    assert expected == [target_memory.bytes[address] for address in places]
