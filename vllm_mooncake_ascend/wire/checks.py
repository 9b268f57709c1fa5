"""What a decoded message must satisfy beyond its types: lengths, counts, signs, finite numbers, int64 addresses.

`wire.codec` has made sure that every field has its type. A peer can still send a negative address, a lease of NaN seconds
or a plane that belongs to no group; nothing of that may reach a machine or a planner. Whether values *fit* this engine
(dtype, block size, model) is no business of this module: that is the fingerprint's.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.layout.plane import GroupLayout, Plane, RankLayout, Region
from vllm_mooncake_ascend.wire import messages

_INT32_MAX = (1 << 31) - 1
_INT64_MAX = (1 << 63) - 1


def check(message: messages.FromReader | messages.FromProducer) -> None:
    """Accept `message` by returning.

    Raises:
        RemoteProtocolError: a value is out of its range; names the field and the range.
    """
    match message:
        case messages.Hello():
            _number("version", message.version, 0, _INT32_MAX)
        case messages.Welcome():
            _welcome(message)
        case messages.Renew():
            _number("sequence", message.sequence, 0, _INT64_MAX)
            _readers("transfers", message.transfers)
        case messages.Renewed():
            _number("sequence", message.sequence, 0, _INT64_MAX)
            _readers("gone", message.gone)
        case messages.Goodbye():
            _text("reason", message.reason, shortest=0)
        case _:
            _about_a_transfer(message)
    _text("incarnation", message.incarnation)
    if isinstance(message, (messages.Subscribe, messages.Renew, messages.ReadDone, messages.Release)):
        _text("expected", message.expected)


def _about_a_transfer(
    message: messages.Subscribe | messages.ReadDone | messages.Release | messages.Offer | messages.Gone | messages.Verdict,
) -> None:
    _text("transfer_id", message.transfer_id)
    _text("request_id", message.request_id, shortest=0)
    if isinstance(message, messages.Offer):
        _offer(message)
    if isinstance(message, messages.Gone):
        _text("reason", message.reason, shortest=0)


def _offer(offer: messages.Offer) -> None:
    _number("num_tokens", offer.num_tokens, 0, _INT32_MAX)
    _number("generation", offer.generation, 0, _INT64_MAX)
    _number("num_layers_ready", offer.num_layers_ready, 0, _INT32_MAX)
    _count("prompt_digest", len(offer.prompt_digest), limits.MAX_DIGEST_BYTES)
    if not limits.LEASE_TTL_MIN_S <= offer.lease_ttl_s <= limits.LEASE_CEILING_S:  # false for NaN too
        raise RemoteProtocolError(
            f"lease_ttl_s must be {limits.LEASE_TTL_MIN_S} to {limits.LEASE_CEILING_S}, got {offer.lease_ttl_s}"
        )
    _count("groups of block_ids", len(offer.block_ids), limits.MAX_GROUPS)
    _count("block_ids", sum(map(len, offer.block_ids)), limits.MAX_BLOCKS_PER_TRANSFER)
    for group in offer.block_ids:
        if group:
            _number("lowest block id", min(group), 0, _INT32_MAX)
            _number("highest block id", max(group), 0, _INT32_MAX)


def _welcome(welcome: messages.Welcome) -> None:
    _number("version", welcome.version, 0, _INT32_MAX)
    _count("fingerprint", len(welcome.fingerprint), limits.MAX_FINGERPRINT_ENTRIES)
    for name, value in welcome.fingerprint.items():
        _text("name in fingerprint", name)
        _text("value in fingerprint", value, shortest=0, longest=limits.MAX_FINGERPRINT_CHARS)
    _count("ranks", len(welcome.ranks), limits.MAX_RANKS)
    for rank in welcome.ranks:
        _rank(rank)


def _rank(rank: RankLayout) -> None:
    _number("tp_size", rank.tp_size, 1, limits.MAX_RANKS)
    _number("pp_size", rank.pp_size, 1, limits.MAX_RANKS)
    _number("tp_rank", rank.tp_rank, 0, rank.tp_size - 1)
    _number("pp_rank", rank.pp_rank, 0, rank.pp_size - 1)
    _text("session", rank.session)
    _count("groups", len(rank.groups), limits.MAX_GROUPS)
    _count("planes", len(rank.planes), limits.MAX_PLANES)
    _count("regions", len(rank.regions), limits.MAX_REGIONS)
    for group in rank.groups:
        _group(group)
    for plane in rank.planes:
        _plane(plane, len(rank.groups))
    for region in rank.regions:
        _region(region)


def _group(group: GroupLayout) -> None:
    _number("tokens_per_block", group.tokens_per_block, 1, _INT32_MAX)
    _number("kernel_blocks_per_block", group.kernel_blocks_per_block, 1, group.tokens_per_block)
    _number("window_tokens", group.window_tokens, 0, _INT32_MAX)


def _plane(plane: Plane, num_groups: int) -> None:
    """Every address inside the plane must be an int64: planners calculate with those."""
    _text("plane name", plane.name)
    _number("group_index", plane.group_index, 0, num_groups - 1)
    _number("num_blocks", plane.num_blocks, 1, _INT32_MAX)
    _number("tokens_per_block", plane.tokens_per_block, 1, _INT32_MAX)
    _number("num_heads", plane.num_heads, 1, _INT32_MAX)
    _number("first_head", plane.first_head, 0, _INT32_MAX)
    _number("total_heads", plane.total_heads, plane.first_head + plane.num_heads, _INT32_MAX)
    _number("bytes_per_token_head", plane.bytes_per_token_head, 1, _INT32_MAX)
    for name in ("base_address", "block_stride_bytes", "token_stride_bytes", "head_stride_bytes"):
        _number(name, getattr(plane, name), 0, _INT64_MAX)
    end_address = (
        plane.base_address
        + plane.num_blocks * plane.block_stride_bytes
        + plane.tokens_per_block * plane.token_stride_bytes
        + plane.num_heads * plane.head_stride_bytes
        + plane.bytes_per_token_head
    )
    _number("end address of a plane", end_address, 1, _INT64_MAX)


def _region(region: Region) -> None:
    _number("base_address", region.base_address, 0, _INT64_MAX)
    _number("length_bytes", region.length_bytes, 1, _INT64_MAX - region.base_address)


def _readers(name: str, readers: Iterable[tuple[str, str]]) -> None:
    pairs = tuple(readers)
    _count(name, len(pairs), limits.MAX_WAITING_REQUESTS)
    for transfer_id, request_id in pairs:
        _text("transfer_id", transfer_id)
        _text("request_id", request_id)


def _text(name: str, value: str, *, shortest: int = 1, longest: int = limits.MAX_ID_CHARS) -> None:
    if not shortest <= len(value) <= longest:
        raise RemoteProtocolError(f"{name} must have {shortest} to {longest} characters, got {len(value)}")


def _number(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise RemoteProtocolError(f"{name} must be {lowest} to {highest}, got {value}")


def _count(name: str, count: int, most: int) -> None:
    if count > most:
        raise RemoteProtocolError(f"{name} may have {most} entries at most, got {count}")
