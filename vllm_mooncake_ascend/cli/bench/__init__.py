"""`bench`: measures what can be measured on this machine, with the figure it must be compared with in the same run.

    waiting    CPU that a decode engine burns while a request waits for remote KV
    micro      CPU of single steps: planner, lookups, messages, scheduler hooks
    transfer   bytes a second between two processes: ours, raw Mooncake, memcpy, a socket
    pool       puts, gets and lookups of the prefix pool beside Mooncake's own client
    hits       time to first token of pool hits with real engines, beside vLLM's own store connector
    pd         prefill and decode on two engines, beside one plain engine and peers
    scale      CPU, messages and actions of a request in our machines, as prompts, concurrency and engines grow
    proxy      requests a second, added latency and CPU of our proxy, beside none and vllm-router
    all        those above but `waiting`, one after the other, with plots and one page of tables
    page       reports of earlier runs as a page of the documentation

What they share: `run` (one run), `rounds` (samples in turns, each round in an order of its own), `foreign_cpu` (noise),
`samples` (medians, intervals, what the noise swallows), `report` (values, JSON), `tables`, `plot`.
"""

from __future__ import annotations

import typer

from vllm_mooncake_ascend.cli.bench.everything import everything
from vllm_mooncake_ascend.cli.bench.hits import hits
from vllm_mooncake_ascend.cli.bench.micro import micro
from vllm_mooncake_ascend.cli.bench.page import page
from vllm_mooncake_ascend.cli.bench.pd import pd
from vllm_mooncake_ascend.cli.bench.pool import pool
from vllm_mooncake_ascend.cli.bench.proxy import proxy
from vllm_mooncake_ascend.cli.bench.scale import scale
from vllm_mooncake_ascend.cli.bench.transfer import transfer
from vllm_mooncake_ascend.cli.bench.waiting import waiting


def register(app: typer.Typer) -> None:
    """Add `bench` with its measurements to the command line."""
    bench = typer.Typer(help="Measure, with something to compare with in the same run.", no_args_is_help=True)
    for measurement in (waiting, micro, transfer, pool, hits, pd, scale, proxy, page):
        bench.command()(measurement)
    bench.command("all")(everything)
    app.add_typer(bench, name="bench")
