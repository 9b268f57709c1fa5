"""Whether two answers to one prompt agree. Pure.

In bfloat16 the last bits of a logit depend on what else is in a step, so two well computed answers may part where the two best
tokens are about as likely: a near tie, in which both engines see the same two before all others, or an exact tie of several. KV
that is wrong makes other tokens everywhere, not only there.
"""

from __future__ import annotations

import msgspec

from vllm_mooncake_ascend.cli.bench.pd_asking import Answer

NEAR_TIES = {"bfloat16": 0.2, "float16": 0.03, "float32": 0.002}
"""By dtype: margins of log probability that rounding can turn, of either engine. In bfloat16, where logits are an eighth
apart, a burst may part by a quarter: then only a run in float32 tells whether it was rounding."""


class Tally(msgspec.Struct):
    """What became of the prompts of one set of engines."""

    num_equal: int = 0
    num_near_ties: int = 0
    num_different: int = 0
    partings: list[str] = []
    """Where answers parted from the plain engine's, in which case, and both margins there."""
    num_failed: int = 0
    last_failure: str = ""
    remote_tokens: list[int] = []
    """Tokens of each prompt whose KV decode was to read."""

    def count(self, reference: Answer, answer: Answer, *, near_tie: float, case: str) -> None:
        """Compare an answer with that of the plain engine."""
        index = parting(reference, answer)
        if index is None:
            self.num_equal += 1
            return
        margins = (reference.margins[index], answer.margins[index])
        are_same_two = {reference.token_ids[index], reference.next_ids[index]} == {
            answer.token_ids[index],
            answer.next_ids[index],
        }
        self.partings.append(
            f"{case}, token {index + 1}: {margins[0]:.3g} and {margins[1]:.3g}{'' if are_same_two else ', others'}"
        )
        # Of several tokens that are exactly as likely, as happens in bfloat16, any may stand first and second.
        if (are_same_two or min(margins) == 0) and max(margins) <= near_tie:
            self.num_near_ties += 1
        else:
            self.num_different += 1


def parting(reference: Answer, answer: Answer) -> int | None:
    """Index of the first token that is another one, None when there is none."""
    pairs = enumerate(zip(reference.token_ids, answer.token_ids, strict=True))
    return next((index for index, (expected, found) in pairs if expected != found), None)
