"""A set of servers comes up together, tells why it does not, and leaves nothing behind. Plain file servers stand for vLLM."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.cli import processes, servers
from vllm_mooncake_ascend.cli.local_cluster import LocalCluster, Server, ServerFailed
from vllm_mooncake_ascend.cli.servers import PORT, ServerSpec
from vllm_mooncake_ascend.testing import cluster as harm


def file_server(folder: Path, name: str = "files", *, healthy: bool = True) -> ServerSpec:
    """A server that answers /health with 200 if `healthy`, else with 404."""
    root = folder / f"root-{name}"
    root.mkdir()
    if healthy:
        (root / "health").write_text("well")
    command = (sys.executable, "-u", "-m", "http.server", PORT, "--bind", "127.0.0.1", "--directory", str(root))
    return ServerSpec(name=name, role="reference", command=command)


def test_servers_become_ready(tmp_path: Path) -> None:
    """Starts two at once; each has a port of its own."""
    with LocalCluster(tmp_path) as cluster:
        servers = [cluster.start(file_server(tmp_path, name)) for name in ("one", "two")]
        cluster.wait_ready(timeout_s=60)
        assert (2, [True, True]) == (len({server.url for server in servers}), [server.check() for server in servers])


def test_leaving_the_block_ends_every_server(tmp_path: Path) -> None:
    """An error inside the block, as Ctrl-C is one, must leave no process."""

    def interrupted() -> None:
        with LocalCluster(tmp_path) as cluster:
            started.append(cluster.start(file_server(tmp_path)))
            raise KeyboardInterrupt

    started: list[Server] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [[]] == [processes.live_group(server.child.pid) for server in started]


def test_a_server_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    """The server writes a reason and ends while it is waited for."""
    command = (sys.executable, "-c", "raise SystemExit('no such model')")
    with LocalCluster(tmp_path) as cluster:
        cluster.start(ServerSpec(name="broken", role="reference", command=command))
        with pytest.raises(ServerFailed, match=r"(?s)broken .*code 1.*no such model"):
            cluster.wait_ready(timeout_s=60)


def test_a_server_that_never_answers_is_told(tmp_path: Path) -> None:
    """The server runs but is never healthy."""
    with LocalCluster(tmp_path) as cluster:
        cluster.start(file_server(tmp_path, healthy=False))
        with pytest.raises(ServerFailed, match="was not ready within"):
            cluster.wait_ready(timeout_s=0.5)


def test_a_taken_port_is_replaced(tmp_path: Path) -> None:
    """Another socket holds the first port the server is given."""
    with socket.socket() as holder, LocalCluster(tmp_path) as cluster:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        server = cluster.start(file_server(tmp_path))
        processes.stop_all([server.child])
        server.start(port=holder.getsockname()[1])
        cluster.wait_ready(timeout_s=60)
        assert holder.getsockname()[1] != server.port


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    """As the master is where Mooncake is not installed."""
    with LocalCluster(tmp_path) as cluster, pytest.raises(ServerFailed, match=r"no-such-program.*is Mooncake installed"):
        cluster.start(ServerSpec(name="absent", role="master", command=("no-such-program", PORT)))


def test_a_master_with_a_taken_port_gets_another(tmp_path: Path) -> None:
    """A real one; another socket holds first the port for its clients, then the one for HTTP."""
    pytest.importorskip("mooncake")
    with socket.socket() as holder, LocalCluster(tmp_path) as cluster:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = holder.getsockname()[1]
        server = cluster.start(servers.master())
        for ports in ({"rpc_port": taken}, {"port": taken}):
            processes.stop_all([server.child], grace_s=0.0)
            server.start(**ports)
            cluster.wait_ready(timeout_s=60)
            assert taken not in (server.port, server.rpc_port)


def test_a_master_has_our_times(tmp_path: Path) -> None:
    """It says so itself when it starts, and keeps its address in a restart."""
    pytest.importorskip("mooncake")
    with LocalCluster(tmp_path) as cluster:
        server = cluster.start(servers.master())
        cluster.wait_ready(timeout_s=60)
        address, story = server.rpc_address, server.child.log_tail(60)
        harm.kill(server)
        harm.restart(server)
        cluster.wait_ready(timeout_s=60)
        lease_ms, ttl_s = round(limits.OBJECT_LEASE_S * 1e3), round(limits.MASTER_CLIENT_TTL_S)
        assert (True, True) == (f"default_kv_lease_ttl={lease_ms}," in story, f"client_ttl={ttl_s}," in story)
        assert address == server.rpc_address


def test_a_killed_server_can_be_restarted_on_its_port(tmp_path: Path) -> None:
    """Kills a server as tests do, and starts it again where clients know it."""
    with LocalCluster(tmp_path) as cluster:
        server = cluster.start(file_server(tmp_path))
        cluster.wait_ready(timeout_s=60)
        url = server.url
        harm.kill(server)
        harm.restart(server)
        cluster.wait_ready(timeout_s=60)
        assert (url, True) == (server.url, server.check())


def test_watching_tells_of_the_first_server_that_ends(tmp_path: Path) -> None:
    """A server of a running set is killed."""
    with LocalCluster(tmp_path) as cluster:
        server = cluster.start(file_server(tmp_path))
        cluster.wait_ready(timeout_s=60)
        server.child.signal(9)
        with pytest.raises(ServerFailed, match="ended with code -9"):
            cluster.watch()
