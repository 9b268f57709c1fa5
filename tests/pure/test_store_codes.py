"""The table of Mooncake Store's return codes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend.engines.base import KeyOutcome
from vllm_mooncake_ascend.engines.store_codes import exists_result, get_result, is_lost, put_result, remove_result

CERTAIN_OF_GET = {
    -703: KeyOutcome.MISSING,
    -704: KeyOutcome.MISSING,
    -600: KeyOutcome.FAILED,
    -702: KeyOutcome.FAILED,
    -801: KeyOutcome.FAILED,
    -707: KeyOutcome.FAILED,
    **dict.fromkeys((-10, -706, -1101, -1102), KeyOutcome.FAILED),
}
CERTAIN_OF_PUT = {-200: KeyOutcome.FULL, -1700: KeyOutcome.FULL, -1701: KeyOutcome.FULL, -600: KeyOutcome.FAILED}


@given(value_bytes=st.integers(1, 2**31 - 1), answer=st.integers(-(2**31), 2**31 - 1))
def test_a_get_is_done_only_with_the_expected_number_of_bytes(value_bytes: int, answer: int) -> None:
    """Any other number, positive ones and 0 included, is not."""
    assert (answer == value_bytes) == (get_result(answer, value_bytes=value_bytes).outcome is KeyOutcome.DONE)


@given(code=st.integers(-(2**31), 4_095))
def test_what_the_table_does_not_name_is_unknown_to_a_get(code: int) -> None:
    """Bytes may still land."""
    assert CERTAIN_OF_GET.get(code, KeyOutcome.UNKNOWN) is get_result(code, value_bytes=4_096).outcome


@given(code=st.integers(-(2**31), 2**31 - 1))
def test_what_the_table_does_not_name_is_unknown_to_a_put(code: int) -> None:
    """Our memory may still be read; a positive answer is not one that a put gives."""
    assert (CERTAIN_OF_PUT | {0: KeyOutcome.ACCEPTED}).get(code, KeyOutcome.UNKNOWN) is put_result(code).outcome


@given(code=st.integers(-(2**31), 2**31 - 1))
def test_a_lookup_knows_only_1_and_0(code: int) -> None:
    """A code is no answer, neither yes nor no."""
    assert {1: KeyOutcome.DONE, 0: KeyOutcome.MISSING}.get(code, KeyOutcome.UNKNOWN) is exists_result(code).outcome


@given(code=st.integers(-(2**31), 2**31 - 1))
def test_a_key_is_removed_only_with_0(code: int) -> None:
    """Three codes say where it stands instead; of all others nothing is known."""
    known = {0: KeyOutcome.DONE, -703: KeyOutcome.IN_USE, -704: KeyOutcome.MISSING, -706: KeyOutcome.IN_USE}
    assert known.get(code, KeyOutcome.UNKNOWN) is remove_result(code).outcome


@pytest.mark.parametrize("code", CERTAIN_OF_GET)
def test_a_certain_code_comes_with_the_code(code: int) -> None:
    """Metrics count by it; a key that is simply missing needs no words."""
    result = get_result(code, value_bytes=8)
    assert (code, result.outcome is KeyOutcome.MISSING) == (result.code, result.reason == "")


def test_only_silence_of_the_master_is_lost() -> None:
    """The two RPC codes, and no failed transfer, which is one owner's. (An SSD's owner gives them too: a get asks again.)"""
    assert [-900, -901] == [code for code in (-1, -200, -600, -704, -707, -800, -900, -901, 0, 1) if is_lost(code)]
