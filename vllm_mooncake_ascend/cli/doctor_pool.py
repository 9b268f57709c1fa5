"""The doctor's look at a prefix pool: which one the settings name, whether its master answers, and what it cannot tell."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.cli.doctor_checks import Finding
from vllm_mooncake_ascend.cli.master_http import MasterHttp, MasterUnreachable, Segment, metrics_address
from vllm_mooncake_ascend.config import PoolConfig, parse_p2p, parse_pool
from vllm_mooncake_ascend.config.pool_keys import CONFIG_PATH_VARIABLE, MASTER_VARIABLE
from vllm_mooncake_ascend.errors import ConfigError

STORE_CONNECTOR = "MooncakeStoreConnectorV1"
_HOST = "127.0.0.1"
LAG_S = 1.0
"""How far what is measured may lie from an object lease: calls take time, and a busy machine more of it."""


class Master(msgspec.Struct, frozen=True, kw_only=True):
    """What could be learned of the master of a pool. An error is empty when there was none."""

    address: str
    connect_error: str
    metrics_error: str
    segments: tuple[Segment, ...]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a master's object lease."""

    seconds: float = 0.0
    is_over: bool = False
    """False: after so many seconds it was not over, and nobody waited longer."""
    error: str = ""
    """Why nothing could be measured; empty: something was."""

    def falls_short_of(self, seconds: float) -> bool:
        return self.is_over and self.seconds < seconds - LAG_S


def pool_config(
    connector: str, extra_config: Mapping[str, object], environ: Mapping[str, str], *, device_type: str
) -> PoolConfig | None:
    """The pool that these settings are about, if they are about one.

    Args:
        connector: `kv_connector`; empty: only the environment is known, which may name a pool.
    Raises:
        ConfigError: a setting of the pool is wrong.
    """

    def read_text(name: str) -> str:
        return Path(name).read_text()

    if connector == STORE_CONNECTOR or (not connector and {MASTER_VARIABLE, CONFIG_PATH_VARIABLE} & environ.keys()):
        config, _ = parse_pool(extra_config, environ, device_type=device_type, default_host=_HOST, read_text=read_text)
        return config
    if extra_config.get("prefix_pooling") is True:
        p2p, _ = parse_p2p(extra_config, environ, device_type=device_type, default_host=_HOST, read_text=read_text)
        return p2p.pool
    return None


def look_at(config: PoolConfig, metrics: str) -> Master:
    """Call the master. `metrics`: `host:port` of its metrics port; empty: Mooncake's own."""
    segments: tuple[Segment, ...] = ()
    metrics_error = ""
    try:
        segments = MasterHttp(metrics or metrics_address(config.master_address)).segments()
    except (MasterUnreachable, ConfigError) as error:
        metrics_error = str(error)
    return Master(
        address=config.master_address,
        connect_error=_connect_error(config.master_address),
        metrics_error=metrics_error,
        segments=segments,
    )


def findings_of(config: PoolConfig, master: Master, lease: Lease | None = None) -> list[Finding]:
    """What is to be said about a pool. `lease`: of the master, if it was measured."""
    lease_ms = f"--default_kv_lease_ttl={config.object_lease_s * 1e3:.0f}"
    start = f"mooncake_master {lease_ms} --client_ttl={limits.MASTER_CLIENT_TTL_S:.0f}"
    if master.connect_error:
        seen = f"{master.address}: {master.connect_error}"
        return [Finding(check="pool master", state="error", seen=seen, remedy=f"start it: {start}, or correct its address")]
    findings = [Finding(check="pool master", state="ok", seen=f"{master.address} accepts connections"), _memory(config, master)]
    return [*findings, _object_lease(config, lease, lease_ms)]


def _object_lease(config: PoolConfig, lease: Lease | None, option: str) -> Finding:
    """A master's pages have neither its lease nor its version."""
    check, remedy = "pool object lease", f"make sure the master runs with {option}, or measure it with --pool-lease"
    ours = f"object_lease_s={config.object_lease_s:g} here"
    if lease is None:
        return Finding(check=check, state="skipped", seen=f"a master does not tell it; {ours}", remedy=remedy)
    if lease.error:
        return Finding(check=check, state="skipped", seen=f"not measured: {lease.error}", remedy=remedy)
    if lease.falls_short_of(config.object_lease_s):
        return Finding(
            check=check,
            state="warning",
            seen=f"the master keeps what was looked up for {lease.seconds:.1f} s; {ours}: it may be gone before it is loaded",
            remedy=f"start the master with {option}, or set object_lease_s={max(1, round(lease.seconds))} in every engine",
        )
    return Finding(check=check, state="ok", seen=f"{lease.seconds:.1f} s{'' if lease.is_over else ' or more'}; {ours}")


def _memory(config: PoolConfig, master: Master) -> Finding:
    if master.metrics_error:
        return Finding(check="pool memory", state="skipped", seen=master.metrics_error, remedy="say --pool-metrics HOST:PORT")
    capacity_bytes = sum(segment.capacity_bytes for segment in master.segments)
    seen = f"{len(master.segments)} segments, {capacity_bytes / 2**30:.1f} GiB in all"
    if not master.segments and config.segment_bytes == 0:
        return Finding(
            check="pool memory",
            state="warning",
            seen=f"{seen}; this engine lends none either",
            remedy="set segment_bytes, or run mooncake_client where memory is to be lent",
        )
    return Finding(
        check="pool memory", state="ok", seen=f"{seen}; each worker of this engine lends {config.segment_bytes:,} bytes"
    )


def _connect_error(address: str) -> str:
    """Why nobody can be reached there. Addresses of masters with stand-ins are Mooncake's to resolve."""
    if "://" in address:
        return ""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=limits.STORE_CONNECT_S).close()
    except OSError as error:
        return str(error)
    return ""
