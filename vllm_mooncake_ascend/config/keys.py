"""Keys of `kv_connector_extra_config`, as data: parsing, error messages and documentation all come from here.

Those of the prefix pool stand in `pool_keys`.
"""

from __future__ import annotations

from typing import Literal, Union

import msgspec

from vllm_mooncake_ascend import limits

Value = Union[str, int, float, bool, tuple[str, ...]]

Kind = Literal[
    "choice", "text", "seconds", "milliseconds", "ratio", "integer", "flag", "host", "hosts", "address", "segments", "size"
]

READ_WAIT_MOST_S = 100.0
assert READ_WAIT_MOST_S + limits.ENGINE_CALL_S + limits.PEER_ANSWER_S < limits.VERDICT_MEMORY_S, "see limits.py"


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One setting. `default` None: derived when the configuration is read, as `default_text` says."""

    name: str
    kind: Kind
    default: Value | None = None
    default_text: str = ""
    choices: tuple[str, ...] = ()
    lowest: float = 0
    highest: float = 0
    meaning: str


class Borrowed(msgspec.Struct, frozen=True, kw_only=True):
    """A key or environment variable of another connector that users bring along."""

    name: str
    stands_for: str = ""
    """Our key with the same meaning; empty: the value is ignored, with a warning."""
    quiet: tuple[Value, ...] = ()
    """Values that ask for what happens anyway: neither taken nor warned about."""
    remark: str


SHARED_KEYS = (
    Key(
        name="load_failure_policy",
        kind="choice",
        default="recompute",
        choices=("recompute", "fail"),
        meaning="What vLLM does with a request whose KV could not be loaded. Overrides vLLM's `kv_load_failure_policy`.",
    ),
    Key(
        name="protocol",
        kind="choice",
        default_text="by device: cpu `tcp`, npu `ascend`, cuda `rdma`",
        choices=("tcp", "rdma", "ascend"),
        meaning="Transport of Mooncake Transfer Engine. All engines of a cluster use the same.",
    ),
    Key(
        name="device_name",
        kind="text",
        default="",
        meaning="Network devices for Mooncake (`mlx5_0,mlx5_1`); empty: it chooses.",
    ),
    Key(
        name="transfer_host",
        kind="host",
        default_text="`side_channel_host`, else `VLLM_HOST_IP`, else the host's primary address",
        meaning="Address under which peers reach this engine's KV memory.",
    ),
    Key(
        name="empty_step_wait_ms",
        kind="milliseconds",
        default=limits.EMPTY_STEP_WAIT_S * 1e3,
        lowest=0,
        highest=50,
        meaning="Longest sleep of an engine that only waits for KV; 0: spin as vLLM does.",
    ),
    Key(
        name="tame_queue_spin",
        kind="flag",
        default_text="true on cpu, else false",
        meaning="Let readers of vLLM's queues between its processes nap, where its busy loop burns a core while KV is awaited.",
    ),
)
"""Of both connectors."""

P2P_KEYS = (
    Key(
        name="transfer_mode",
        kind="choice",
        default="after_prefill",
        choices=("after_prefill", "stream"),
        meaning="When decode reads: once, after prefill has ended, or what a step of prefill has computed while the next one "
        "computes. `stream` needs it on both sides, and a proxy that sends a request to both at once (`--flow concurrent`).",
    ),
    Key(
        name="side_channel_host",
        kind="host",
        default_text="`VLLM_HOST_IP`, else the host's primary address",
        meaning="Address the prefill engine's side channel listens on and gives to peers.",
    ),
    Key(
        name="side_channel_port",
        kind="integer",
        default=0,
        lowest=0,
        highest=65_535,
        meaning="Port of the side channel; 0: any free one, told to peers with each request. A fixed one serves one engine "
        "(DP rank) of a host.",
    ),
    Key(
        name="peers",
        kind="hosts",
        default=(),
        meaning="Addresses, networks (`10.0.0.0/8`) and host names of other machines that may connect, as a list. "
        "Without a cluster secret nobody else may. Names are resolved once, at start.",
    ),
    Key(
        name="cluster_secret",
        kind="text",
        default_text="`VLLM_MOONCAKE_ASCEND_SECRET`, else none",
        meaning="Shared by all engines and proxies: signs `kv_transfer_params` and encrypts the side channel. At least "
        "16 characters. Prefer the environment variable or the file: vLLM prints its options.",
    ),
    Key(
        name="cluster_secret_file",
        kind="text",
        default_text="none",
        meaning="File that holds the cluster secret.",
    ),
    Key(
        name="lease_ttl_s",
        kind="seconds",
        default=limits.LEASE_TTL_S,
        lowest=limits.LEASE_TTL_MIN_S,
        highest=limits.LEASE_CEILING_S,
        meaning="How long prefill keeps blocks for a decode engine that has fallen silent; at most `lease_max_s`.",
    ),
    Key(
        name="lease_max_s",
        kind="seconds",
        default=limits.LEASE_MAX_S,
        lowest=limits.LEASE_TTL_MIN_S,
        highest=limits.LEASE_CEILING_S,
        meaning="How long prefill keeps blocks after its request ended, whoever still asks for them.",
    ),
    Key(
        name="max_pinned_ratio",
        kind="ratio",
        default=limits.MAX_PINNED_RATIO,
        lowest=0.01,
        highest=0.95,
        meaning="Share of the KV blocks that may be kept for decode engines; above it the oldest are given up.",
    ),
    Key(
        name="offer_wait_s",
        kind="seconds",
        default=limits.OFFER_WAIT_S,
        lowest=1,
        highest=limits.LEASE_CEILING_S,
        meaning="How long decode waits for a prefill that has not ended, while the prefill engine answers.",
    ),
    Key(
        name="read_wait_s",
        kind="seconds",
        default=limits.READ_WAIT_S,
        lowest=1,
        highest=READ_WAIT_MOST_S,
        meaning="Longest time the copy of one request may take.",
    ),
    Key(
        name="min_remote_tokens",
        kind="integer",
        default=limits.MIN_REMOTE_TOKENS,
        lowest=1,
        highest=1 << 20,
        meaning="Fewer missing tokens than this are computed by decode itself.",
    ),
    Key(
        name="prefix_pooling",
        kind="flag",
        default=False,
        meaning="Also share prefix blocks through Mooncake Store; the keys of the prefix pool count then.",
    ),
)
"""Of MooncakeConnectorV1 alone."""

_EXCHANGED = "engines exchange it in their handshake"
_ONE_THREAD = "one thread per worker transfers, which measured fastest"

SHARED_BORROWED_KEYS = (
    Borrowed(name="mooncake_protocol", stands_for="protocol", remark="vLLM MooncakeConnector"),
    Borrowed(name="use_ascend_direct", quiet=(True,), remark="protocol `ascend` always is Ascend Direct Transport"),
    Borrowed(name="ascend_local_comm_res_path", remark="set ASCEND_LOCAL_COMM_RES in the environment"),
)

P2P_BORROWED_KEYS = (
    Borrowed(name="num_workers", remark=_ONE_THREAD),
    Borrowed(name="bootstrap_server_address", remark="each prefill engine tells its own address with the request"),
    Borrowed(name="prefill", remark=_EXCHANGED),
    Borrowed(name="decode", remark=_EXCHANGED),
    Borrowed(name="tls_config", remark="set cluster_secret to encrypt the side channel"),
)
"""Keys of vLLM's in-tree Mooncake connectors and of vllm-ascend's. Source: vLLM 0.32 mooncake_connector.py, vllm-ascend
main (docs and code), both read in 2026."""

SECRET_VARIABLE = "VLLM_MOONCAKE_ASCEND_SECRET"
STRICT_VARIABLE = "VLLM_MOONCAKE_ASCEND_STRICT"
HOST_VARIABLE = "VLLM_HOST_IP"
BORROWED_VARIABLES = (
    Borrowed(
        name="VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT",
        stands_for="lease_max_s",
        remark="vLLM and vllm-ascend: seconds prefill keeps blocks",
    ),
    Borrowed(name="VLLM_MOONCAKE_CONNECTOR_TIMEOUT", remark="see offer_wait_s and read_wait_s"),
    Borrowed(name="VLLM_MOONCAKE_BOOTSTRAP_PORT", remark="there is no bootstrap server; see side_channel_port"),
)
