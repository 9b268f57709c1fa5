"""PoolConfig: the settings of the prefix pool, checked.

A value comes from the key in `kv_connector_extra_config`, else from `mooncake.json`, else from an environment variable, else
it is the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.config import keys, mooncake_json, pool_keys, reading
from vllm_mooncake_ascend.config.keys import Borrowed, Value
from vllm_mooncake_ascend.config.reading import Vocabulary
from vllm_mooncake_ascend.errors import ConfigError

_KEYS = (*keys.SHARED_KEYS, *pool_keys.POOL_KEYS)
_BY_NAME = {key.name: key for key in _KEYS}
_VOCABULARY = Vocabulary(
    keys=_KEYS,
    borrowed=(
        *keys.SHARED_BORROWED_KEYS,
        *pool_keys.POOL_BORROWED_KEYS,
        *(Borrowed(name=entry.name, remark="it is about transfers from prefill to decode") for entry in keys.P2P_BORROWED_KEYS),
    ),
    elsewhere={
        **{key.name: "is a setting of MooncakeConnectorV1 alone; leave it out" for key in keys.P2P_KEYS},
        "prefix_pooling": "adds the pool to MooncakeConnectorV1; this connector is the pool itself, leave it out",
    },
)


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine; meanings stand in `config.pool_keys` and, of those both connectors have, in `config.keys`."""

    load_failure_policy: str
    protocol: str
    device_name: str
    host: str
    """Address of this machine for Mooncake: `transfer_host`."""
    master_address: str
    segment_bytes: int
    """Of each worker; 0 where other processes own the memory."""
    num_replicas: int
    soft_pin: bool
    preferred_segments: tuple[str, ...]
    tenant: str
    reads_apart: bool
    loads: bool
    saves: bool | None
    """None: by role, see `saves_as`."""
    save_decode: bool
    min_hit_tokens: int
    lookup_wait_s: float
    load_wait_s: float
    object_lease_s: float
    max_saved_ratio: float
    weights_version: str
    allow_private_hashes: bool
    empty_step_wait_s: float
    tame_queue_spin: bool
    is_strict: bool
    """A broken invariant ends the engine instead of one request's use of the pool: for tests."""

    def saves_as(self, kv_role: str) -> bool:
        """Whether an engine of this role saves anything."""
        if self.saves is not None:
            return self.saves
        return kv_role != "kv_consumer" or self.save_decode


def parse_pool(
    extra_config: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    device_type: str,
    default_host: str,
    read_text: Callable[[str], str] | None = None,
) -> tuple[PoolConfig, tuple[str, ...]]:
    """The settings of MooncakeStoreConnectorV1, and what the operator should know about them.

    Args:
        extra_config: `kv_connector_extra_config`.
        environ: the environment variables.
        device_type: vLLM's name of the device: cpu, npu or cuda.
        default_host: address of this machine where nothing sets one.
        read_text: reads `mooncake.json`; without it such a file is refused.

    Raises:
        ConfigError: names the key, where it stands, its value, its range and the remedy.
    """
    warnings: list[str] = []
    given = reading.read_options(extra_config, _VOCABULARY, warnings)

    def own_host() -> str:
        return reading.own_host(environ, default_host, key_name="transfer_host")

    config = build_pool(given, environ, device_type=device_type, own_host=own_host, read_text=read_text, warnings=warnings)
    return config, tuple(warnings)


def build_pool(
    options: Mapping[str, Value],
    environ: Mapping[str, str],
    *,
    device_type: str,
    own_host: Callable[[], str],
    read_text: Callable[[str], str] | None,
    warnings: list[str],
) -> PoolConfig:
    """The settings from options that were read already, among them those of MooncakeConnectorV1.

    Args:
        own_host: address of this machine where no `transfer_host` is set.
    Raises:
        ConfigError: as `parse_pool`.
    """
    path = options.get("mooncake_config_path") or environ.get(pool_keys.CONFIG_PATH_VARIABLE, "")
    in_file = mooncake_json.read_file(str(path), read_text, warnings) if path else {}
    given = {**in_file, **{name: value for name, value in options.items() if name in _BY_NAME}}
    _apply_master_variable(environ, given, warnings)
    reading.read_variables(environ, _VOCABULARY, pool_keys.POOL_BORROWED_VARIABLES, warnings, given)
    if "master_address" not in given:
        raise ConfigError(_no_master())
    values = reading.with_defaults(_KEYS, given)
    if "load_wait_s" not in given:
        values["load_wait_s"] = min(values["load_wait_s"], values["object_lease_s"] / 3)
    if values["lookup_wait_ms"] is None:
        values["lookup_wait_ms"] = 1e3 * (limits.LOOKUP_WAIT_CPU_S if device_type == "cpu" else limits.LOOKUP_WAIT_S)
    _check_relations(values)
    return PoolConfig(
        **{
            **{name: values[name] for name in PoolConfig.__struct_fields__ if name in values},
            **reading.engine_values(values, environ, device_type),
            "host": values["transfer_host"] or own_host(),
            # Mooncake's name for having none.
            "tenant": "" if values["tenant"] == "default" else values["tenant"],
            "lookup_wait_s": values["lookup_wait_ms"] / 1e3,
        }
    )


def _apply_master_variable(environ: Mapping[str, str], given: dict[str, Value], warnings: list[str]) -> None:
    text, key = environ.get(pool_keys.MASTER_VARIABLE, "").strip(), _BY_NAME["master_address"]
    if not text:
        return
    if "master_address" not in given:
        given["master_address"] = reading.read(key, text, name=pool_keys.MASTER_VARIABLE, where="environment variable")
    elif given["master_address"] != text:
        warnings.append(
            f"environment variable {pool_keys.MASTER_VARIABLE}={reading.shown(key, text)} is ignored: a key or mooncake.json "
            f"sets {given['master_address']}"
        )


def _no_master() -> str:
    lease_ms, client_ttl_s = limits.OBJECT_LEASE_S * 1e3, limits.MASTER_CLIENT_TTL_S
    return (
        f"the prefix pool needs the address of a mooncake_master; set master_address (host:port) in {reading.EXTRA_CONFIG}, or "
        f"master_server_address in the mooncake.json that mooncake_config_path or {pool_keys.CONFIG_PATH_VARIABLE} names, or "
        f"the environment variable {pool_keys.MASTER_VARIABLE}; this starts one: mooncake_master --rpc_port=50051 "
        f"--default_kv_lease_ttl={lease_ms:.0f} --client_ttl={client_ttl_s:.0f}"
    )


def _check_relations(values: dict[str, Any]) -> None:
    if values["load_wait_s"] >= values["object_lease_s"] / 2:
        raise ConfigError(
            f"load_wait_s={values['load_wait_s']:g} must be below half of object_lease_s={values['object_lease_s']:g}: what a "
            "lookup found could be evicted before it is loaded; lower load_wait_s, or raise object_lease_s together with the "
            "master's --default_kv_lease_ttl"
        )
    if values["save_decode"] and values["saves"] is False:
        raise ConfigError("save_decode=true saves, but saves=false forbids it; leave one of them out")
