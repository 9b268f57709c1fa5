"""P2PConfig: the settings of MooncakeConnectorV1, checked. Wrong ones end the start with a message that says the remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vllm_mooncake_ascend.config import keys, pool_keys, reading
from vllm_mooncake_ascend.config.keys import Borrowed
from vllm_mooncake_ascend.config.pool import PoolConfig, build_pool
from vllm_mooncake_ascend.config.reading import Vocabulary
from vllm_mooncake_ascend.errors import ConfigError

_KEYS = (*keys.SHARED_KEYS, *keys.P2P_KEYS)
_BORROWED = (*keys.SHARED_BORROWED_KEYS, *keys.P2P_BORROWED_KEYS)
_OF_THE_POOL = "is a setting of the prefix pool; set prefix_pooling=true, too, or leave it out"
_VOCABULARY = Vocabulary(
    keys=_KEYS,
    borrowed=(
        *_BORROWED,
        *(
            Borrowed(name=entry.name, quiet=entry.quiet, remark="it is about the prefix pool, and prefix_pooling is not set")
            for entry in pool_keys.POOL_BORROWED_KEYS
        ),
    ),
    elsewhere={key.name: _OF_THE_POOL for key in pool_keys.POOL_KEYS},
)
_VOCABULARY_WITH_POOL = Vocabulary(keys=(*_KEYS, *pool_keys.POOL_KEYS), borrowed=(*_BORROWED, *pool_keys.POOL_BORROWED_KEYS))
_SECRET_MIN_CHARS = 16
_ASCEND_PORTS = range(20_000, 36_000)


class P2PConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine; meanings stand in `config.keys`."""

    transfer_mode: str
    load_failure_policy: str
    protocol: str
    device_name: str
    transfer_host: str
    side_channel_host: str
    side_channel_port: int
    peers: tuple[str, ...]
    secret: bytes | None
    lease_ttl_s: float
    lease_max_s: float
    max_pinned_ratio: float
    offer_wait_s: float
    read_wait_s: float
    min_remote_tokens: int
    empty_step_wait_s: float
    tame_queue_spin: bool
    is_strict: bool
    """A broken invariant ends the engine instead of one transfer: for tests."""
    pool: PoolConfig | None
    """With `prefix_pooling`."""

    def __repr__(self) -> str:
        """All settings but the secret, so that no log can hold it."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "secret"}
        shown["secret"] = "set" if self.secret else "none"
        return f"P2PConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def parse_p2p(
    extra_config: Mapping[str, object],
    environ: Mapping[str, str],
    *,
    device_type: str,
    default_host: str,
    read_text: Callable[[str], str] | None = None,
) -> tuple[P2PConfig, tuple[str, ...]]:
    """The settings, and what the operator should know about them.

    Args:
        extra_config: `kv_connector_extra_config`.
        environ: the environment variables.
        device_type: vLLM's name of the device: cpu, npu or cuda.
        default_host: address of this host where nothing sets one.
        read_text: reads the file that `cluster_secret_file` names, and `mooncake.json`; without it they are refused.

    Raises:
        ConfigError: names the key, its value, its range and the remedy.
    """
    warnings: list[str] = []
    has_pool = extra_config.get("prefix_pooling") is True
    given = reading.read_options(extra_config, _VOCABULARY_WITH_POOL if has_pool else _VOCABULARY, warnings)
    reading.read_variables(environ, _VOCABULARY, keys.BORROWED_VARIABLES, warnings, given)
    values = reading.with_defaults(_KEYS, given)
    if "lease_ttl_s" not in given:
        values["lease_ttl_s"] = min(values["lease_ttl_s"], values["lease_max_s"])
    _check_times(values)
    host = values["side_channel_host"] or reading.own_host(environ, default_host, key_name="side_channel_host")
    if device_type == "npu" and values["side_channel_port"] in _ASCEND_PORTS:
        warnings.append(
            f"side_channel_port={values['side_channel_port']} lies in {_ASCEND_PORTS.start} to {_ASCEND_PORTS.stop - 1}, "
            "from which Ascend's transport takes ports at random; choose another, or 0"
        )
    derived = reading.engine_values(values, environ, device_type)
    pool = None
    if has_pool:
        pool = build_pool(
            given, environ, device_type=device_type, own_host=lambda: host, read_text=read_text, warnings=warnings
        )
        _check_protocols(derived["protocol"], pool.protocol)
    config = P2PConfig(
        **{
            **{name: values[name] for name in P2PConfig.__struct_fields__ if name in values},
            **derived,
            "transfer_host": values["transfer_host"] or host,
            "side_channel_host": host,
            "secret": _secret(values, environ, read_text, warnings),
            "pool": pool,
        }
    )
    return config, tuple(warnings)


# --- relations ----------------------------------------------------------------------------------------------------------


def _check_times(values: dict[str, Any]) -> None:
    if values["lease_max_s"] < values["lease_ttl_s"]:
        raise ConfigError(
            f"lease_max_s={values['lease_max_s']:g} must not be below lease_ttl_s={values['lease_ttl_s']:g}: "
            "no lease could last its time; raise lease_max_s or lower lease_ttl_s"
        )


def _check_protocols(of_transfers: str, of_pool: str) -> None:
    """One process has one Mooncake, which is told its transport once."""
    if of_transfers != of_pool:
        raise ConfigError(
            f"transfers use protocol {of_transfers!r}, but mooncake.json says {of_pool!r} for the pool, and one process has "
            f"one transport; set protocol in {reading.EXTRA_CONFIG} for both, or correct mooncake.json"
        )


def _secret(
    values: dict[str, Any],
    environ: Mapping[str, str],
    read_text: Callable[[str], str] | None,
    warnings: list[str],
) -> bytes | None:
    path, text = values["cluster_secret_file"], values["cluster_secret"]
    if path and text:
        raise ConfigError("cluster_secret and cluster_secret_file are both set; keep one")
    if text:
        warnings.append(
            "cluster_secret stands in vLLM's options, which are printed and visible in the process list; "
            f"prefer {keys.SECRET_VARIABLE} or cluster_secret_file"
        )
    if path:
        text = _read_secret_file(path, read_text)
    text = text or environ.get(keys.SECRET_VARIABLE, "").strip()
    if not text:
        return None
    if len(text) < _SECRET_MIN_CHARS:
        raise ConfigError(
            f"the cluster secret has {len(text)} characters, at least {_SECRET_MIN_CHARS} are needed; "
            "`openssl rand -hex 32` makes a good one"
        )
    return bytes(text, "utf-8")


def _read_secret_file(path: str, read_text: Callable[[str], str] | None) -> str:
    if read_text is None:
        raise ConfigError(f"cluster_secret_file={path!r} cannot be read here; set {keys.SECRET_VARIABLE} instead")
    try:
        text = read_text(path).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cluster_secret_file={path!r} cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"cluster_secret_file={path!r} is empty; write the cluster secret into it")
    return text
