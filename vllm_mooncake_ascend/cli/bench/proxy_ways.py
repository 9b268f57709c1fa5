"""The ways of `bench proxy` to a completion: what stands before the doubles of vLLM, and in which process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from vllm_mooncake_ascend.cli import processes, servers
from vllm_mooncake_ascend.cli.bench import partner, proxy_router
from vllm_mooncake_ascend.cli.bench.peers_install import PeerMissing
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, Server, ServerFailed

LOGS = Path("build/bench/logs")
DIRECT, BOTH_LEGS = "no proxy", "no proxy, both legs"
SEQUENTIAL, CONCURRENT = "ours, sequential", "ours, concurrent"
ROUTER = proxy_router.NAME
UPSTREAMS = "vllm_mooncake_ascend.testing.fake_upstream_process"


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to a completion."""

    subject: str
    url: str
    kind: Literal["one leg", "both legs"] = "one leg"
    """Whether the client asks prefill itself."""
    pid: int | None = None
    """The proxy's process, None: there is no proxy."""


class Upstreams(msgspec.Struct, frozen=True, kw_only=True):
    """The doubles' URLs."""

    prefill: str
    decode: str


@contextlib.contextmanager
def upstreams(num_events: int) -> Iterator[Upstreams]:
    """A process with a double of a prefill and of a decode engine, from its start to its end.

    Raises:
        PartnerFailed: it ended, or said nothing.
    """
    with partner.running([sys.executable, "-m", UPSTREAMS, "--num-events", str(num_events)]) as line:
        yield msgspec.json.decode(line, type=Upstreams)


@contextlib.contextmanager
def ways(served: Upstreams, *, with_router: bool) -> Iterator[tuple[list[Way], list[str]]]:
    """All ways that there are here, and what is to be told of those that are not.

    Raises:
        ServerFailed: our own proxy does not run.
    """
    found = [
        Way(subject=DIRECT, url=served.decode),
        Way(subject=BOTH_LEGS, url=served.decode, kind="both legs"),
    ]
    notes: list[str] = []
    with processes.termination_as_interrupt(), contextlib.ExitStack() as running:
        cluster = running.enter_context(LocalCluster(LOGS))
        for subject, flow in ((SEQUENTIAL, "sequential"), (CONCURRENT, "concurrent")):
            spec = servers.proxy([served.prefill], [served.decode], arguments=("--flow", flow))
            found.append(_way(subject, cluster.start(msgspec.structs.replace(spec, name=f"proxy-{flow}"))))
        cluster.wait_ready()
        if with_router:
            router, text = _router(running, served)
            found += [router] if router is not None else []
            notes.append(text)
        yield found, notes


def _router(running: contextlib.ExitStack, served: Upstreams) -> tuple[Way | None, str]:
    """The router if it runs here, and what is to be told of it."""
    try:
        command = proxy_router.install()
        cluster = running.enter_context(LocalCluster(LOGS))
        server = cluster.start(proxy_router.server(command, served.prefill, served.decode))
        cluster.wait_ready(timeout_s=partner.START_S)
    except (PeerMissing, ServerFailed) as error:
        return None, f"{ROUTER} {proxy_router.VERSION} is left out: {error}"
    text = f"{ROUTER} {proxy_router.VERSION} from PyPI, `--vllm-pd-disaggregation --policy round_robin`, all else as shipped."
    return _way(ROUTER, server), text


def _way(subject: str, server: Server) -> Way:
    return Way(subject=subject, url=server.url, pid=server.child.pid)
