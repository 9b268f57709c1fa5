"""Shows on the console how a set of servers comes up: one live table on a terminal, one line per change elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table

from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, Server


@contextlib.contextmanager
def progress(console: Console, cluster: LocalCluster) -> Iterator[Callable[[], None]]:
    """Gives the function to call after each look at the cluster (see `LocalCluster.wait_ready`)."""
    if not console.is_terminal:
        yield _Lines(console, cluster).show
        return
    with Live(server_table(cluster), console=console, transient=True, auto_refresh=False) as live:
        yield lambda: live.update(server_table(cluster), refresh=True)


class _Lines:
    """One printed line whenever a server has become ready."""

    def __init__(self, console: Console, cluster: LocalCluster) -> None:
        self._console = console
        self._cluster = cluster
        self._told = {server.spec.name for server in cluster.servers if server.ready_after_s is not None}

    def show(self) -> None:
        for server in self._cluster.servers:
            if server.ready_after_s is not None and server.spec.name not in self._told:
                self._told.add(server.spec.name)
                self._console.print(f"{server.spec.name} is ready at {server.url} after {server.ready_after_s:.0f} s")


def server_table(cluster: LocalCluster) -> Table:
    """All servers with their state."""
    table = Table()
    for heading in ("server", "URL", "state"):
        table.add_column(heading, no_wrap=True)
    table.add_column("log", overflow="fold")
    for server in cluster.servers:
        table.add_row(server.spec.name, server.url, _state(server), str(server.child.log_path))
    return table


def _state(server: Server) -> str:
    if server.ready_after_s is None:
        return f"[yellow]starting, {server.seconds():.0f} s[/yellow]"
    return f"[green]ready after {server.ready_after_s:.0f} s[/green]"
