"""The table of Mooncake's return codes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.engines.codes import Call, explain, verdict
from vllm_mooncake_ascend.types import Outcome


@given(code=st.integers(min_value=-(2**31), max_value=2**31 - 1).filter(lambda code: code != 0))
def test_a_read_that_did_not_answer_0_is_unknown(code: int) -> None:
    """Whatever number comes back, known or not, positive or negative: bytes may still land."""
    assert verdict(Call.READ, code).outcome is Outcome.UNKNOWN


@pytest.mark.parametrize("call", Call)
def test_0_is_done_for_every_call(call: Call) -> None:
    """Success is the same number everywhere."""
    assert verdict(call, 0).outcome is Outcome.DONE


@given(call=st.sampled_from([Call.INITIALIZE, Call.REGISTER, Call.OPEN]), code=st.integers(max_value=-1))
def test_calls_that_move_no_byte_fail_cleanly(call: Call, code: int) -> None:
    """Setting up, registering and opening leave nothing under way, so their failures are FAILED."""
    assert verdict(call, code).outcome is Outcome.FAILED


@given(call=st.sampled_from(list(Call)), code=st.integers(max_value=-1))
def test_explanations_name_call_code_meaning_and_remedy(call: Call, code: int) -> None:
    """A person who sees the line knows what was called, what came back, and what to do."""
    text = explain(call, code)
    found = verdict(call, code)
    assert all(part and part in text for part in (call.value, str(code), found.meaning, found.remedy))
