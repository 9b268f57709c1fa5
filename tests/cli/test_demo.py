"""The demo asks, compares, counts and judges. The real thing, with engines, is `make demo`."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from vllm_mooncake_ascend.cli import demo, demo_pool_report, demo_report
from vllm_mooncake_ascend.cli.demo_client import Answer, RequestFailed, ask, new_session, read_metrics
from vllm_mooncake_ascend.cli.demo_pool_report import Loaded, PoolRow, row_of
from vllm_mooncake_ascend.cli.demo_prompts import BATCHES, SCENARIOS, DemoPrompt
from vllm_mooncake_ascend.cli.demo_report import Moved, Report, Row
from vllm_mooncake_ascend.metrics import names

PROMPT = DemoPrompt(name="one", chat=True, stream=False, text="Hello?")
STREAMED = DemoPrompt(name="two", chat=False, stream=True, text="Once")
USAGE = {"prompt_tokens": 7, "completion_tokens": 2}


def ask_server(prompt: DemoPrompt, respond: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Answer:
    """Ask one prompt of a server on loopback that answers by `respond`."""

    async def run() -> Answer:
        app = web.Application()
        app.router.add_post(prompt.path, respond)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with new_session() as session:
                return await ask(session, f"http://127.0.0.1:{runner.addresses[0][1]}", "model", prompt)
        finally:
            await runner.cleanup()

    return asyncio.run(run())


def streaming(*events: object) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def respond(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        return response

    return respond


def test_a_whole_answer_is_read() -> None:
    """A chat answer that is not streamed: its first token is there when all of it is."""

    async def respond(_request: web.Request) -> web.Response:
        choice = {"message": {"content": "Hi!"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": USAGE})

    answer = ask_server(PROMPT, respond)
    assert ("Hi!", "stop", 7, 2) == (answer.text, answer.finish_reason, answer.prompt_tokens, answer.completion_tokens)


def test_a_streamed_answer_is_put_together() -> None:
    """Text in two events, then the usage, then the end mark."""
    events = (
        {"choices": [{"text": ""}]},
        {"choices": [{"text": "upon "}]},
        {"choices": [{"text": "a time", "finish_reason": "length"}]},
        {"choices": [], "usage": USAGE},
        "[DONE]",
    )
    answer = ask_server(STREAMED, streaming(*events))
    assert ("upon a time", "length", True) == (answer.text, answer.finish_reason, answer.ttft_seconds <= answer.seconds)


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        (({"choices": [{"text": "upon"}]},), "incomplete"),
        (({"error": {"message": "engine died"}},), "engine died"),
    ],
)
def test_a_broken_stream_is_an_error(events: tuple[object, ...], complaint: str) -> None:
    """A stream that just ends, and one that tells why."""
    with pytest.raises(RequestFailed, match=complaint):
        ask_server(STREAMED, streaming(*events))


def test_an_error_status_is_an_error() -> None:
    """The server refuses; the message has its words."""

    async def respond(_request: web.Request) -> web.Response:
        return web.Response(status=400, text="too long")

    with pytest.raises(RequestFailed, match="400: too long"):
        ask_server(PROMPT, respond)


def test_metrics_are_summed_over_labels() -> None:
    """Reads a metrics page with one counter in two outcomes."""

    async def run() -> dict[str, float]:
        async def page(_request: web.Request) -> web.Response:
            return web.Response(text='# TYPE reads counter\nreads_total{outcome="done"} 3\nreads_total{outcome="failed"} 1\n')

        app = web.Application()
        app.router.add_get("/metrics", page)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with new_session() as session:
                return await read_metrics(session, f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    assert {"reads_total": 4.0} == asyncio.run(run())


def answer(text: str = "same", *, prompt_tokens: int = 100) -> Answer:
    return Answer(
        text=text, finish_reason="length", prompt_tokens=prompt_tokens, completion_tokens=4, ttft_seconds=0.5, seconds=1.0
    )


def moved(num_bytes: float = 4000.0, *, num_failed: float = 0.0) -> Moved:
    return Moved(num_bytes=num_bytes, seconds=0.002, num_reads=1.0, num_failed=num_failed)


def one_row(**changes: object) -> Row:
    arguments = {"answers": [answer()], "references": [answer()], "moved": moved(), **changes}
    return demo_report.rows_of([PROMPT], **arguments, bytes_per_block=1500)[0]


def pool_row(*, texts: tuple[str, str, str] = ("same",) * 3, num_tokens: int = 256) -> PoolRow:
    cold, local_hit, pool_hit = (answer(text) for text in texts)
    loaded = Loaded(num_tokens=num_tokens, num_bytes=num_tokens * 10, seconds=0.01)
    return row_of(SCENARIOS[0], cold, local_hit, pool_hit, loaded, bytes_put=5_000)


def report(*rows: Row, pool: tuple[PoolRow, ...] | None = None) -> Report:
    pooled = (pool_row(),) if pool is None else pool
    return demo.report_of(rows, pooled, model=Path("model"), dtype="float32", seconds=1.0)


def test_a_good_run_is_good() -> None:
    """Equal answers and KV that moved."""
    assert report(one_row()).ok


@pytest.mark.parametrize(
    "row",
    [one_row(answers=[answer("other")]), one_row(moved=moved(0.0)), one_row(moved=moved(num_failed=1.0))],
    ids=["answer differs", "nothing moved", "a load failed"],
)
def test_a_bad_row_spoils_the_run(row: Row) -> None:
    """Each of the three ways in which a request can go wrong, after a good one."""
    assert not report(one_row(), row).ok


@pytest.mark.parametrize(
    "row",
    [pool_row(texts=("same", "same", "other")), pool_row(texts=("same", "other", "same")), pool_row(num_tokens=0)],
    ids=["pool hit differs", "local hit differs", "nothing loaded"],
)
def test_a_bad_pool_row_spoils_the_run(row: PoolRow) -> None:
    """Each of the ways in which sharing a prefix can go wrong, after a good one."""
    assert not report(one_row(), pool=(pool_row(), row)).ok


def test_an_empty_run_is_not_good() -> None:
    """Nothing shown is nothing proven, in either part."""
    assert [False, False] == [report().ok, report(one_row(), pool=()).ok]


def test_what_was_loaded_is_what_counters_gained() -> None:
    """Tokens, bytes and seconds of gets, by the names the engines publish."""
    before = {demo_pool_report.TOKENS_LOADED: 128.0}
    after = {
        demo_pool_report.TOKENS_LOADED: 640.0,
        demo_pool_report.BYTES_GOT: 4_096.0,
        demo_pool_report.SECONDS_GETTING: 0.25,
    }
    assert Loaded(num_tokens=512, num_bytes=4_096, seconds=0.25) == Loaded.between(before, after)
    published = {metric.name for metric in names.METRICS}
    wanted = (demo_pool_report.TOKENS_LOADED, demo_pool_report.BYTES_GOT, demo_pool_report.SECONDS_GETTING.removesuffix("_sum"))
    assert set() == {name.removeprefix(names.PREFIX) for name in wanted} - published


def test_a_chat_grows_by_its_answers() -> None:
    """Turn by turn: each prompt begins with all messages of the one before, so that its prefix can be in the pool."""
    (chat,) = [scenario for scenario in SCENARIOS if len(scenario.turns) > 2]
    prompts = [chat.prompt(turn, ("yes",) * turn).messages for turn in range(len(chat.turns))]
    assert [True] * 3 == [later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(prompts)]


def test_a_shared_system_prompt_is_all_that_is_shared() -> None:
    """Questions of other users are no part of the prompt."""
    (shared,) = [scenario for scenario in SCENARIOS if not scenario.is_one_chat]
    first, second = (shared.prompt(turn, ("yes",) * turn).messages for turn in range(2))
    assert ([2, 2], True, False) == ([len(first), len(second)], first[0] == second[0], first[1] == second[1])


def test_a_salt_is_sent_only_where_there_is_one() -> None:
    """The salt keeps every cache away from the cold prompt."""
    prompt = SCENARIOS[0].prompt(0, ())
    assert (None, "mine") == (prompt.body("model").get("cache_salt"), prompt.salted("mine").body("model")["cache_salt"])


def test_a_batch_shares_what_moved_by_tokens() -> None:
    """Two requests at once, one with three times the tokens of the other."""
    answers = [answer(prompt_tokens=100), answer(prompt_tokens=300)]
    rows = demo_report.rows_of([PROMPT, STREAMED], answers, answers, moved(), 1500)
    assert [(1000, 1, 2), (3000, 2, 2)] == [(row.kv_bytes_moved, row.kv_blocks_moved, row.at_once) for row in rows]


def test_growth_is_what_counters_gained() -> None:
    """A counter that is not there yet counts as zero."""
    before = {demo_report.BYTES_READ: 10.0}
    after = {demo_report.BYTES_READ: 30.0, demo_report.READS: 2.0}
    assert Moved(num_bytes=20.0, seconds=0.0, num_reads=2.0, num_failed=0.0) == Moved.between(before, after)


def test_block_bytes_of_a_known_model() -> None:
    """SmolLM2-135M in float32: 30 layers x K and V x 3 heads x 64 x 4 bytes x 128 tokens."""
    config = {"num_hidden_layers": 30, "num_key_value_heads": 3, "num_attention_heads": 9, "head_dim": 64}
    assert 5_898_240 == demo_report.block_bytes(config, dtype="float32", block_size=128)


def test_the_report_has_the_promised_keys(tmp_path: Path) -> None:
    """Writes a report and reads it as a script would."""
    demo_report.write_json(report(one_row()), tmp_path / "demo" / "report.json")
    read = json.loads((tmp_path / "demo" / "report.json").read_text())
    promised = {"vllm", "mooncake", "model", "all_equal", "requests", "pool"}
    of_request = {
        *("prompt_tokens", "stream", "equal", "kv_bytes_moved"),
        *("transfer_seconds", "ttft_seconds", "ttft_colocated_seconds"),
    }
    of_pool = {
        *("prompt_tokens", "hit_tokens", "equal", "get_seconds", "bytes"),
        *("ttft_cold_seconds", "ttft_local_hit_seconds", "ttft_pool_hit_seconds"),
    }
    assert (True, True) == (promised <= read.keys(), of_request <= read["requests"][0].keys())
    assert set() == of_pool - read["pool"][0].keys()


def test_the_table_says_what_differs() -> None:
    """Prints a report with one wrong answer."""
    console = Console(width=demo.TABLE_WIDTH)
    with console.capture() as capture:
        console.print(demo_report.table_of(report(one_row(), one_row(answers=[answer("other [words]")]))))
    assert ("NO" in capture.get(), "other (words]" in capture.get()) == (True, True)
    with console.capture() as capture:
        console.print(demo_pool_report.table_of([pool_row(), pool_row(texts=("one", "two", "three"))]))
    assert [True, True] == [word in capture.get() for word in ("yes", "NO")]


def test_the_prompts_are_ten_and_share_no_block() -> None:
    """No two prompts begin alike for as long as a block of 128 tokens can be, or decode would find it in its own cache."""
    texts = [prompt.text[:300] for batch in BATCHES for prompt in batch]
    assert (10, 10) == (len(texts), len(set(texts)))
