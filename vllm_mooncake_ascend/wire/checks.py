"""What a decoded message must satisfy beyond its types: lengths, counts, signs, finite numbers.

`wire.codec` has made sure that every field has its type. A peer can still send a negative number of tokens, a lease of NaN
seconds or a million readers; nothing of that may reach a machine. The layouts of a Welcome are judged where they are
compared with ours, by `layout.compatibility`, which names every flaw.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import RemoteProtocolError
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
    if offer.num_known_blocks and len(offer.num_known_blocks) != len(offer.block_ids):
        raise RemoteProtocolError(
            f"num_known_blocks must have {len(offer.block_ids)} entries, one a group, got {len(offer.num_known_blocks)}"
        )
    for num_known in offer.num_known_blocks:
        _number("num_known_blocks", num_known, 0, limits.MAX_BLOCKS_PER_TRANSFER)
    num_blocks = sum(offer.num_known_blocks) + sum(map(len, offer.block_ids))
    _count("block_ids", num_blocks, limits.MAX_BLOCKS_PER_TRANSFER)
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
