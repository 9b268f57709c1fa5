"""What the proxy itself answers: refusals at the door, readiness, metrics, start and stop."""

from __future__ import annotations

import asyncio
import gzip
import io
from typing import Any

import aiohttp
import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.proxy.app import ProxyServer
from vllm_mooncake_ascend.proxy.settings import ProxySettings
from vllm_mooncake_ascend.testing.fake_upstream import RecordingSender, Script


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
async def test_what_is_no_json_object_is_refused_in_json(bench: Any, body: bytes) -> None:
    """Goal: no engine sees it, and the client is told. Method: several bodies that are none."""
    async with bench() as rig:
        async with rig.client.post("/v1/completions", data=body) as response:
            answer = await response.json()

        assert (400, 400, []) == (response.status, answer["error"]["code"], rig.prefill.seen)


async def test_a_body_over_the_limit_is_refused(bench: Any) -> None:
    """Goal: memory is bounded. Method: a declared and sent body one byte too large."""
    async with bench() as rig:
        async with rig.client.post("/v1/completions", data=io.BytesIO(bytes(limits.MAX_BODY_BYTES + 1))) as response:
            answer = await response.json()

        assert (413, 413) == (response.status, answer["error"]["code"])


async def test_a_body_that_is_not_what_its_headers_say_is_refused(bench: Any) -> None:
    """Goal: a broken encoding is the client's fault, told in JSON. Method: text that is announced as gzip."""
    async with bench() as rig:
        headers = {"Content-Encoding": "gzip"}
        async with rig.client.post("/v1/completions", data=b"no gzip at all", headers=headers) as response:
            answer = await response.json()

        assert (400, 400) == (response.status, answer["error"]["code"])


async def test_a_compressed_body_is_bounded_by_what_it_becomes(bench: Any) -> None:
    """Goal: a small body cannot fill the memory. Method: more zeros than a body may have, compressed."""
    async with bench() as rig:
        packed = gzip.compress(bytes(limits.MAX_BODY_BYTES + 1), compresslevel=1)
        async with rig.client.post("/v1/completions", data=packed, headers={"Content-Encoding": "gzip"}) as response:
            answer = await response.json()

        assert (413, 413) == (response.status, answer["error"]["code"])


async def test_a_client_that_leaves_in_its_own_request_is_counted(bench: Any) -> None:
    """Goal: half a request leaves nothing. Method: a raw connection that announces more than it sends, and closes."""
    async with bench() as rig:
        host, port = rig.proxy.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        while not rig.value("requests_in_flight"):
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()
        while rig.value("requests_in_flight"):
            await asyncio.sleep(0)

        assert 1 == rig.value("requests_total", endpoint="/v1/completions", status="client_left", pd_mode="none")


async def test_an_unknown_path_is_told_what_is_served(bench: Any) -> None:
    """Goal: a wrong path is understood at once. Method: embeddings are not served."""
    async with bench() as rig:
        status, answer = await rig.post("/v1/embeddings", input="x")

        assert 404 == status
        assert "/v1/chat/completions" in answer["error"]["message"]


async def test_a_wrong_method_is_told_the_right_one(bench: Any) -> None:
    """Goal: the same for methods. Method: GET on a generation."""
    async with bench() as rig, rig.client.get("/v1/completions") as response:
        assert (405, "POST") == (response.status, response.headers["Allow"])


async def test_health_says_that_the_proxy_lives(bench: Any) -> None:
    """Goal: liveness does not depend on engines. Method: with every instance gone."""
    async with bench() as rig:
        await rig.prefill.stop()
        await rig.decode.stop()
        async with rig.client.get("/health") as response:
            assert 200 == response.status


@pytest.mark.parametrize("role", ["prefills", "decodes"])
async def test_ready_needs_both_roles(bench: Any, role: str) -> None:
    """Goal: no traffic before a request can be served. Method: 200; then the one instance of a role says 503; then well."""
    async with bench() as rig:
        statuses = []
        for is_well in (True, False, True):
            getattr(rig, role)[0].is_well = is_well
            async with rig.client.get("/ready") as response:
                statuses.append(response.status)

        assert [200, 503, 200] == statuses


async def test_ready_is_one_instance_of_each_role(bench: Any) -> None:
    """Goal: a single dead instance does not take the service down. Method: one of two of each role is gone."""
    async with bench(num_prefills=2, num_decodes=2) as rig:
        await rig.prefill.stop()
        await rig.decode.stop()
        async with rig.client.get("/ready") as response:
            answer = await response.json()

        assert (200, {"prefill": 1, "decode": 1}) == (response.status, answer["well_instances"])


async def test_an_instance_that_fails_its_probe_gets_no_request(bench: Any) -> None:
    """Goal: a dead engine behind a living API server is seen. Method: /health says 503; the other serves all."""
    async with bench(num_decodes=2) as rig:
        rig.decode.is_well = False
        async with rig.client.get("/ready"):
            pass
        for _ in range(2):
            await rig.post()

        assert ([], 2) == (rig.decode.generations, len(rig.decodes[1].generations))


async def test_metrics_are_text_for_prometheus(bench: Any) -> None:
    """Goal: it can be scraped. Method: after a request its counter is there."""
    async with bench() as rig:
        await rig.post()
        async with rig.client.get("/metrics") as response:
            text = await response.text()

        assert 'mooncake_ascend_proxy_requests_total{endpoint="/v1/completions",pd_mode="remote",status="200"} 1.0' in text


async def test_requests_over_the_limit_are_refused(bench: Any) -> None:
    """Goal: overload is told, not queued. Method: the bound set to one, one request held, a second sent."""
    async with bench(max_requests=1) as rig:
        gate = asyncio.Event()
        rig.decode.scripts.append(Script(head_gate=gate))
        first = asyncio.create_task(rig.post())
        await rig.decode.arrived.wait()
        refused, _ = await rig.post()
        gate.set()

        assert (503, 200) == (refused, (await first)[0])


async def test_stopping_lets_running_requests_end(bench: Any) -> None:
    """Goal: a rollout loses no answer. Method: stop while decode holds; readiness is gone, the answer still comes."""
    async with bench() as rig:
        gate = asyncio.Event()
        rig.decode.scripts.append(Script(head_gate=gate))
        request = asyncio.create_task(rig.post())
        await rig.decode.arrived.wait()
        stopping = asyncio.create_task(rig.proxy.stop())
        gate.set()

        assert 200 == (await request)[0]
        await stopping
        with pytest.raises(aiohttp.ClientConnectorError):
            await rig.post()


async def test_stopping_cancels_what_does_not_end_and_releases_it(bench: Any) -> None:
    """Goal: the end is bounded and leaves nothing pinned. Method: decode never answers; a very short drain."""
    async with bench(drain_s=0.05) as rig:
        rig.decode.scripts.append(Script(head_gate=asyncio.Event()))
        request = asyncio.create_task(rig.post())
        await rig.decode.arrived.wait()
        await rig.proxy.stop()
        await asyncio.gather(request, return_exceptions=True)

        assert 1 == len(rig.sender.released)


async def test_a_port_in_use_is_named(bench: Any) -> None:
    """Goal: the operator knows what to change. Method: a second proxy on the port of the first."""
    async with bench() as rig:
        port = int(rig.proxy.url.rpartition(":")[2])
        settings = ProxySettings(prefill_urls=("http://x:1",), decode_urls=("http://y:1",), host="127.0.0.1", port=port)
        with pytest.raises(ConfigError, match=str(port)):
            await ProxyServer(settings, RecordingSender()).start(probe_interval_s=None)


async def test_ipv6_instances_are_reached(bench: Any) -> None:
    """Goal: IPv6 URLs work on both sides. Method: everything on ::1."""
    async with bench(host="::1") as rig:
        assert rig.proxy.url.startswith("http://[::1]:")
        assert 200 == (await rig.post())[0]
