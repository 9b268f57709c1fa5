"""Pool calls: run one get or put of the store, and say in the machine's terms how it ended. Blocks.

Stores do not raise for what the world does; if one does, nothing is known of any key.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from vllm_mooncake_ascend.engines.base import KeyOutcome, KeyResult, KVStore, StoreAnswer, StoreKey
from vllm_mooncake_ascend.engines.store_codes import CHECKSUM_MISMATCH
from vllm_mooncake_ascend.planner.store_batch import StoreBatch
from vllm_mooncake_ascend.pool import events
from vllm_mooncake_ascend.runtime.pool_orders import PlannedCall
from vllm_mooncake_ascend.types import Outcome

logger = logging.getLogger(__name__)

OUTCOMES = {
    KeyOutcome.DONE: Outcome.DONE,
    KeyOutcome.ACCEPTED: Outcome.DONE,
    KeyOutcome.MISSING: Outcome.FAILED,
    KeyOutcome.FULL: Outcome.FAILED,
    KeyOutcome.REFUSED: Outcome.REFUSED,
    KeyOutcome.FAILED: Outcome.FAILED,
}
"""What a key's end means for the block it is of; all others: UNKNOWN."""


def answer_of(what: str, ask: Callable[[Sequence[StoreKey], StoreBatch], StoreAnswer], call: PlannedCall) -> StoreAnswer:
    """The store's answer, with one result a key whatever happens. `what`: get or put, for the log."""
    try:
        answer = ask(call.keys, call.batch)
        if len(answer.results) == len(call.keys):
            return answer
        reason = f"the store answered a {what} of {len(call.keys)} keys with {len(answer.results)} results"
        logger.error("%s; please report this", reason)
    except Exception as error:
        logger.exception("the store raised in a %s; please report this", what)
        reason = f"the store raised {type(error).__name__}: {error}"
    unknown = KeyResult(outcome=KeyOutcome.UNKNOWN, code=0, reason=reason)
    return StoreAnswer(results=(unknown,) * len(call.keys), is_lost=False)


def _is_gone(result: KeyResult) -> bool:
    """The pool has not got it, or not any more: see `drop_broken`."""
    return result.outcome is KeyOutcome.MISSING or result.code == CHECKSUM_MISMATCH


def _outcomes(answer: StoreAnswer) -> tuple[Outcome, ...]:
    return tuple(OUTCOMES.get(outcome, Outcome.UNKNOWN) for outcome in answer.outcomes)


def get_ended(load_id: int, call_index: int, call: PlannedCall, answer: StoreAnswer) -> events.GetEnded:
    """How a get ended."""
    return events.GetEnded(
        load_id=load_id,
        call_index=call_index,
        outcomes=_outcomes(answer),
        num_missing=sum(map(_is_gone, answer.results)),
        num_bytes=answer.outcomes.count(KeyOutcome.DONE) * call.batch.value_bytes,
        is_lost=answer.is_lost,
    )


def put_ended(save_id: int, call_index: int, call: PlannedCall, answer: StoreAnswer) -> events.PutEnded:
    """How a put ended."""
    return events.PutEnded(
        save_id=save_id,
        call_index=call_index,
        outcomes=_outcomes(answer),
        num_bytes=answer.outcomes.count(KeyOutcome.ACCEPTED) * call.batch.value_bytes,
        is_full=KeyOutcome.FULL in answer.outcomes,
        is_lost=answer.is_lost,
    )


def drop_broken(store: KVStore, call: PlannedCall, answer: StoreAnswer) -> None:
    """Take objects whose bytes are not those that were put out of the pool, whoever reads them: they are wrong for everybody,
    and while they are there nobody can put them anew."""
    for key, result in zip(call.keys, answer.results, strict=True):
        if result.code != CHECKSUM_MISMATCH:
            continue
        try:
            store.remove((key,), prefix=key, even_in_use=True)
        except Exception:
            logger.exception("the store raised in a remove; please report this")


def fence_holds(store: KVStore) -> bool:
    """Fence the store; False also when it raises."""
    try:
        return store.fence()
    except Exception:
        logger.exception("the store raised while it was fenced; please report this")
        return False
