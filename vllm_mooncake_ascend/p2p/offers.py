"""Judgement on what a producer offers: whether it is our prompt's KV, and whether it makes sense. No state."""

from __future__ import annotations

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.layout.blocks import num_blocks_for
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.p2p import counters
from vllm_mooncake_ascend.p2p.fetches import Fetch
from vllm_mooncake_ascend.wire.messages import Offer


def why_refused(offer: Offer, fetch: Fetch) -> str:
    """Why this offer is not for this request, "" when it is.

    A pending offer of a transfer that no prefill has announced yet carries no digest; a ready one always must.
    """
    if offer.prompt_digest == fetch.prompt_digest:
        return ""
    return "" if offer.state == "pending" and not offer.prompt_digest else counters.OTHER_PROMPT


def why_unusable(offer: Offer, groups: tuple[GroupLayout, ...]) -> str:
    """Why a ready offer cannot be read with the layout of its engine, "" when it can."""
    if len(offer.block_ids) != len(groups):
        return counters.OFFER_INVALID
    needed = (num_blocks_for(offer.num_tokens, group.tokens_per_block) for group in groups)
    is_whole = all(len(block_ids) >= num_blocks for block_ids, num_blocks in zip(offer.block_ids, needed, strict=True))
    return "" if is_whole else counters.OFFER_INVALID


def usable_tokens(fetch: Fetch, num_local_tokens: int, min_remote_tokens: int) -> int:
    """Tokens worth reading beyond those that are here already."""
    offered = fetch.offer.num_tokens if fetch.offer is not None else 0
    num_tokens = min(offered, fetch.num_prompt_tokens) - num_local_tokens
    return num_tokens if num_tokens >= min_remote_tokens else 0


def covers(fetch: Fetch, first_token: int, end_token: int) -> bool:
    """The fetch's offer holds tokens [first_token, end_token)."""
    offered = fetch.offer.num_tokens if fetch.offer is not None else 0
    return 0 <= first_token < end_token <= min(offered, fetch.num_prompt_tokens)


def time_rule_holds(fetch: Fetch) -> bool:
    """The read ended while the lease was sure and no other engine could have answered in the producer's place.

    All times are of this process's one clock: when the latest acknowledged renewal was *sent*, and when the last rank's
    end of the read *arrived*, so that every delay counts against us.
    """
    assert fetch.offer is not None, "only an offered transfer is read"
    lease_s = fetch.offer.lease_ttl_s - limits.LEASE_MARGIN_S
    return fetch.read_ended_at_s <= fetch.acknowledged_s + min(lease_s, limits.ENGINE_RESTART_MIN_S)
