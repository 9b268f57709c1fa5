"""Engines that die, freeze or come back in the middle of a transfer. A fat model makes transfers last long enough.

User case R04 and its kin. The answer must be right, within its bound, and the survivor as it was.
"""

from __future__ import annotations

import time

import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.testing.engine_pair import EnginePair, Prompt, random_prompt
from vllm_mooncake_ascend.testing.engine_process import Running

pytestmark = pytest.mark.engine

FAT_TOKENS = 1024
"""256 MiB of KV: four engine calls, each of some tens of milliseconds."""
LEASE_TTL_S = 2.0
"""As the fat prefill engine is started with."""
RECOMPUTE_S = 60.0
"""Far more than computing such a prompt takes here, far less than any wait without a bound."""
CALLS_DONE = "engine_calls_total{outcome=done}"
LATE_BYTES_S = 3.0
"""What a thawed peer still has to say is in its socket's buffers, and comes within milliseconds."""


def _start_reading(pair: EnginePair, prompt: Prompt, num_calls: int = 1) -> Running:
    """A decode request that is in the middle of its transfer: the first engine call is done, the others are not."""
    params = pair.prefill_leg(prompt)
    before = pair.decode.metric(CALLS_DONE)
    running = pair.decode.submit(prompt, params=params)
    pair.decode.wait_until(lambda: pair.decode.metric(CALLS_DONE) - before >= num_calls, f"{num_calls} engine calls")
    assert not running.answer.text.token_ids, "the transfer is over already: it must last longer to be hit"
    return running


def test_prefill_killed_in_mid_transfer(fat: EnginePair) -> None:
    """Goal: decode notices, computes the prompts itself and lives; params of a dead engine cost a request seconds, not its
    answer. Method: SIGKILL after the first engine call, and a request that comes only then."""
    reading, late = (random_prompt(f"killed {index}", FAT_TOKENS) for index in range(2))
    expected = [fat.expected(reading), fat.expected(late)]
    late_params = fat.prefill_leg(late)
    running = _start_reading(fat, reading)

    fat.prefill.kill()
    first = running.result(timeout_s=RECOMPUTE_S).text
    started_s = time.monotonic()
    second = fat.decode_leg(late, late_params).text

    assert expected == [first, second]
    assert time.monotonic() - started_s < limits.PEER_ANSWER_S + RECOMPUTE_S / 4


def test_prefill_killed_while_decode_waits_for_it(fat: EnginePair) -> None:
    """Goal: a prefill that will never end is not waited for. Method: SIGKILL after its first chunk, decode waiting."""
    prompt = random_prompt("killed in prefill", FAT_TOKENS)
    expected = fat.expected(prompt)
    params = fat.early_params("killed in prefill")
    fat.prefill.hold()
    fat.start_prefill(prompt, transfer_id="killed in prefill")
    fat.prefill.step(1)
    running = fat.decode.submit(prompt, params=params)

    fat.prefill.kill()

    assert expected == running.result(timeout_s=RECOMPUTE_S).text


def test_prefill_restarted_on_its_ports_with_requests_in_flight(fat: EnginePair) -> None:
    """Goal: nothing of the old engine is taken from the new one. Method: one request in mid-transfer, one set of params
    kept back, the side channel's port fixed; after the restart both get right answers, and a new transfer loads."""
    in_flight, stale = (random_prompt(f"restart {index}", FAT_TOKENS) for index in range(2))
    expected = [fat.expected(in_flight), fat.expected(stale)]
    stale_params = fat.prefill_leg(stale)
    running = _start_reading(fat, in_flight)

    fat.prefill.restart()
    fat.prefill.wait_ready()
    texts = [running.result(timeout_s=RECOMPUTE_S).text, fat.decode_leg(stale, stale_params).text]

    assert expected == texts
    assert {} == fat.wrong_answers([random_prompt("after restart", 600)])
    fat.remember(fat.prefill)


def test_prefill_frozen_in_mid_transfer_and_thawed_late(fat: EnginePair) -> None:
    """Goal: a late byte never reaches a live block. Method: SIGSTOP after the first call; decode computes by itself and its
    cache is filled with other prompts; then SIGCONT, and no cached block may have changed."""
    prompt = random_prompt("frozen", FAT_TOKENS)
    others = [random_prompt(f"beside frozen {index}", 900) for index in range(2)]
    expected = [fat.expected(known) for known in (prompt, *others)]
    running = _start_reading(fat, prompt)
    fat.prefill.freeze()
    first = running.result(timeout_s=RECOMPUTE_S).text
    for other in others:
        fat.decode.submit(other).result()
    before = fat.decode.digests(fat.decode.state().cached_block_ids)

    fat.prefill.thaw()
    time.sleep(LATE_BYTES_S)

    assert before == fat.decode.digests(list(before))
    again = [fat.decode.submit(known).result().text for known in (prompt, *others)]
    assert [expected[0], expected] == [first, again]


def test_prefill_frozen_before_decode_asks_and_thawed_late(fat: EnginePair) -> None:
    """Goal: a silent prefill is given up in time and may come back. Method: SIGSTOP between the legs, SIGCONT after."""
    prompt = random_prompt("frozen before", FAT_TOKENS)
    expected = fat.expected(prompt)
    params = fat.prefill_leg(prompt)
    fat.prefill.freeze()

    answer = fat.decode.submit(prompt, params=params).result(timeout_s=RECOMPUTE_S)
    fat.prefill.thaw()

    assert expected == answer.text


def test_prefill_frozen_shorter_than_any_bound(fat: EnginePair) -> None:
    """Goal: a hiccup costs nothing but its own time. Method: one second of SIGSTOP in mid-transfer."""
    prompt = random_prompt("hiccup", FAT_TOKENS)
    expected = fat.expected(prompt)
    running = _start_reading(fat, prompt)

    fat.prefill.freeze()
    time.sleep(1.0)
    fat.prefill.thaw()

    assert expected == running.result(timeout_s=RECOMPUTE_S).text


def test_decode_killed_in_mid_transfer(fat: EnginePair) -> None:
    """Goal: prefill frees what a dead decode engine read, within the send lease's time. Method: SIGKILL decode after its
    first call, wait that time, give prefill a request (an idle engine runs no hook)."""
    _start_reading(fat, random_prompt("decode killed", FAT_TOKENS))
    fat.decode.kill()
    fat.flush(fat.prefill)
    held = fat.prefill.state().held_block_ids

    time.sleep(LEASE_TTL_S + 1.0)
    fat.flush(fat.prefill)

    assert (FAT_TOKENS // 32, ()) == (len(held), fat.prefill.state().held_block_ids)


def test_client_leaves_in_mid_transfer(fat: EnginePair) -> None:
    """Goal: an abort in mid-read frees both engines, decode only when nothing can land any more. Method: abort after the
    first call, then use decode's whole cache."""
    running = _start_reading(fat, random_prompt("leaves in transfer", FAT_TOKENS))
    others = [random_prompt(f"after leaving {index}", 1000) for index in range(3)]

    running.abort()

    assert {} == fat.wrong_answers(others)


def test_prefill_resets_its_cache_in_mid_transfer(fat: EnginePair) -> None:
    """Goal: a read whose blocks were given up under way is not believed. Method: reset after the first call; prefill then
    overwrites the blocks before decode's read has ended."""
    prompt = random_prompt("reset in transfer", FAT_TOKENS)
    expected = fat.expected(prompt)
    running = _start_reading(fat, prompt)

    fat.prefill.reset_cache(reset_connector=True)
    fat.prefill.poison(range(1, fat.prefill.state().num_blocks + 1))

    assert expected == running.result(timeout_s=RECOMPUTE_S).text
    fat.flush(fat.prefill)
    assert fat.prefill.reset_cache(reset_connector=True), "the spoiled blocks must leave the prefix cache"


def test_a_transfer_longer_than_the_lease_is_renewed(fat: EnginePair) -> None:
    """Goal: a decode engine that is slow, not dead, keeps its lease. Method: decode takes no step for twice the lease's time
    after it got the request."""
    prompt = random_prompt("slow decode", FAT_TOKENS)
    params = fat.prefill_leg(prompt)
    before = fat.decode.metric("loads_done_total{reason=held}")
    fat.decode.hold()
    running = fat.decode.submit(prompt, params=params)

    time.sleep(2 * LEASE_TTL_S)
    fat.flush(fat.prefill)
    fat.decode.release()

    assert fat.expected(prompt) == running.result().text
    assert 1 == fat.decode.metric("loads_done_total{reason=held}") - before
