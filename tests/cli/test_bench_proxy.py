"""cli.bench.proxy: what is asked, what is compared, and the command itself with tiny loads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import msgspec
import pytest
from typer.testing import CliRunner

from vllm_mooncake_ascend.cli import main
from vllm_mooncake_ascend.cli.bench import peers_install, proxy_load, proxy_rounds, proxy_router, proxy_ways
from vllm_mooncake_ascend.cli.bench.report import Report, compared
from vllm_mooncake_ascend.testing.fake_upstream import FakeVllm, Script
from vllm_mooncake_ascend.testing.fake_upstream_process import BusyVllm

OURS = (proxy_ways.SEQUENTIAL, proxy_ways.CONCURRENT)


def taken(latency_s: float, *, cpu_s: float | None = None, foreign_cores: float = 0.0) -> proxy_rounds.Taken:
    load = proxy_load.Load(num_requests=4, seconds=2.0, latencies_s=(latency_s,) * 4)
    return proxy_rounds.Taken(load=load, cpu_s=cpu_s, foreign_cores=foreign_cores)


def test_a_round_says_what_a_proxy_adds() -> None:
    """Goal: added latency is the difference within a round, CPU is a request's. Method: made-up loads."""
    direct = proxy_ways.Way(subject=proxy_ways.DIRECT, url="")
    ours = proxy_ways.Way(subject=proxy_ways.SEQUENTIAL, url="", pid=1)
    found = {direct: taken(0.001, foreign_cores=0.3), ours: taken(0.004, cpu_s=0.008)}
    values = {(one.name, one.subject): sample for one, sample in proxy_rounds._values("case", found)}
    assert 3.0 == pytest.approx(values["added latency p50", proxy_ways.SEQUENTIAL].value)
    assert 0.3 == values["added latency p50", proxy_ways.SEQUENTIAL].foreign_cores
    assert 1.0 == pytest.approx(values["latency p99", proxy_ways.DIRECT].value)
    assert 2.0 == pytest.approx(values["CPU of a request", proxy_ways.SEQUENTIAL].value)
    assert 2.0 == pytest.approx(values["requests a second", proxy_ways.DIRECT].value)


def test_ours_is_compared_with_none_and_with_the_router() -> None:
    """Goal: ratios within a case. Method: a round with the router and one without."""
    ways = {name: proxy_ways.Way(subject=name, url="", pid=1) for name in (*OURS, proxy_ways.DIRECT, proxy_ways.ROUTER)}
    samples = {
        one: [sample] for one, sample in proxy_rounds._values("case", {way: taken(0.1, cpu_s=0.1) for way in ways.values()})
    }
    found = {(one.above.name, compared(one.above, one.below)) for one in proxy_rounds.comparisons(samples)}
    rate, cpu = "requests a second", "CPU of a request"
    beside = {(rate, proxy_ways.DIRECT), (rate, proxy_ways.ROUTER), (cpu, proxy_ways.ROUTER)}
    assert {(name, f"{ours} / {other}") for ours in OURS for name, other in beside} == found


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_load_keeps_so_many_under_way(is_streamed: bool) -> None:
    """Goal: the concurrency that is written in the table. Method: hold the first answers until all askers are here."""

    async def held() -> tuple[int, int]:
        async with (
            FakeVllm("decode") as fake,
            proxy_load.Client(fake.url, prompt="p", is_streamed=is_streamed) as client,
        ):
            gate = asyncio.Event()
            fake.scripts.extend(Script(head_gate=gate) for _ in range(3))
            running = asyncio.create_task(proxy_load.run_load(client.ask, num_at_once=3, seconds=0.0))
            while len(fake.seen) < 3:
                fake.arrived.clear()
                await fake.arrived.wait()
            gate.set()
            return (await running).num_requests, len(fake.seen)

    assert (3, 3) == asyncio.run(asyncio.wait_for(held(), 30))


def test_a_client_without_a_proxy_asks_both_legs() -> None:
    """Goal: the same work as a proxy's. Method: what the doubles were asked."""

    async def asked() -> tuple[dict, dict]:
        async with (
            FakeVllm("prefill") as prefill,
            FakeVllm("decode") as decode,
            proxy_load.Client(decode.url, prompt="p", is_streamed=False) as client,
        ):
            await client.ask_both_legs(prefill.url)
            return prefill.seen[0].body, decode.seen[0].body

    prefill, decode = asyncio.run(asyncio.wait_for(asked(), 30))
    assert (1, True) == (prefill["max_tokens"], prefill["kv_transfer_params"]["do_remote_decode"])
    assert prefill["kv_transfer_params"]["transfer_id"] == decode["kv_transfer_params"]["transfer_id"]
    assert decode["kv_transfer_params"]["do_remote_prefill"]


@pytest.mark.parametrize("script", [Script(status=503, body=b"{}"), Script(stream=(b"data: {}\n\n",))])
def test_a_wrong_answer_ends_the_run(script: Script) -> None:
    """Goal: errors are not measured as quick answers. Method: a status, and a stream without its end."""

    async def failing() -> None:
        async with FakeVllm("decode") as fake, proxy_load.Client(fake.url, prompt="p", is_streamed=True) as client:
            fake.scripts.append(script)
            await proxy_load.run_load(client.ask, num_at_once=1, seconds=0.0)

    with pytest.raises(proxy_load.ProxyBenchFailed, match="answered with"):
        asyncio.run(asyncio.wait_for(failing(), 30))


def test_the_doubles_serve_a_router_that_mints_no_id_and_remember_nothing() -> None:
    """Goal: any router, any number of requests. Method: prefill without an id, decode for five tokens."""

    async def asked() -> tuple[str, bytes, int]:
        wish = {"prompt": "p", "kv_transfer_params": {"do_remote_decode": True, "remote_engine_id": None}}
        async with (
            BusyVllm("prefill", num_events=5) as prefill,
            BusyVllm("decode", num_events=5) as decode,
            aiohttp.ClientSession() as client,
        ):
            async with client.post(prefill.url + proxy_load.PATH, json=wish) as response:
                params = (await response.json())["kv_transfer_params"]
            async with client.post(decode.url + proxy_load.PATH, json={"stream": True}) as response:
                return params["transfer_id"], await response.read(), len(prefill.seen) + len(decode.seen)

    transfer_id, events, num_seen = asyncio.run(asyncio.wait_for(asked(), 30))
    assert ("minted", 6, 0) == (transfer_id, events.count(b"data: "), num_seen)


def test_a_router_that_cannot_be_installed_is_told(tmp_path: Path) -> None:
    """Goal: the run goes on without it. Method: a folder that is a file."""
    (tmp_path / "file").write_text("")
    with pytest.raises(peers_install.PeerMissing, match="could not be installed"):
        proxy_router.install(tmp_path / "file" / "environment")


def test_the_command_measures_every_way(tmp_path: Path) -> None:
    """Goal: doubles, both flows of our proxy, and a client, each in its process. Method: one short round of one case."""
    out = tmp_path / "proxy.json"
    words = ["bench", "proxy", "--rounds", "1", "--at-once", "2", "--seconds", "0.01", "--no-router", "--json", str(out)]
    result = CliRunner().invoke(main.build_app(), words)
    assert 0 == result.exit_code, result.output
    made = msgspec.json.decode(out.read_bytes(), type=Report)
    rates = {(one.measure.case, one.measure.subject) for one in made.figures if one.measure.name == "requests a second"}
    everybody = (proxy_ways.DIRECT, proxy_ways.BOTH_LEGS, *OURS)
    assert {(f"2 at once, {how}", who) for how in ("whole", "streamed") for who in everybody} == rates
    assert {*OURS} == {one.measure.subject for one in made.figures if one.measure.name == "CPU of a request"}
    assert all(len(figure.samples) == 1 for figure in made.figures)
