"""Judgement on what a producer offers: whether it is our prompt's KV, and whether it makes sense. No state."""

from __future__ import annotations

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.blocks import num_blocks_for, tokens_of_whole_blocks
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.p2p import counters
from vllm_mooncake_ascend.p2p.fetches import Fetch, FetchState
from vllm_mooncake_ascend.wire.messages import PROTOCOL_VERSION, Offer, Welcome


def why_no_peer(welcome: Welcome) -> tuple[str, ...]:
    """Why an engine cannot be read from whatever its layout is, empty when it may be."""
    if welcome.version != PROTOCOL_VERSION:
        return (f"protocol version: {PROTOCOL_VERSION} here, {welcome.version} there",)
    return () if welcome.ranks else ("no layout of any rank was told",)


def why_refused(offer: Offer, fetch: Fetch) -> str:
    """Why this offer is not for this request, "" when it is.

    A pending offer of a transfer that no prefill has announced yet carries no digest; one that may be read always must.
    """
    if _is_too_long(offer, fetch):
        return counters.OFFER_INVALID
    if offer.prompt_digest == fetch.prompt_digest:
        return ""
    return counters.OTHER_PROMPT if may_be_read(offer) or offer.prompt_digest else ""


def may_be_read(offer: Offer) -> bool:
    """There is something to read: all of it, or what is written so far."""
    return offer.state == "ready" or bool(offer.block_ids)


def is_newer(offer: Offer, known: Offer | None) -> bool:
    """Whether it tells more than the one that is known: messages may overtake each other. Nothing comes after ready."""
    if known is None:
        return True
    if known.state == "ready":
        return False
    return offer.state == "ready" or (offer.generation, offer.num_tokens) > (known.generation, known.num_tokens)


def _is_too_long(offer: Offer, fetch: Fetch) -> bool:
    """A table has more blocks than the prompt has tokens. Nobody's layout need be known to say so."""
    num_known_blocks = offer.num_known_blocks or (0,) * len(offer.block_ids)
    numbers = zip(num_known_blocks, offer.block_ids, strict=True)
    return any(num_known + len(ids) > fetch.num_prompt_tokens for num_known, ids in numbers)


def joined(offer: Offer, fetch: Fetch) -> Offer | None:
    """An offer with the whole table: what it leaves out is known. None when it is not: a message was lost between them. One
    that is too long stays as it is, to be refused."""
    known = fetch.offer
    if not offer.num_known_blocks or _is_too_long(offer, fetch):
        return offer
    if known is None or known.generation != offer.generation or len(known.block_ids) != len(offer.block_ids):
        return None
    if any(len(table) < num_known for table, num_known in zip(known.block_ids, offer.num_known_blocks, strict=True)):
        return None
    parts = zip(known.block_ids, offer.num_known_blocks, offer.block_ids, strict=True)
    tables = tuple(table[:num_known] + more for table, num_known, more in parts)
    return msgspec.structs.replace(offer, block_ids=tables, num_known_blocks=())


def why_unusable(offer: Offer, groups: tuple[GroupLayout, ...]) -> str:
    """Why an offer makes no sense with the layout of its engine, "" when it does."""
    if not may_be_read(offer):
        return counters.OFFER_INVALID if offer.num_tokens else ""
    if len(offer.block_ids) != len(groups):
        return counters.OFFER_INVALID
    needed = (num_blocks_for(offer.num_tokens, group.tokens_per_block) for group in groups)
    is_whole = all(len(block_ids) >= num_blocks for block_ids, num_blocks in zip(offer.block_ids, needed, strict=True))
    return "" if is_whole else counters.OFFER_INVALID


def why_not_enough(offer: Offer, fetch: Fetch) -> str:
    """Why the end of a prefill is not that of what is being read, "" when it is, or has not come."""
    return counters.OFFER_INVALID if offer.state == "ready" and offer.num_tokens < fetch.end_token else ""


def remote_tokens(fetch: Fetch, num_local_tokens: int, min_remote_tokens: int) -> int | None:
    """Tokens that vLLM is to allocate for beyond `num_local_tokens`; None: not known yet."""
    match fetch.state:
        case FetchState.ASKING | FetchState.PENDING:
            return None
        case FetchState.READY:
            num_tokens = _promised_tokens(fetch) - num_local_tokens
            return num_tokens if num_tokens >= min_remote_tokens else 0
        case FetchState.DOOMED:
            return max(0, fetch.num_prompt_tokens - num_local_tokens)
        case _:
            return 0


def covers(fetch: Fetch, first_token: int, end_token: int) -> bool:
    """The fetch's offer holds tokens [first_token, end_token), or will."""
    return 0 <= first_token < end_token <= _promised_tokens(fetch)


def readable_token(fetch: Fetch, here: tuple[GroupLayout, ...], there: tuple[GroupLayout, ...]) -> int:
    """End of what may be read now of tokens [first_token, end_token). Before the prefill has ended parts end where blocks end
    on both sides."""
    assert fetch.offer is not None, "only an offered transfer is read"
    if fetch.offer.state == "ready":
        return fetch.end_token
    num_tokens = tokens_of_whole_blocks(fetch.offer.num_tokens, (*here, *there))
    return max(fetch.first_token, min(fetch.end_token, num_tokens))


def _promised_tokens(fetch: Fetch) -> int:
    """A prefill that ends with KV has that of its whole prompt, which is ours: the digests are the same."""
    if fetch.offer is None:
        return 0
    return min(fetch.offer.num_tokens, fetch.num_prompt_tokens) if fetch.offer.state == "ready" else fetch.num_prompt_tokens


def time_rule_holds(fetch: Fetch) -> bool:
    """The read ended while the lease was sure and no other engine could have answered in the producer's place.

    All times are of this process's one clock: when the latest acknowledged renewal was *sent*, and when the last rank's
    end of the read *arrived*, so that every delay counts against us.
    """
    assert fetch.offer is not None, "only an offered transfer is read"
    lease_s = fetch.offer.lease_ttl_s - limits.LEASE_MARGIN_S
    return fetch.read_ended_at_s <= fetch.acknowledged_s + min(lease_s, limits.ENGINE_RESTART_MIN_S)
