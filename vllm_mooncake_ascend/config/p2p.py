"""P2PConfig: the settings of MooncakeConnectorV1, checked. Wrong ones end the start with a message that says the remedy."""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vllm_mooncake_ascend.config import keys
from vllm_mooncake_ascend.config.keys import Borrowed, Key, Value
from vllm_mooncake_ascend.errors import ConfigError

_BY_NAME = {key.name: key for key in keys.KEYS}
_PROTOCOLS = {"cpu": "tcp", "npu": "ascend", "cuda": "rdma"}
_SECRET_MIN_CHARS = 16
_ASCEND_PORTS = range(20_000, 36_000)
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


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
        read_text: reads the file `cluster_secret_file` names; without it that key is refused.

    Raises:
        ConfigError: names the key, its value, its range and the remedy.
    """
    warnings: list[str] = []
    given = _own_values(extra_config, warnings)
    _apply_variables(environ, given, warnings)
    values: dict[str, Any] = {key.name: _read(key, given[key.name]) if key.name in given else key.default for key in keys.KEYS}
    if "lease_ttl_s" not in given:
        values["lease_ttl_s"] = min(values["lease_ttl_s"], values["lease_max_s"])
    _refuse_what_is_not_built(values)
    host = values["side_channel_host"] or environ.get(keys.HOST_VARIABLE) or default_host
    _check_host("side_channel_host", host)
    if values["transfer_host"]:
        _check_host("transfer_host", values["transfer_host"])
    _check_times(values)
    if device_type == "npu" and values["side_channel_port"] in _ASCEND_PORTS:
        warnings.append(
            f"side_channel_port={values['side_channel_port']} lies in {_ASCEND_PORTS.start} to {_ASCEND_PORTS.stop - 1}, "
            "from which Ascend's transport takes ports at random; choose another, or 0"
        )
    tame_queue_spin = values["tame_queue_spin"]
    config = P2PConfig(
        **{
            **{name: values[name] for name in P2PConfig.__struct_fields__ if name in values},
            "protocol": values["protocol"] or _default_protocol(device_type),
            "transfer_host": values["transfer_host"] or host,
            "side_channel_host": host,
            "secret": _secret(values, environ, read_text, warnings),
            "empty_step_wait_s": values["empty_step_wait_ms"] / 1e3,
            "is_strict": environ.get(keys.STRICT_VARIABLE, "") not in ("", "0"),
            "tame_queue_spin": device_type == "cpu" if tame_queue_spin is None else tame_queue_spin,
        }
    )
    return config, tuple(warnings)


# --- which keys ---------------------------------------------------------------------------------------------------------


def _own_values(extra_config: Mapping[str, object], warnings: list[str]) -> dict[str, object]:
    borrowed = {entry.name: entry for entry in keys.BORROWED_KEYS}
    given: dict[str, object] = {}
    for name, value in extra_config.items():
        if name in _BY_NAME:
            given[name] = value
        elif name in borrowed:
            _borrow(borrowed[name], value, extra_config, given, warnings)
        else:
            raise ConfigError(f"kv_connector_extra_config has an unknown key {name!r}; {_nearest(name)}")
    return given


def _borrow(
    entry: Borrowed, value: object, extra_config: Mapping[str, object], given: dict[str, object], warnings: list[str]
) -> None:
    if not entry.stands_for:
        warnings.append(f"{entry.name} is ignored: {entry.remark}")
    elif entry.stands_for in extra_config:
        warnings.append(f"{entry.name} is ignored: {entry.stands_for} is set too")
    else:
        warnings.append(f"{entry.name}={value!r} is taken for {entry.stands_for}, its name here")
        given[entry.stands_for] = value


def _apply_variables(environ: Mapping[str, str], given: dict[str, object], warnings: list[str]) -> None:
    """Variables of other connectors are set for a whole machine: one that does not fit here is a warning, no error."""
    for entry in keys.BORROWED_VARIABLES:
        text = environ.get(entry.name)
        if text is None:
            continue
        if not entry.stands_for or entry.stands_for in given:
            reason = entry.remark if not entry.stands_for else f"{entry.stands_for} is set"
            warnings.append(f"environment variable {entry.name} is ignored: {reason}")
            continue
        key = _BY_NAME[entry.stands_for]
        try:
            given[key.name] = _read(key, float(text))
        except (ValueError, ConfigError):
            warnings.append(
                f"environment variable {entry.name}={text!r} is ignored: {key.name} must be {key.lowest:g} to {key.highest:g}"
            )
        else:
            warnings.append(f"environment variable {entry.name}={text} is taken for {key.name}")


def _nearest(name: str) -> str:
    found = difflib.get_close_matches(name.lower(), _BY_NAME, n=1, cutoff=0.6)
    return f"did you mean {found[0]!r}?" if found else f"known keys: {', '.join(sorted(_BY_NAME))}"


# --- single values ------------------------------------------------------------------------------------------------------


def _read(key: Key, value: object) -> Value:
    match key.kind:
        case "choice":
            return _choice(key, value)
        case "text":
            return _text(key, value)
        case "flag":
            if not isinstance(value, bool):
                raise _wrong(key, value, "true or false")
            return value
        case "integer":
            return _number(key, value, int, "a whole number of")
        case "hosts":
            return _hosts(key, value)
        case "seconds" | "milliseconds":
            return _number(key, value, (int, float), f"a number of {key.kind},")
        case "ratio":
            return _number(key, value, (int, float), "a share,")


def _choice(key: Key, value: object) -> str:
    if not isinstance(value, str) or value not in key.choices:
        raise _wrong(key, value, " or ".join(map(repr, key.choices)))
    return value


def _text(key: Key, value: object) -> str:
    if not isinstance(value, str):
        raise _wrong(key, value, "a text")
    return value.strip()


def _number(key: Key, value: object, kinds: type | tuple[type, ...], what: str) -> int | float:
    in_range = isinstance(value, kinds) and not isinstance(value, bool) and key.lowest <= value <= key.highest  # type: ignore[operator]
    if not in_range:
        raise _wrong(key, value, f"{what} {key.lowest:g} to {key.highest:g}")
    return value  # type: ignore[return-value]


def _hosts(key: Key, value: object) -> tuple[str, ...]:
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        raise _wrong(key, value, "a list of addresses, networks and host names")
    hosts = tuple(entry.strip() for entry in entries if entry.strip())
    for host in hosts:
        if not _is_network(host) and not _HOST_NAME.fullmatch(host):
            raise _wrong(key, host, "addresses (10.0.0.7), networks (10.0.0.0/8) and host names only")
    return hosts


def _wrong(key: Key, value: object, expected: str) -> ConfigError:
    shown = "(not shown)" if key.name == "cluster_secret" else repr(value)
    remedy = f" (leave it out for {key.default!r})" if key.default is not None else ""
    return ConfigError(f"kv_connector_extra_config: {key.name}={shown} must be {expected}{remedy}")


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


# --- relations ----------------------------------------------------------------------------------------------------------


def _refuse_what_is_not_built(values: dict[str, Any]) -> None:
    if values["transfer_mode"] == "stream":
        raise ConfigError("transfer_mode='stream' is not built yet; use 'after_prefill' (or leave it out)")
    if values["prefix_pooling"]:
        raise ConfigError("prefix_pooling=true: the prefix pool is not built yet; leave it out")


def _check_host(name: str, host: str) -> None:
    try:
        usable = not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        usable = _HOST_NAME.fullmatch(host) is not None
    if not usable:
        raise ConfigError(
            f"{name}={host!r} must be an IP address or host name that peers can connect to; "
            f"set {name} in kv_connector_extra_config, or {keys.HOST_VARIABLE}"
        )


def _check_times(values: dict[str, Any]) -> None:
    if values["lease_max_s"] < values["lease_ttl_s"]:
        raise ConfigError(
            f"lease_max_s={values['lease_max_s']:g} must not be below lease_ttl_s={values['lease_ttl_s']:g}: "
            "no lease could last its time; raise lease_max_s or lower lease_ttl_s"
        )


def _default_protocol(device_type: str) -> str:
    if device_type not in _PROTOCOLS:
        raise ConfigError(f"no default protocol for device {device_type!r} (known: {', '.join(_PROTOCOLS)}); set protocol")
    return _PROTOCOLS[device_type]


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
