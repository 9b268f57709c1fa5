"""Real API servers behind our proxy and behind an unmodified router: what only a server can show.

Answers are compared with those of the plain engine, token by token. Decode serves shorter requests than prefill, so that
it rejects some that prefill accepted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_mooncake_ascend.cli.servers import PORT, transfer_config
from vllm_mooncake_ascend.testing import cluster, hostile
from vllm_mooncake_ascend.testing.cluster import LocalCluster, Server, ServerSpec
from vllm_mooncake_ascend.testing.engine_messages import Sampling
from vllm_mooncake_ascend.testing.engine_pair import Prompt, Reference, random_prompt
from vllm_mooncake_ascend.testing.http_client import Reply, leave, post

pytestmark = [pytest.mark.engine, pytest.mark.e2e]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "mooncake_ascend:leases_open",
    "mooncake_ascend:blocks_pinned",
    "mooncake_ascend:loads_in_flight",
)
IDLE = dict.fromkeys(GAUGES, 0.0)
LOADS = "mooncake_ascend:loads_done_total"
DECODE_MAX_TOKENS = 1280
ONLY_PREFILL = "only-prefill"
"""A model name that decode does not know."""
SETTLE_S = 10.0
FREED_S = 5.0
"""A release takes milliseconds; the send lease would take longer."""
LEASE_TTL_S = 12.0


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """The servers of these tests, all ready."""

    prefill: Server
    decode: Server
    proxy: Server
    router: Server
    reference: Reference

    def body(self, prompt: Prompt, **options: Any) -> dict[str, Any]:
        """A completion request that can be compared."""
        asked: dict[str, Any] = {"model": "test", "prompt": list(prompt), "max_tokens": 8, "temperature": 0}
        return {**asked, "ignore_eos": True, "return_token_ids": True, **options}

    def flush(self) -> None:
        """One small request to each engine: releases that came in wait for the next one."""
        for server in (self.decode, self.prefill):
            post(server.url, COMPLETIONS, self.body(random_prompt(time.monotonic(), 4), max_tokens=1))

    def unsettled(self, timeout_s: float = SETTLE_S) -> dict[str, dict[str, float]]:
        """Gauges of the engines that are not as at the start once `timeout_s` has passed; {} as soon as all are."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.flush()
            found = {}
            for server in (self.prefill, self.decode):
                samples = cluster.metrics(server)
                found[server.spec.name] = {name: samples.get(name, 0.0) for name in GAUGES if samples.get(name, 0.0)}
            busy = {name: gauges for name, gauges in found.items() if gauges}
            if not busy or time.monotonic() > deadline_s:
                return busy
            time.sleep(0.2)


def _router(prefill: Server, decode: Server, metrics_port: int) -> ServerSpec:
    """vLLM's own router from PyPI, in its ordinary prefill/decode mode."""
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", PORT]
    command += ["--vllm-pd-disaggregation", "--policy", "round_robin", "--prometheus-port", str(metrics_port)]
    command += ["--prefill", prefill.url, "--decode", decode.url]
    return ServerSpec(name="router", role="router", command=tuple(command))


@pytest.fixture(scope="module")
def _serving(reference: Reference, models: Path, logs: Path, free_port: Callable[[], int]) -> Iterator[Serving]:
    small = ("--block-size", "32", "--num-gpu-blocks-override", "256")
    model = models / "tiny-gqa"
    with LocalCluster(logs) as servers:
        lease = ("--kv-transfer-config", transfer_config("prefill", {"lease_ttl_s": LEASE_TTL_S}))
        wider = (*small, *lease, "--served-model-name", "test", ONLY_PREFILL)
        prefill = servers.start(cluster.engine_spec("server-prefill", "prefill", model, arguments=wider))
        shorter = (*small, "--max-model-len", str(DECODE_MAX_TOKENS))
        decode = servers.start(cluster.engine_spec("server-decode", "decode", model, arguments=shorter))
        servers.wait_ready()
        proxy = servers.start(cluster.proxy_spec(servers))
        router = servers.start(_router(prefill, decode, free_port()))
        servers.wait_ready()
        serving = Serving(prefill=prefill, decode=decode, proxy=proxy, router=router, reference=reference)
        for front in (proxy, router):
            post(front.url, COMPLETIONS, serving.body(random_prompt("first", 40)))
        yield serving


@pytest.fixture
def serving(_serving: Serving) -> Iterator[Serving]:
    """The servers; afterwards golden answers are right and the engines hold nothing."""
    yield _serving
    assert {} == _wrong_golden_answers(_serving)
    assert {} == _serving.unsettled()


def _wrong_golden_answers(serving: Serving) -> dict[int, Any]:
    seed = time.monotonic()
    prompts = [random_prompt(seed, length) for length in (5, 33, 300, 700)]
    return _wrong_answers(serving, serving.proxy, prompts)


def _wrong_answers(serving: Serving, front: Server, prompts: list[Prompt]) -> dict[int, Any]:
    wrong = {}
    for prompt in prompts:
        reply = post(front.url, COMPLETIONS, serving.body(prompt))
        if (reply.status, [serving.reference.text(prompt, Sampling()).token_ids]) != (200, _tokens(reply)):
            wrong[len(prompt)] = (reply.status, reply.body)
    return wrong


def _tokens(reply: Reply) -> Any:
    return reply.token_ids() if reply.status == 200 else None


@pytest.mark.parametrize("front", ["proxy", "router"])
def test_answers_behind_a_front_are_right_and_loaded(serving: Serving, front: str) -> None:
    """Goal: our proxy, and vLLM's router as it is, serve our engines. Method: prompts around block edges, streamless; every
    one of them must have been loaded by decode."""
    prompts = [random_prompt(f"behind {front}", length) for length in (31, 32, 33, 300, 513, 1100)]
    before = cluster.metrics(serving.decode).get(LOADS, 0.0)

    assert {} == _wrong_answers(serving, getattr(serving, front), prompts)
    assert len(prompts) == cluster.metrics(serving.decode)[LOADS] - before


@pytest.mark.parametrize("front", ["proxy", "router"])
def test_prompt_lists_and_several_answers_are_right(serving: Serving, front: str) -> None:
    """Goal: vLLM copies one kv_transfer_params to all prompts of a list and all n answers; none gets another prompt's KV.

    Method: a list of three prompts, then two answers to one. A router shows prefill's response for one of them only; nobody
    knows the others' transfers, so that they end with their send lease.
    """
    url = getattr(serving, front).url
    prompts = [random_prompt(f"list behind {front} {index}", 200) for index in range(3)]
    listed = post(url, COMPLETIONS, {**serving.body(()), "prompt": [list(prompt) for prompt in prompts]})
    several = post(url, COMPLETIONS, serving.body(prompts[0], n=2, temperature=1, top_k=1))

    expected = [serving.reference.text(prompt, Sampling()).token_ids for prompt in prompts]
    assert (expected, [expected[0]] * 2) == (_tokens(listed), _tokens(several))
    assert {} == serving.unsettled(FREED_S if front == "proxy" else LEASE_TTL_S + FREED_S)


def test_batch_chat_and_plain_chat_agree_with_the_engine_alone(serving: Serving) -> None:
    """Goal: chat, whose template each engine applies itself, is answered right. Method: through the proxy and by prefill
    alone, one answer and several."""
    messages = [{"role": "user", "content": "Tell me of the sea, and of the ships on it. " * 20}]
    body = {"model": "test", "messages": messages, "max_tokens": 12, "temperature": 0}
    several = {**body, "n": 2, "temperature": 1, "top_k": 1}

    answers = [
        [choice["message"]["content"] for choice in post(server.url, CHAT, asked).body["choices"]]
        for server in (serving.prefill, serving.proxy)
        for asked in (body, several)
    ]

    assert answers[:2] == answers[2:]


def test_requests_that_decode_rejects_show_its_error_and_free_prefill(serving: Serving) -> None:
    """Goal: the client gets decode's own 4xx, never an empty 200, and prefill is free within seconds (user case R02).

    Method: prompts that only prefill has room for, a model name that only prefill knows, and nothing to answer; streamed and
    not, ten at once. Decode asked directly must say the same.
    """
    bodies = [serving.body(random_prompt(f"too long {index}", 2000), stream=bool(index % 2)) for index in range(10)]
    for index in range(4):
        prompt = random_prompt(f"rejected {index}", 900)
        bodies.append(serving.body(prompt, model=ONLY_PREFILL, stream=bool(index % 2)))
        bodies.append(serving.body(prompt, max_tokens=0, stream=bool(index % 2)))

    with ThreadPoolExecutor(10) as clients:
        replies = list(clients.map(lambda body: post(serving.proxy.url, COMPLETIONS, body), bodies))
        of_decode = list(clients.map(lambda body: post(serving.decode.url, COMPLETIONS, body), bodies))

    assert of_decode == replies
    assert {400, 404} == {reply.status for reply in replies}
    assert {} == serving.unsettled(FREED_S)


@pytest.mark.parametrize("after_s", [0.01, 0.05, 0.1, 0.2, 0.4, None])
def test_clients_that_leave_free_both_engines(serving: Serving, after_s: float | None) -> None:
    """Goal: whenever clients leave, prefill and decode are free within seconds (user case R01). Method: eight requests at
    once whose connections are closed after some time, or at the first event of the answer; and a ninth that stays."""
    prompts = [random_prompt(f"leaves after {after_s} {index}", 1024) for index in range(8)]
    bodies = [serving.body(prompt, max_tokens=64, stream=True) for prompt in prompts]
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda body: leave(serving.proxy.url, COMPLETIONS, body, after_s=after_s), bodies))
    stays = random_prompt(f"stays {after_s}", 1024)

    reply = post(serving.proxy.url, COMPLETIONS, serving.body(stays))

    assert [serving.reference.text(stays, Sampling()).token_ids] == _tokens(reply)
    assert {} == serving.unsettled(FREED_S)


def test_hostile_params_over_http_harm_no_engine(serving: Serving) -> None:
    """Goal: whatever a client sends, an engine answers right or refuses the request. Method: every hostile body straight to
    decode's server, and through the proxy, which takes client-supplied params away."""
    prompt = random_prompt("hostile over http", 64)
    genuine = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "made up",
        "remote_incarnation": "made up",
        "remote_host": "127.0.0.1",
        "remote_port": serving.prefill.port,
        "remote_num_tokens": len(prompt),
        "remote_prompt_digest": "",
        "issued_at_s": 1,
    }
    bodies = {name: serving.body(prompt, kv_transfer_params=body) for name, body in hostile.hostile_params(genuine).items()}
    expected = [serving.reference.text(prompt, Sampling()).token_ids]

    wrong = {}
    with ThreadPoolExecutor(16) as clients:
        for front in (serving.decode, serving.proxy):
            replies = clients.map(lambda body, url=front.url: post(url, COMPLETIONS, body), bodies.values())
            for name, reply in zip(bodies, replies, strict=True):
                if reply.status == 200 and _tokens(reply) != expected:
                    wrong[f"{front.spec.name}: {name}"] = (reply.status, reply.body)

    assert {} == wrong
