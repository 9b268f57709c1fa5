"""Keys of the prefix pool: `namespace/group/shard/block hash`, all in small hex or decimal digits.

    namespace   digest of everything that changes bytes or hashes and is the same for a whole engine
    group       index of the KV cache group
    shard       digest of which bytes the object has and in which order: layers, heads, nesting (`objects.order_digest`)
    block hash  vLLM's chained hash of the block's last token, so it stands for the whole prefix

Two caches that differ in anything of the above never share a key; two that differ in anything else (addresses, number of
blocks, longest prompt, tensor parallel size where KV is replicated) do. Ranks that hold the same bytes have one shard, and
`writer` says which of them stores a block. Nothing here is secret: who can reach the pool can read it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from vllm_mooncake_ascend.errors import LocalProtocolError
from vllm_mooncake_ascend.layout.plane import RankLayout
from vllm_mooncake_ascend.planner.objects import order_digest, planes_of

KEY_VERSION = 2
"""Of keys and of what objects contain; another number shares nothing with this one. Version 1 knew no seals."""

_NAMESPACE_CHARS = 32
_SHARD_CHARS = 24
_KEY = re.compile(rf"([0-9a-f]{{{_NAMESPACE_CHARS}}})/(0|[1-9][0-9]{{0,3}})/([0-9a-f]{{{_SHARD_CHARS}}})/((?:[0-9a-f]{{2}})+)")


class Hashing(msgspec.Struct, frozen=True, kw_only=True):
    """How vLLM computes block hashes: equal tokens have equal hashes only where all of this is equal."""

    algorithm: str
    """`prefix_caching_hash_algo`."""
    seed: str
    """What the first hash starts from, as text; never of a random seed, which is refused at start."""
    dialect: str
    """Generation of the extra keys (LoRA, salt, multimodal) that go into a hash; it changed between vLLM versions."""
    block_tokens: int
    """Tokens of one hash."""
    lookahead_tokens: int
    """Tokens behind a block that its hash covers (MTP, EAGLE from vLLM 0.33 on)."""


class NamespaceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a namespace is the digest of. No field has a default: both sides must say it."""

    identity: Mapping[str, str]
    """Model, weights, dtypes, draft layers, attention kernel: what makes KV bytes interchangeable, by name."""
    hashing: Hashing
    tenant: str
    generation: str
    """A shared `weights_version`, or a random text after a reset that nobody else is to see; "" at first."""
    is_sealed: bool
    """A seal stands behind each object (`engines.sealed_store`)."""


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks of one engine that hold the same bytes of one group."""

    group_index: int
    name: str
    ranks: tuple[int, ...]
    """Indices into the engine's list of ranks, ascending."""

    def writer(self, block_hash: bytes) -> int:
        """The rank that stores the object of this block; blocks are spread over the holders."""
        return self.ranks[block_hash[-1] % len(self.ranks)]


class PoolKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key in its parts."""

    namespace: str
    group_index: int
    shard: str
    block_hash: bytes

    def __str__(self) -> str:
        return key_prefix(self.namespace, self.group_index, self.shard) + self.block_hash.hex()


def namespace(facts: NamespaceFacts) -> str:
    """The first part of all keys of engines that may share objects: `[32] hex digits`."""
    identity = sorted(facts.identity.items())
    encoded = msgspec.json.encode((KEY_VERSION, identity, facts.hashing, facts.tenant, facts.generation, facts.is_sealed))
    return hashlib.sha256(encoded).hexdigest()[:_NAMESPACE_CHARS]


def shard_name(rank: RankLayout, group_index: int) -> str:
    """Which bytes the objects of this rank have: `[24] hex digits`."""
    return order_digest(rank, group_index).hex()[:_SHARD_CHARS]


def shards(ranks: Sequence[RankLayout]) -> tuple[Shard, ...]:
    """All shards of an engine, by group and then by their first holder. A block is in the pool when each of its group is."""
    holders: dict[tuple[int, str], list[int]] = {}
    for index, rank in enumerate(ranks):
        for group_index in range(len(rank.groups)):
            if planes_of(rank, group_index):
                holders.setdefault((group_index, shard_name(rank, group_index)), []).append(index)
    found = [Shard(group_index=group, name=name, ranks=tuple(held)) for (group, name), held in holders.items()]
    return tuple(sorted(found, key=lambda shard: (shard.group_index, shard.ranks)))


def key_prefix(namespace_name: str, group_index: int, shard: str) -> str:
    """What all keys of one shard start with."""
    return f"{namespace_name}/{group_index}/{shard}/"


def keys_of(prefix: str, block_hashes: Sequence[bytes]) -> list[str]:
    """One key a block."""
    return [prefix + block_hash.hex() for block_hash in block_hashes]


def group_hashes(hashes: Sequence[bytes], hashes_per_block: int) -> Sequence[bytes]:
    """The hash of each whole block of a group whose blocks span several hashes: the last one, which covers all before it."""
    assert hashes_per_block >= 1
    return hashes if hashes_per_block == 1 else hashes[hashes_per_block - 1 :: hashes_per_block]


def parse_key(text: str) -> PoolKey:
    """The parts of a key.

    Raises:
        LocalProtocolError: it is not one of ours.
    """
    match = _KEY.fullmatch(text)
    if match is None:
        raise LocalProtocolError(f"cannot read {text[:200]!r} as a pool key: expected namespace/group/shard/block hash")
    return PoolKey(namespace=match[1], group_index=int(match[2]), shard=match[3], block_hash=bytes.fromhex(match[4]))
