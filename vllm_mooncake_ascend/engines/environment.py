"""Mooncake's environment variables: the values we set where the user set none, and what is checked of the user's own.

Pure: environments are mappings handed in. The adapter applies `safe_defaults` before the first engine of the process
exists, because Mooncake reads most of these once. A value of the user is never changed, only checked.

| variable                             | our value      | why (measured on Mooncake 0.3.13.post1)                          |
|--------------------------------------|----------------|------------------------------------------------------------------|
| MC_TCP_ENABLE_CONNECTION_POOL        | 1              | without: one TCP connection per descriptor, 3-6 ms each          |
| MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER | 65535          | a full queue (default 1024) can leave a peer unreachable for ever |
| MC_TRANSFER_TIMEOUT                  | ENGINE_CALL_S  | default 30 s would hold up every transfer behind a silent peer   |
| MC_LOG_LEVEL                         | ERROR          | INFO is a line per read, WARNING two misleading ones per engine  |
| MC_FORCE_TCP                         | 1, only on tcp | Mooncake ignores the protocol asked for and takes RDMA or Ascend |
| MC_USE_IPV6                          | 1, IPv6 hosts  | without it the engine listens on IPv4 only                       |
| ASCEND_CONNECT_TIMEOUT               | 3000 (ms)      | default 10 s, tried twice: longer than MC_TRANSFER_TIMEOUT       |
| ASCEND_TRANSFER_TIMEOUT              | 3000 (ms)      | the same                                                         |
| MC_STORE_CLIENT_SETUP_RETRIES        | 1, store only  | setup holds the GIL; 20 tries are 90 s when the master is down   |
| MC_RPC_TIMEOUT_MS                    | STORE_RPC_MS   | store only: 30 s of waiting for a stopped master otherwise       |

At ERROR Mooncake still prints a line "Local segment descriptor not found" for each engine, which means nothing; the level is
read when Mooncake is imported.

Not set on purpose: MC_TCP_STATUS_TIMEOUT_SEC and MC_TCP_PROGRESS_TIMEOUT_SEC. Below MC_TRANSFER_TIMEOUT they make a read
from a stopped peer fail sooner, but they are no fence: with 3 s, 482 of 512 MiB landed after the read had failed. Nor
MC_TCP_SLICE_SIZE and MC_TCP_LANES_PER_PEER: their defaults, 64 KiB and 4, were as fast as any of 64 KiB to 1 MiB and 1 to 8,
with runs of 96 and of 256 KiB (2.2 and 2.9 GB/s; one lane 1.85 and 2.6). Nor
MOONCAKE_STORE_CHECKSUM, which makes a get notice bytes that are not those that were put (-801): a put or get over TCP took four
times as long with it, into one's own segment 17 times. Where KV memory is the host's, `sealed_store` does that for a sixth.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import ConfigError

MIN_TRANSFER_TIMEOUT_S = 5
"""Mooncake raises a smaller MC_TRANSFER_TIMEOUT to this (transfer_engine_py.cpp)."""
TCP_PROGRESS_TIMEOUT_S = 30
"""Mooncake's default for MC_TCP_STATUS_TIMEOUT_SEC and MC_TCP_PROGRESS_TIMEOUT_SEC."""
ASCEND_TIMEOUT_MS = 3_000
ASCEND_ATTEMPTS = 2
"""Ascend Direct Transport tries a transfer again once by itself (ascend_direct_transport.cpp)."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong with the environment. `fatal`: transfers would be wrong or could hang, not merely slow."""

    text: str
    fatal: bool


def safe_defaults(environ: Mapping[str, str], *, protocol: str, host: str) -> dict[str, str]:
    """The variables to add to `environ`, none of which it has."""
    wanted = {
        "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": str(limits.TCP_QUEUED_TRANSFERS),
        "MC_TRANSFER_TIMEOUT": str(int(limits.ENGINE_CALL_S)),
        "MC_LOG_LEVEL": "ERROR",
    }
    if protocol == "tcp":
        wanted["MC_FORCE_TCP"] = "1"
    if protocol == "ascend":
        wanted["ASCEND_CONNECT_TIMEOUT"] = str(ASCEND_TIMEOUT_MS)
        wanted["ASCEND_TRANSFER_TIMEOUT"] = str(ASCEND_TIMEOUT_MS)
    if ":" in host:
        wanted["MC_USE_IPV6"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def store_defaults(environ: Mapping[str, str]) -> dict[str, str]:
    """What a client of the store needs beside `safe_defaults`; again only what `environ` has not."""
    wanted = {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_RPC_TIMEOUT_MS": str(limits.STORE_RPC_MS)}
    return {name: value for name, value in wanted.items() if name not in environ}


def call_timeout_s(environ: Mapping[str, str]) -> float:
    """The longest a data read blocks on a silent peer (a second a GiB comes on top).

    Raises:
        ConfigError: MC_TRANSFER_TIMEOUT is not a whole number of seconds.
    """
    asked_s = _whole_number(environ, "MC_TRANSFER_TIMEOUT", int(limits.ENGINE_CALL_S))
    return float(max(MIN_TRANSFER_TIMEOUT_S, asked_s))


def problems(environ: Mapping[str, str], *, protocol: str, host: str) -> tuple[Problem, ...]:
    """What is wrong in an environment to which `safe_defaults` was added.

    Raises:
        ConfigError: a variable that must be a number is none.
    """
    found = [
        *_transport_problems(environ, protocol, host),
        *_queue_problems(environ),
        *_timeout_problems(environ, protocol),
    ]
    return tuple(found)


def _transport_problems(environ: Mapping[str, str], protocol: str, host: str) -> list[Problem]:
    found = []
    if protocol != "tcp" and "MC_FORCE_TCP" in environ:
        found.append(
            Problem(
                text=f"MC_FORCE_TCP is set, so Mooncake would move KV over TCP although protocol is {protocol!r}; "
                "unset it (any value counts, 0 too) or set protocol to tcp",
                fatal=True,
            )
        )
    if ":" not in host and "MC_USE_IPV6" in environ:
        found.append(
            Problem(
                text=f"MC_USE_IPV6 is set, but this engine's address {host!r} is not an IPv6 one; with it Mooncake cannot "
                "reach IPv4 addresses; unset it or give every engine an IPv6 address",
                fatal=True,
            )
        )
    return found


def _queue_problems(environ: Mapping[str, str]) -> list[Problem]:
    found = []
    name = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
    queued = _whole_number(environ, name, limits.TCP_QUEUED_TRANSFERS)
    if queued < limits.MAX_CALL_DESCRIPTORS:
        found.append(
            Problem(
                text=f"{name}={queued} is below the {limits.MAX_CALL_DESCRIPTORS} descriptors of one call; a full queue can "
                f"leave a peer unreachable for ever; set it to {limits.TCP_QUEUED_TRANSFERS} or unset it",
                fatal=True,
            )
        )
    name = "MC_TCP_ENABLE_CONNECTION_POOL"
    if environ.get(name, "1").lower() in ("0", "false", "no"):
        found.append(
            Problem(
                text=f"{name}={environ[name]} makes Mooncake open a connection for each descriptor; expect 3-6 ms for each; "
                "unset it",
                fatal=False,
            )
        )
    return found


def _timeout_problems(environ: Mapping[str, str], protocol: str) -> list[Problem]:
    found = []
    call_s = call_timeout_s(environ)
    names = ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC")
    progress_s = max(_whole_number(environ, name, TCP_PROGRESS_TIMEOUT_S) for name in names)
    if call_s + progress_s >= limits.QUARANTINE_S:
        found.append(
            Problem(
                text=f"MC_TRANSFER_TIMEOUT ({call_s:.0f} s) and the larger of {' and '.join(names)} ({progress_s} s) add up to "
                f"the {limits.QUARANTINE_S:.0f} s that blocks of a failed read stay out of use, or more; bytes could land in "
                "blocks of another request; lower one of them",
                fatal=True,
            )
        )
    elif call_s > limits.ENGINE_CALL_S:
        found.append(
            Problem(
                text=f"MC_TRANSFER_TIMEOUT={call_s:.0f} lets one silent peer hold up every other transfer of a worker that "
                f"long; {limits.ENGINE_CALL_S:.0f} s or less is advised",
                fatal=False,
            )
        )
    if protocol == "ascend":
        ascend_names = ("ASCEND_CONNECT_TIMEOUT", "ASCEND_TRANSFER_TIMEOUT")
        attempt_ms = max(_whole_number(environ, name, ASCEND_TIMEOUT_MS) for name in ascend_names)
        if ASCEND_ATTEMPTS * attempt_ms >= call_s * 1_000:
            found.append(
                Problem(
                    text=f"twice the larger of {' and '.join(ascend_names)} ({attempt_ms} ms) is not below "
                    f"MC_TRANSFER_TIMEOUT ({call_s:.0f} s); reads would be given up while the device still writes; lower them",
                    fatal=False,
                )
            )
    return found


def _whole_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be a whole number, got {text!r}; correct it or unset it") from error
