"""Every setting of the prefix pool, as data: keys, the keys of `mooncake.json`, and what other connectors call them."""

from __future__ import annotations

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.config.keys import Borrowed, Key

CONFIG_PATH_VARIABLE = "MOONCAKE_CONFIG_PATH"
MASTER_VARIABLE = "MOONCAKE_MASTER"

POOL_KEYS = (
    Key(
        name="master_address",
        kind="address",
        default_text=f"`mooncake.json`, else `{MASTER_VARIABLE}`; one of them is needed",
        meaning="Where `mooncake_master` listens, `host:port`; or `etcd://...`, `redis://...`, `k8s://...` for a master with "
        "stand-ins, as far as the installed Mooncake was built for it (its wheel for CPUs: etcd).",
    ),
    Key(
        name="mooncake_config_path",
        kind="text",
        default_text=f"`{CONFIG_PATH_VARIABLE}`, else none",
        meaning="A `mooncake.json` as vLLM and vllm-ascend use it, see below. Keys set here count more.",
    ),
    Key(
        name="segment_bytes",
        kind="size",
        default=limits.SEGMENT_BYTES,
        lowest=limits.SEGMENT_MIN_BYTES,
        highest=limits.SEGMENT_MAX_BYTES,
        meaning="Memory that each worker lends to the pool, and that goes with it. 0: none, where `mooncake_client` processes "
        "own all of it.",
    ),
    Key(
        name="num_replicas",
        kind="integer",
        default=1,
        lowest=1,
        highest=limits.MAX_REPLICAS,
        meaning="Copies of each object. Mooncake makes as many as it can, and a get does not turn to the second when the first "
        "fails.",
    ),
    Key(name="soft_pin", kind="flag", default=False, meaning="Objects of this engine are evicted after those of others."),
    Key(
        name="preferred_segments",
        kind="segments",
        default=(),
        meaning="Segments to put objects into while there is room, `host:port` each. Empty: the worker's own, if it lends "
        "memory.",
    ),
    Key(
        name="tenant",
        kind="text",
        default="",
        meaning="Engines of different tenants share nothing. Not a protection: who reaches the pool can read it. A master with "
        "`--enable_multi_tenants` must know it.",
    ),
    Key(
        name="reads_apart",
        kind="flag",
        default=True,
        meaning="Get through a client of its own, so that ending a get that hangs does not take the lent memory with it. Costs "
        "speed for what lies in the worker's own segment.",
    ),
    Key(name="loads", kind="flag", default=True, meaning="Look for prefixes in the pool and load them."),
    Key(
        name="saves",
        kind="flag",
        default_text="true; for the role `kv_consumer` what `save_decode` says",
        meaning="Save computed prefixes into the pool.",
    ),
    Key(
        name="save_decode",
        kind="flag",
        default=False,
        meaning="Also save blocks of generated tokens, for the next turn of a chat.",
    ),
    Key(
        name="min_hit_tokens",
        kind="integer",
        default=limits.MIN_HIT_TOKENS,
        lowest=1,
        highest=1 << 20,
        meaning="Fewer tokens than this are computed, not loaded.",
    ),
    Key(
        name="lookup_wait_ms",
        kind="milliseconds",
        default_text=f"by device: cpu {limits.LOOKUP_WAIT_CPU_S * 1e3:.0f}, else {limits.LOOKUP_WAIT_S * 1e3:.0f}",
        lowest=0,
        highest=10_000,
        meaning="How long a request may be held back for its lookup, and 10 us longer for each block it asks for; then it may "
        "run without. 0: never.",
    ),
    Key(
        name="load_wait_s",
        kind="seconds",
        default=limits.LOAD_WAIT_S,
        default_text=f"{limits.LOAD_WAIT_S:g}, at most a third of `object_lease_s`",
        lowest=0.01,
        highest=300,
        meaning="A load that takes longer is given up, and the request computes. Below half of `object_lease_s`.",
    ),
    Key(
        name="object_lease_s",
        kind="seconds",
        default=limits.OBJECT_LEASE_S,
        lowest=0.1,
        highest=limits.LEASE_CEILING_S,
        meaning="The master's `--default_kv_lease_ttl` (there in milliseconds): what a lookup found is not evicted this long. "
        "Must be what the master has; Mooncake's own default is 10 s.",
    ),
    Key(
        name="max_saved_ratio",
        kind="ratio",
        default=limits.MAX_SAVED_RATIO,
        lowest=0.01,
        highest=0.95,
        meaning="Share of the KV blocks that saves may hold; beyond it nothing is saved until some have ended.",
    ),
    Key(
        name="weights_version",
        kind="text",
        default="",
        meaning="Name of weights that the files do not tell, for example after an update in place. Engines share only what was "
        "computed with the same.",
    ),
    Key(
        name="allow_private_hashes",
        kind="flag",
        default=False,
        meaning="Start although no other process computes the same block hashes (random seed or algorithm): a warning and a "
        "metric take the place of the refusal.",
    ),
)

MODE = Key(
    name="mode",
    kind="choice",
    default_text="by `global_segment_size`",
    choices=("embedded", "standalone-store"),
    meaning="`standalone-store`: this engine lends no memory, `mooncake_client` processes do.",
)
"""Of `mooncake.json` alone."""

FILE_KEYS = (
    Borrowed(name="master_server_address", stands_for="master_address", remark="vLLM, vllm-ascend"),
    Borrowed(name="protocol", stands_for="protocol", remark="vLLM, vllm-ascend"),
    Borrowed(name="device_name", stands_for="device_name", remark="vLLM, vllm-ascend"),
    Borrowed(name="global_segment_size", stands_for="segment_bytes", remark="vLLM, vllm-ascend; units are of 1024"),
    Borrowed(name="tenant_id", stands_for="tenant", quiet=("default",), remark="vLLM"),
    Borrowed(name="preferred_segment", stands_for="preferred_segments", quiet=(True, False), remark="vLLM"),
    Borrowed(
        name="metadata_server",
        quiet=("P2PHANDSHAKE", ""),
        remark="clients find each other by P2PHANDSHAKE; no metadata server is needed",
    ),
    Borrowed(
        name="local_buffer_size",
        quiet=(0,),
        remark="there is no staging buffer: bytes go straight from and into the KV cache",
    ),
    Borrowed(
        name="prefer_alloc_in_same_node",
        quiet=(False,),
        remark="a get with it does not look at the object lease, so it can return bytes of another object",
    ),
    Borrowed(
        name="alloc_in_same_node",
        quiet=(False,),
        remark="a get with it does not look at the object lease, so it can return bytes of another object",
    ),
    Borrowed(name="use_ascend_direct", quiet=(True,), remark="protocol `ascend` always is Ascend Direct Transport"),
    Borrowed(
        name="enable_offload",
        quiet=(False,),
        remark="the SSD tier belongs to the `mooncake_client` processes and to the master, whose `--enable_offload` counts, "
        "see docs/pool.md",
    ),
    Borrowed(
        name="enable_ssd_offload",
        quiet=(False,),
        remark="workers keep no SSD tier; run `mooncake_client --enable_offload` beside them, see docs/pool.md",
    ),
    Borrowed(name="ssd_offload_path", quiet=("",), remark="workers keep no SSD tier; see enable_ssd_offload"),
    Borrowed(
        name="local_hostname",
        quiet=("",),
        remark="a file that several machines share cannot say it; set transfer_host or VLLM_HOST_IP on each",
    ),
)
"""Source: vLLM 0.32 distributed/mooncake_store.py, vllm-ascend main mooncake_backend.py, both read in 2026."""

_BY_SHARDS = "a key names the layers and heads its object has, so engines of other shapes find what fits them"

POOL_BORROWED_KEYS = (
    Borrowed(name="master_server_address", stands_for="master_address", remark="as in mooncake.json"),
    Borrowed(name="global_segment_size", stands_for="segment_bytes", remark="as in mooncake.json"),
    Borrowed(name="tenant_id", stands_for="tenant", remark="as in mooncake.json"),
    Borrowed(name="preferred_segment", stands_for="preferred_segments", remark="vLLM"),
    Borrowed(name="cache_prefix", stands_for="tenant", quiet=("",), remark="vLLM: keys of another prefix are never found"),
    Borrowed(name="enable_lookup", stands_for="loads", quiet=(True,), remark="vLLM"),
    Borrowed(name="save_decode_cache", stands_for="save_decode", quiet=(False,), remark="vLLM, vllm-ascend"),
    Borrowed(name="consumer_is_to_put", stands_for="saves", quiet=(False,), remark="vllm-ascend"),
    Borrowed(
        name="consumer_is_to_load",
        quiet=(True,),
        remark="an engine of any role loads; loads=false switches it off",
    ),
    Borrowed(name="load_async", quiet=(True,), remark="loads always run beside computing"),
    Borrowed(name="lookup_async", quiet=(True,), remark="lookups never block the scheduler; see lookup_wait_ms"),
    Borrowed(name="lookup_rpc_port", quiet=(0,), remark="the scheduler asks the master itself"),
    Borrowed(name="mooncake_rpc_port", quiet=(0,), remark="the scheduler asks the master itself"),
    Borrowed(name="backend", quiet=("mooncake",), remark="the pool is Mooncake Store"),
    Borrowed(name="use_layerwise", quiet=(False,), remark="one object holds all layers of a block"),
    Borrowed(name="enable_cross_layers_blocks", quiet=(False,), remark="one object holds all layers of a block anyway"),
    Borrowed(name="enable_group_semantics", quiet=(False,), remark="each KV cache group has objects of its own"),
    Borrowed(name="discard_partial_chunks", quiet=(True,), remark="only whole blocks are shared"),
    Borrowed(name="register_buffer", quiet=(True,), remark="the KV cache is always registered"),
    Borrowed(name="custom_mem_pool", remark="memory is registered where vLLM allocated it"),
    Borrowed(name="store_tp_size", remark=_BY_SHARDS),
    Borrowed(name="enable_store_tp_lcm", quiet=(False,), remark=_BY_SHARDS),
    Borrowed(name="prefill_tp_sizes", remark=_BY_SHARDS),
    Borrowed(name="prefill_tp_size", remark=_BY_SHARDS),
    Borrowed(name="decode_tp_size", remark=_BY_SHARDS),
    Borrowed(name="prefill_pp_size", remark=_BY_SHARDS),
    Borrowed(name="prefill_pp_layer_partition", remark=_BY_SHARDS),
)
"""Source: as of FILE_KEYS; vLLM mooncake/store/, vllm-ascend ascend_store/."""

POOL_BORROWED_VARIABLES = (
    Borrowed(
        name="MOONCAKE_GLOBAL_SEGMENT_SIZE", stands_for="segment_bytes", remark="vllm-ascend, where it beats mooncake.json"
    ),
    Borrowed(name="MOONCAKE_PREFERRED_SEGMENT", stands_for="preferred_segments", remark="vLLM"),
    Borrowed(name="MOONCAKE_REQUESTER_LOCAL_HOSTNAME", stands_for="transfer_host", remark="vLLM, for the pool alone"),
    Borrowed(name="VLLM_MOONCAKE_LOAD_RECV_THREADS", remark=f"{limits.MAX_GETS_AT_ONCE} gets of a worker run at once"),
    Borrowed(name="VLLM_MOONCAKE_STORE_TIER_LOG", remark="metrics tell what was loaded"),
)
