"""Progress: what is written, from vLLM's steps. The steps are made by hand, with the fields that are looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_mooncake_ascend.connectors.progress import Progress
from vllm_mooncake_ascend.layout.plane import GroupLayout
from vllm_mooncake_ascend.types import RequestId

BLOCK = 4
GROUPS = (GroupLayout(tokens_per_block=BLOCK, kernel_blocks_per_block=1, window_tokens=0, has_recurrent_state=False),)


def request_of(request_id: str, num_prompt_tokens: int) -> Any:
    return SimpleNamespace(request_id=request_id, num_prompt_tokens=num_prompt_tokens, num_computed_tokens=0, num_preemptions=0)


def step_of(scheduled: dict[str, int], new_blocks: dict[str, list[int]] | None = None) -> Any:
    """A scheduler output; `new_blocks` of requests that go on."""
    cached = new_blocks or {}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), new_block_ids=[(ids,) if ids else None for ids in cached.values()]
        ),
    )


def seen(progress: Progress, step: int) -> list[tuple[str, int, int, tuple[int, ...]]]:
    return [(one.request_id, one.chain, one.num_tokens, one.block_ids[0]) for one in progress.written(step)]


def test_a_chunk_is_written_when_its_step_came_back() -> None:
    """Goal: never what is merely scheduled. Method: two chunks in flight; the first comes back."""
    progress = Progress(groups=GROUPS, follows_decode=False)
    request = request_of("r", 20)
    progress.admitted(request, ((5, 6),))

    first = progress.scheduled(step_of({"r": 8}), lambda _: 1)
    request.num_computed_tokens = 8
    second = progress.scheduled(step_of({"r": 8}, {"r": [9, 3]}), lambda _: 1)

    assert [] == seen(progress, 0)
    assert [("r", 1, 8, (5, 6))] == seen(progress, first)
    assert [("r", 1, 16, (5, 6, 9, 3))] == seen(progress, second)
    assert [] == seen(progress, second)


def test_a_request_is_left_alone_behind_its_prompt() -> None:
    """Goal: nothing to do for requests that decode. Method: the prompt's last chunk, then decode steps."""
    progress = Progress(groups=GROUPS, follows_decode=False)
    request = request_of("r", 6)
    progress.admitted(request, ((5, 6),))

    step = progress.scheduled(step_of({"r": 6}), lambda _: 1)
    request.num_computed_tokens = 6

    assert 0 == len(progress)
    assert 0 == progress.scheduled(step_of({"r": 1}, {"r": []}), lambda _: 1)
    assert [("r", 1, 6, (5, 6))] == seen(progress, step)


def test_decode_is_followed_on_demand_at_the_ends_of_blocks() -> None:
    """Goal: one snapshot a block, not one a token. Method: eight decode steps."""
    progress = Progress(groups=GROUPS, follows_decode=True)
    request = request_of("r", 4)
    progress.admitted(request, ((5,),))
    steps = [progress.scheduled(step_of({"r": 4}), lambda _: 1)]
    for token in range(8):
        request.num_computed_tokens = 4 + token
        steps.append(progress.scheduled(step_of({"r": 1}, {"r": [6 + token // 4] if token % 4 == 0 else []}), lambda _: 1))

    assert [0, 4, 8] == [index for index, step in enumerate(steps) if step]
    assert [4, 8, 12] == [one.num_tokens for one in progress.written(steps[8])]


def test_a_preempted_request_begins_anew() -> None:
    """Goal: blocks of an earlier life are not told as those of the next. Method: preempt, with a step
    under way, and admit with other blocks."""
    progress = Progress(groups=GROUPS, follows_decode=False)
    request = request_of("r", 20)
    progress.admitted(request, ((5, 6),))
    progress.scheduled(step_of({"r": 8}), lambda _: 1)
    request.num_preemptions = 1
    progress.preempted(RequestId("r"))
    assert 0 == progress.scheduled(step_of({}), lambda _: 2)

    progress.admitted(request, ((7, 8),))
    step = progress.scheduled(step_of({"r": 8}, {"r": [7, 8]}), lambda _: 2)

    assert [("r", 2, 8, (7, 8))] == seen(progress, step)


def test_a_request_preempted_and_admitted_before_one_step_is_followed() -> None:
    """Goal: after a reset vLLM tells of the preemption in the step that already runs the next life. Method: admit first."""
    progress = Progress(groups=GROUPS, follows_decode=False)
    request = request_of("r", 20)
    progress.admitted(request, ((5, 6),))
    first = progress.scheduled(step_of({"r": 8}), lambda _: 1)
    request.num_preemptions = 1

    assert [] == seen(progress, first)
    progress.admitted(request, ((7, 8),))
    progress.preempted(RequestId("r"))
    second = progress.scheduled(step_of({"r": 8}, {"r": [7, 8]}), lambda _: 2)

    assert [("r", 2, 8, (7, 8))] == seen(progress, second)


def test_a_stranger_is_not_told() -> None:
    """Goal: a request without a life in the machine has nothing to save. Method: no chain."""
    progress = Progress(groups=GROUPS, follows_decode=False)
    progress.admitted(request_of("r", 20), ((5, 6),))

    assert 0 == progress.scheduled(step_of({"r": 8}), lambda _: None)
