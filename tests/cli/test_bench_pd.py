"""cli.bench.pd: what is decided without engines: names, comparisons, verdicts, gaps, notes, refusals. Engines: `make bench`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli import main
from vllm_mooncake_ascend.cli.bench import pd_measures, pd_moved, pd_report, pd_sets, pd_subjects
from vllm_mooncake_ascend.cli.bench.pd import PARTS, SUBJECTS, TOKENS
from vllm_mooncake_ascend.cli.bench.pd_answers import Tally
from vllm_mooncake_ascend.cli.bench.pd_asking import Answer, Handover
from vllm_mooncake_ascend.cli.bench.pd_gaps import Gaps, idle_gaps, newcomer_gaps
from vllm_mooncake_ascend.cli.bench.pd_moved import Moved
from vllm_mooncake_ascend.cli.bench.report import compared
from vllm_mooncake_ascend.cli.bench.samples import Goal


def answer_of(*token_ids: int, next_ids: tuple[int, ...] = (), margins: tuple[float, ...] = ()) -> Answer:
    num_tokens = len(token_ids)
    return Answer(
        token_ids=token_ids, next_ids=next_ids or (0,) * num_tokens, margins=margins or (1.0,) * num_tokens, first_token_s=0.1
    )


# --- answers -----------------------------------------------------------------------------------------------------------


def counts_of(reference: Answer, answer: Answer, *, near_tie: float = 0.1) -> tuple[int, int, int, list[str]]:
    """What a tally says of one answer: equal, near ties, different, and where it parted."""
    tally = Tally()
    tally.count(reference, answer, near_tie=near_tie, case="burst")
    return tally.num_equal, tally.num_near_ties, tally.num_different, tally.partings


def test_answers_with_the_same_tokens_are_equal() -> None:
    """Goal: margins do not matter then."""
    assert (1, 0, 0, []) == counts_of(answer_of(1, 2), answer_of(1, 2, margins=(0.0, 0.0)))


def test_answers_may_part_where_neither_engine_could_decide() -> None:
    """Goal: the first different token counts, and what both engines thought there. Method: the same two tokens, at and above
    the bound; another second token; one that is exactly as likely; a token of its own."""
    reference = answer_of(1, 2, 3, next_ids=(9, 5, 9), margins=(9.0, 0.04, 9.0))
    swapped = answer_of(1, 5, 6, next_ids=(9, 2, 9), margins=(9.0, 0.06, 9.0))
    assert (0, 1, 0, ["burst, token 2: 0.04 and 0.06"]) == counts_of(reference, swapped)
    assert (0, 0, 1, ["burst, token 2: 0.04 and 0.06"]) == counts_of(reference, swapped, near_tie=0.05)
    other = answer_of(1, 5, 6, next_ids=(9, 7, 9), margins=(9.0, 0.06, 9.0))
    assert (0, 0, 1, ["burst, token 2: 0.04 and 0.06, others"]) == counts_of(reference, other)
    tied = answer_of(1, 5, 6, next_ids=(9, 7, 9), margins=(9.0, 0.0, 9.0))
    assert (0, 1, 0, ["burst, token 2: 0.04 and 0, others"]) == counts_of(reference, tied)
    assert (0, 0, 1, ["burst, token 1: 9 and 1, others"]) == counts_of(reference, answer_of(7, 5, 6))


# --- time between tokens -----------------------------------------------------------------------------------------------


def test_idle_gaps_are_those_that_end_in_the_window() -> None:
    """Goal: the gap that ends at the window's start is not in it. Method: two requests, a window of two seconds."""
    found = idle_gaps([[0.0, 1.0, 2.0, 4.0], [0.5, 1.5]], 1.0, 3.0)
    assert Gaps(mean_s=1.0, longest_s=1.0) == found


def test_a_newcomers_own_step_is_in_the_longest_gap_alone() -> None:
    """Goal: KV that comes beside running requests costs the mean nothing, its first step is its own. Method: steps of 0.1 s,
    asked for at 1.0, first token at 1.45 by a step of 0.25, whose end is seen a little later in the other stream."""
    streams = [[0.9, 1.0, 1.1, 1.2, 1.46, 1.56]]
    found = newcomer_gaps(streams, 1.0, 1.45, Gaps(mean_s=0.1, longest_s=0.1))
    assert found is not None
    assert (0.1, 0.26) == (pytest.approx(found.mean_s), pytest.approx(found.longest_s))


def test_a_stall_while_kv_comes_is_in_both() -> None:
    """Goal: what a transfer does to running requests shows."""
    found = newcomer_gaps([[0.9, 1.0, 1.4, 1.5, 1.6]], 1.0, 1.6, Gaps(mean_s=0.1, longest_s=0.1))
    assert found is not None
    assert (0.25, 0.4) == (pytest.approx(found.mean_s), pytest.approx(found.longest_s))


def test_requests_that_stand_still_have_no_gaps() -> None:
    """Goal: an engine that stalls has no figure instead of a wrong one."""
    assert None is idle_gaps([[0.0, 0.1], []], 1.0, 2.0)
    assert None is newcomer_gaps([[0.0, 0.1], []], 1.0, 2.0, Gaps(mean_s=0.1, longest_s=0.1))


def test_of_each_running_request_a_gap_counts() -> None:
    """Goal: a transfer within one step still has a figure."""
    found = newcomer_gaps([[0.9, 1.0, 1.1]], 1.05, 1.1, Gaps(mean_s=0.1, longest_s=0.1))
    assert found is not None
    assert 0.1 == pytest.approx(found.mean_s)


# --- what is measured --------------------------------------------------------------------------------------------------


def test_goals_are_for_ours_and_long_prompts() -> None:
    """Goal: the goals of the project, on our figures only."""
    ratio = pd_measures.first_token_ratio
    assert Goal(limit=1.10, is_ceiling=True) == ratio(2049, pd_measures.STREAM).goal
    assert Goal(limit=1.25, is_ceiling=True) == ratio(4097, pd_measures.AFTER_PREFILL).goal
    assert [None, None] == [ratio(1025, pd_measures.STREAM).goal, ratio(4097, "a peer").goal]
    assert None is pd_measures.cpu_above_local_hit(2049, "a peer").goal


def test_ratios_are_of_one_case() -> None:
    """Goal: report.Comparison's rule: same name and case, or what one subject did in two ways."""
    subject = pd_measures.STREAM
    ratios = (
        pd_measures.first_token_ratio(2049, subject),
        pd_measures.all_first_tokens_ratio(1025, subject),
        pd_measures.cpu_ratio(2049, subject),
    )
    for ratio in ratios:
        assert (ratio.above.name, ratio.above.case) == (ratio.below.name, ratio.below.case)
        assert f"{subject} / colocated beside {subject}" == compared(ratio.above, ratio.below)
    gap = pd_measures.gap_ratio("mean", 4097, subject)
    assert f"{subject}: newcomer / idle" == compared(gap.above, gap.below)


@pytest.mark.parametrize(("parts", "count"), [(("first",), 0), (("single",), 3), (PARTS, 5)])
def test_parts_make_the_cases_of_a_round(parts: tuple[str, ...], count: int) -> None:
    """Goal: each length by itself, the others once."""
    assert count == len(pd_sets.cases_of(pd_sets.Plan(tokens=TOKENS, parts=parts, set_s=60.0)))


@pytest.mark.parametrize(("tokens", "expected"), [((1025, 2049, 4097), 2049), ((300, 900), 900)])
def test_cpu_is_measured_at_one_length(tokens: tuple[int, ...], expected: int) -> None:
    """Goal: 2,049 tokens if asked for, else the longest."""
    assert expected == pd_sets.Plan(tokens=tokens, parts=("single",), set_s=60.0).cpu_tokens


# --- engines -----------------------------------------------------------------------------------------------------------


def test_both_engines_of_ours_have_the_mode_and_the_proxy_its_flow() -> None:
    """Goal: stream is stream on both sides; by default decode is asked afterwards."""
    modes = {}
    for subject in (pd_subjects.after_prefill(), pd_subjects.stream()):
        configs = [json.loads(side.transfer_config) for side in (subject.prefill, subject.decode)]
        assert ["kv_producer", "kv_consumer"] == [config["kv_role"] for config in configs]
        (mode,) = {config["kv_connector_extra_config"]["transfer_mode"] for config in configs}
        modes[mode] = subject.proxy_flow
    assert {"after_prefill": "sequential", "stream": "concurrent"} == modes


def test_all_engines_of_a_set_have_the_same_options() -> None:
    """Goal: only the connector differs, so that answers can be compared. Method: the commands without it."""
    options = pd_subjects.Options(model=Path("model"), dtype="bfloat16", max_tokens=4097)
    specs = pd_subjects.engine_specs(pd_subjects.stream(), options, cpus=frozenset({0, 1}))
    assert ["prefill", "decode", "colocated"] == [spec.name for spec in specs]
    (common,) = {without_connector(spec.command) for spec in specs}
    assert ("--max-num-batched-tokens", "512") == common[common.index("--max-num-batched-tokens") :][:2]
    assert ("--max-model-len", "4161") == common[common.index("--max-model-len") :][:2]


def test_decode_alone_is_kept_off_cores_where_they_are_few() -> None:
    """Goal: the places of `launch`."""
    options = pd_subjects.Options(model=Path("model"), dtype="bfloat16", max_tokens=1025)
    specs = pd_subjects.engine_specs(pd_subjects.stream(), options, cpus=frozenset({0, 1}))
    assert {"prefill": frozenset(), "decode": frozenset({1}), "colocated": frozenset()} == {
        spec.name: spec.placement.cpus for spec in specs
    }


def without_connector(command: tuple[str, ...]) -> tuple[str, ...]:
    at = command.index("--kv-transfer-config") if "--kv-transfer-config" in command else len(command)
    return command[:at] + command[at + 2 :]


def test_prompts_are_drawn_from_the_models_words(tmp_path: Path) -> None:
    """Goal: token ids that exist, none of the special ones at the ends."""
    (tmp_path / "config.json").write_text('{"vocab_size": 49152}')
    assert range(6144, 24576) == pd_subjects.vocabulary(tmp_path)


def test_params_of_both_legs() -> None:
    """Goal: decode gets what prefill answered, or what the peer wants to be told, with the transfer's id."""
    answered = {"do_remote_prefill": True, "remote_host": "here"}
    ours, told = Handover(prefill={"do_remote_decode": True}), Handover(prefill={}, decode={"do_remote_prefill": True})
    assert {"do_remote_decode": True, "transfer_id": "t"} == ours.prefill_params("t")
    assert answered == ours.decode_params("t", answered)
    assert {"do_remote_prefill": True, "transfer_id": "t"} == told.decode_params("t", {})


# --- verdicts ----------------------------------------------------------------------------------------------------------


def test_kv_that_moved_is_counted_in_whole_blocks() -> None:
    """Goal: the last token is decode's own. Method: prompts of 257 and 256 tokens, blocks of 128: two blocks and one."""
    metrics = {pd_moved.TOKENS: 384.0, pd_moved.LOADS_DONE: 2.0, pd_moved.BYTES_READ: 3 * 1000.0}
    assert "" == pd_moved.moved_of([257, 256], metrics, block_size=128, block_bytes=1000).missing


@pytest.mark.parametrize("name", [pd_moved.TOKENS, pd_moved.LOADS_DONE, pd_moved.BYTES_READ])
def test_kv_that_did_not_move_is_told(name: str) -> None:
    """Goal: each count alone convicts. Method: one too few of each."""
    metrics = {pd_moved.TOKENS: 384.0, pd_moved.LOADS_DONE: 2.0, pd_moved.BYTES_READ: 3 * 1000.0}
    moved = pd_moved.moved_of([257, 256], {**metrics, name: metrics[name] - 1}, block_size=128, block_bytes=1000)
    assert moved.missing.startswith(f"{name} is")


def test_a_peer_has_no_counters_of_ours() -> None:
    """Goal: vLLM's own count is asked of everybody, ours of ours."""
    assert "" == pd_moved.moved_of([257], {pd_moved.TOKENS: 256.0}, block_size=128, block_bytes=None).missing


def test_a_wrong_answer_or_kv_that_stayed_is_a_fault() -> None:
    """Goal: the command fails then; near ties are none."""
    fine = pd_sets.Outcome(tallies={"ours": Tally(num_equal=3, num_near_ties=1)}, moved=moved(missing=""))
    wrong = pd_sets.Outcome(tallies={"ours": Tally(num_different=1)}, moved=moved(missing="bytes"), broken="refused")
    assert [] == list(pd_report.faults_of(fine))
    assert 3 == len(list(pd_report.faults_of(wrong)))


def test_notes_tell_of_answers_and_kv() -> None:
    """Goal: what the figures do not say."""
    outcome = pd_sets.Outcome(tallies={"ours, stream": Tally(num_equal=3, num_near_ties=1)}, moved=moved(missing=""))
    answers, kv = pd_report.notes_of(pd_subjects.stream(), outcome)
    assert "of 4 answers 3 equal" in answers
    assert "384 tokens; all came" in kv


def test_figures_are_shown_by_kind_and_length() -> None:
    """Goal: a table one can read, whatever the order of the rounds. Method: lengths of other numbers of digits."""
    subject = pd_measures.STREAM
    first_tokens = [pd_measures.first_token(tokens, name) for tokens in (500, 2049, 10000) for name in (subject, "z")]
    others = [pd_measures.first_ever(500, subject), pd_measures.all_first_tokens(500, subject)]
    shuffled = [others[1], *reversed(first_tokens), others[0]]
    assert [others[0], *first_tokens, others[1]] == sorted(shuffled, key=pd_measures.place)


def moved(*, missing: str) -> Moved:
    return Moved(expected_tokens=384, tokens=384.0, missing=missing)


# --- the command -------------------------------------------------------------------------------------------------------


def test_the_commands_words_are_known() -> None:
    """Goal: the help and the makers agree."""
    assert set(SUBJECTS) <= set(pd_report.MAKERS)


@pytest.mark.parametrize(
    "words", [("--model", "nowhere"), ("--subject", "theirs"), ("--tokens", "9000"), ("--part", "all"), ("--dtype", "int8")]
)
def test_misuse_is_refused_before_anything_starts(words: tuple[str, ...]) -> None:
    """Goal: status 2, at once."""
    assert 2 == CliRunner().invoke(main.build_app(), ["bench", "pd", *words]).exit_code
