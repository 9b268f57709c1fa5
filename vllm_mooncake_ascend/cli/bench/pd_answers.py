"""Whether two answers to one prompt agree. Pure.

In bfloat16 the last bits of a logit depend on what else is in a step, so two well computed answers may part where the two best
tokens are about as likely: a near tie. KV that is wrong makes other tokens everywhere, not only there.
"""

from __future__ import annotations

import msgspec

from vllm_mooncake_ascend.cli.bench.pd_asking import Answer

NEAR_TIES = {"bfloat16": 0.2, "float16": 0.03, "float32": 0.002}
"""By dtype: margins of log probability that rounding can turn. Measured in bfloat16 with other steps: up to 0.17."""


class Tally(msgspec.Struct):
    """What became of the prompts of one set of engines."""

    num_equal: int = 0
    num_near_ties: int = 0
    num_different: int = 0
    partings: list[str] = []
    """Where answers parted from the plain engine's, by how much its best token was better, and in which case."""
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
        margin = reference.margins[index]
        self.partings.append(f"{case}, token {index + 1}: {margin:.3g}")
        if margin <= near_tie:
            self.num_near_ties += 1
        else:
            self.num_different += 1


def parting(reference: Answer, answer: Answer) -> int | None:
    """Index of the first token that is another one, None when there is none."""
    pairs = enumerate(zip(reference.token_ids, answer.token_ids, strict=True))
    return next((index for index, (expected, found) in pairs if expected != found), None)
