"""Both legs at once: decode reads what each chunk of prefill has written while prefill computes the next.

`pair` and `fat` have `transfer_mode=stream` on both engines. User cases R04, R06 and R07 in this flow.
"""

from __future__ import annotations

import itertools
import time

import pytest

from tests.e2e.test_crashes import FAT_TOKENS, LATE_BYTES_S, LEASE_TTL_S, RECOMPUTE_S
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, Prompt, random_prompt
from vllm_mooncake_ascend.testing.engine_process import RequestRefused, Running

pytestmark = pytest.mark.engine

BLOCK = 32
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 511, 512, 513, 1023, 1024, 1025, 1537, 2900)
CALLS_DONE = "engine_calls_total{outcome=done}"
LOADED = "loads_done_total{reason=held}"
SUBSCRIPTION_S = 0.5
"""It takes milliseconds; a chunk that ends before it is offered with the next one."""
READ_BYTES = "kv_read_bytes_total"
BLOCK_BYTES = 2 * 2 * BLOCK * 2 * 64 * 4
"""tiny-gqa: layers x KV heads x tokens x (K and V) x head size x float32."""

_ids = itertools.count()


def start_at_once(pair: EnginePair, prompt: Prompt) -> tuple[Running, Running]:
    return pair.start_at_once(prompt, f"at once {next(_ids)}")


def start_streaming(pair: EnginePair, prompt: Prompt, num_calls: int = 1) -> tuple[Running, Running]:
    """A request whose first chunk has been read while prefill is held before its last one."""
    before = pair.decode.metric(CALLS_DONE)
    params = pair.early_params(transfer_id := f"streaming {next(_ids)}")
    pair.prefill.hold()
    prefill = pair.start_prefill(prompt, transfer_id=transfer_id)
    decode = pair.decode.submit(prompt, params=params)
    time.sleep(SUBSCRIPTION_S)
    pair.prefill.step(-(-len(prompt) // 512) - 1)
    pair.decode.wait_until(lambda: pair.decode.metric(CALLS_DONE) - before > num_calls, "what is read of a running prefill")
    assert not prefill.is_finished
    return prefill, decode


def test_prompts_of_all_lengths_are_answered_right(pair: EnginePair) -> None:
    """Goal: no block or chunk edge is off by one, and no byte is read twice. Method: prompts neither engine has seen, each sent
    to both at once; the bytes are those of its blocks."""
    wrong, moved, expected = {}, {}, {}
    for length in LENGTHS:
        prompt = random_prompt("streamed", length)
        before = pair.decode.metric(READ_BYTES)
        prefill, decode = start_at_once(pair, prompt)
        if decode.result().text != pair.expected(prompt):
            wrong[length] = decode.answer.text
        prefill.result()
        moved[length] = (pair.decode.metric(READ_BYTES) - before) / BLOCK_BYTES
        expected[length] = -(-length // BLOCK)
    assert {} == wrong
    assert expected == moved


def test_chunks_are_read_before_the_prefill_has_ended(pair: EnginePair) -> None:
    """Goal: only the last chunk is left to be moved when the first token is there. Method: hold prefill's last step."""
    prompt = random_prompt("early bytes", 2900)
    before = pair.decode.metric(LOADED)
    prefill, decode = start_streaming(pair, prompt)
    assert not decode.answer.text.token_ids

    pair.prefill.release()
    prefill.result()

    assert pair.expected(prompt) == decode.result().text
    assert 1 == pair.decode.metric(LOADED) - before


def test_many_prompts_of_many_chunks_at_once_are_answered_right(pair: EnginePair) -> None:
    """Goal: streams neither mix up blocks nor starve each other. Method: 16 prompts of up to five chunks, half with a common
    prefix, all at once, more KV than decode has."""
    common = random_prompt("common streamed prefix", 1024)
    lengths = [513 + 127 * index for index in range(16)]
    prompts = [
        common + random_prompt("many streamed", length)[1024:]
        if index % 2 and length > 1100
        else random_prompt("many streamed", length)
        for index, length in enumerate(lengths)
    ]
    requests = {prompt: start_at_once(pair, prompt) for prompt in prompts}

    wrong = {len(prompt): decode.result().text for prompt, (_, decode) in requests.items()}
    assert {len(prompt): pair.expected(prompt) for prompt in prompts} == wrong
    for prefill, _ in requests.values():
        prefill.result()


@pytest.mark.parametrize("leaves", ["decode", "prefill"])
def test_a_client_leaves_in_mid_stream(pair: EnginePair, leaves: str) -> None:
    """Goal: whoever leaves frees both engines, and the other one's answer is right. Method: abort one leg with chunks read."""
    prompt = random_prompt(f"{leaves} leaves", 2400)
    expected = pair.expected(prompt)
    prefill, decode = start_streaming(pair, prompt)

    if leaves == "decode":
        decode.abort()
        pair.prefill.release()
        prefill.result()
    else:
        prefill.abort()
        pair.prefill.release()
        assert expected == decode.result(timeout_s=RECOMPUTE_S).text


def test_a_reset_in_mid_stream(pair: EnginePair) -> None:
    """Goal: what was read of KV that is void is not used. Method: with chunks read, reset prefill's cache with its running
    request, which computes anew. vLLM refuses that while blocks are offered, and the engine lives; the connector first, then
    the rest, is the order that works."""
    prompt = random_prompt("reset in stream", 2400)
    expected = pair.expected(prompt)
    prefill, decode = start_streaming(pair, prompt)

    with pytest.raises(RequestRefused, match="Failed to reset KV cache"):
        pair.prefill.reset_cache(reset_running_requests=True, reset_connector=True)
    assert not pair.prefill.reset_cache(reset_connector=True)
    assert pair.prefill.reset_cache(reset_running_requests=True)
    pair.prefill.release()
    prefill.result()

    assert expected == decode.result(timeout_s=RECOMPUTE_S).text


def test_prefill_killed_in_mid_stream(fat: EnginePair) -> None:
    """Goal: decode computes what will not come. Method: SIGKILL with the first chunk read."""
    prompt = random_prompt("killed in stream", FAT_TOKENS)
    expected = fat.expected(prompt)
    _, decode = start_streaming(fat, prompt)

    fat.prefill.kill()

    assert expected == decode.result(timeout_s=RECOMPUTE_S).text


def test_prefill_frozen_in_mid_stream_and_thawed_late(fat: EnginePair) -> None:
    """Goal: a late byte never reaches a live block. Method: SIGSTOP with the first chunk read; decode computes by itself and
    its cache is filled with other prompts; then SIGCONT, and no cached block may have changed."""
    prompt = random_prompt("frozen in stream", FAT_TOKENS)
    others = [random_prompt(f"beside frozen stream {index}", 900) for index in range(2)]
    expected = [fat.expected(known) for known in (prompt, *others)]
    prefill, decode = start_streaming(fat, prompt)
    fat.prefill.freeze()
    first = decode.result(timeout_s=RECOMPUTE_S).text
    for other in others:
        fat.decode.submit(other).result()
    before = fat.decode.digests(fat.decode.state().cached_block_ids)

    fat.prefill.thaw()
    fat.prefill.release()
    prefill.result()
    time.sleep(LATE_BYTES_S)

    assert before == fat.decode.digests(list(before))
    again = [fat.decode.submit(known).result().text for known in (prompt, *others)]
    assert [expected[0], expected] == [first, again]


def test_decode_killed_in_mid_stream(fat: EnginePair) -> None:
    """Goal: prefill frees what a dead decode engine read. Method: SIGKILL decode with the first chunk read; prefill ends, and
    keeps its blocks for the lease's time."""
    prefill, _ = start_streaming(fat, random_prompt("decode killed in stream", FAT_TOKENS))
    fat.decode.kill()
    fat.prefill.release()
    prefill.result()
    held = fat.prefill.state().held_block_ids

    time.sleep(LEASE_TTL_S + 1.0)
    fat.flush(fat.prefill)

    assert (FAT_TOKENS // BLOCK, ()) == (len(held), fat.prefill.state().held_block_ids)
