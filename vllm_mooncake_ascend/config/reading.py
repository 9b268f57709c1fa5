"""Reading settings of either connector: which names are known, what a value may be, and what is said about a wrong one.

A refusal names the place, the key, the value, the range and the remedy. A name another connector uses is taken for ours where
it means the same, and is a warning where it does not.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from vllm_mooncake_ascend.config import keys
from vllm_mooncake_ascend.config.keys import Borrowed, Key, Kind, Value
from vllm_mooncake_ascend.errors import ConfigError

EXTRA_CONFIG = "kv_connector_extra_config"

_PROTOCOLS = {"cpu": "tcp", "npu": "ascend", "cuda": "rdma"}
_HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_PORT = re.compile(r"[0-9]{1,5}")
_SCHEMES = ("etcd://", "redis://", "k8s://")
_CREDENTIALS = re.compile(r"^.*@", re.DOTALL)
"""Mooncake does not read them from an address, and prints them (0.3.13.post1, `Client::ConnectToMaster`)."""
_SIZE = re.compile(r"(?P<number>[0-9]{1,18}(\.[0-9]{1,9})?)\s*(?P<unit>[kmgt]?)(i?b)?", re.IGNORECASE | re.ASCII)
_REACHABLE = "an IP address or host name that peers can connect to"


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The names that one connector understands in `kv_connector_extra_config`."""

    keys: tuple[Key, ...]
    borrowed: tuple[Borrowed, ...]
    elsewhere: Mapping[str, str] = {}
    """Names of keys that mean something, but not here: what to say about them."""


# --- all of a mapping ---------------------------------------------------------------------------------------------------


def read_options(extra_config: Mapping[str, object], vocabulary: Vocabulary, warnings: list[str]) -> dict[str, Value]:
    """Our keys with a value each; what is not set is not in it.

    Raises:
        ConfigError: an unknown key, or a value that is not one.
    """
    by_name = {key.name: key for key in vocabulary.keys}
    borrowed = {entry.name: entry for entry in vocabulary.borrowed}
    given: dict[str, Value] = {}
    for name, value in extra_config.items():
        key = by_name.get(name)
        if name in borrowed:
            key = _lender(borrowed[name], value, {*extra_config, *given}, by_name, warnings)
        elif name in vocabulary.elsewhere:
            raise ConfigError(f"{EXTRA_CONFIG}: {name} {vocabulary.elsewhere[name]}")
        elif key is None:
            raise ConfigError(f"{EXTRA_CONFIG} has an unknown key {name!r}; {nearest(name, by_name)}")
        if key is not None and not is_blank(key, value):
            given[key.name] = read(key, value, name=name)
    return given


def _lender(entry: Borrowed, value: object, taken: set[str], by_name: Mapping[str, Key], warnings: list[str]) -> Key | None:
    """The key a borrowed one stands for, if its value counts."""
    if value in entry.quiet:
        return None
    if not entry.stands_for:
        warnings.append(f"{entry.name} is ignored: {entry.remark}")
    elif entry.stands_for in taken:
        warnings.append(f"{entry.name} is ignored: {entry.stands_for} is set too")
    else:
        key = by_name[entry.stands_for]
        warnings.append(f"{entry.name}={shown(key, value)} is taken for {entry.stands_for}, its name here")
        return key
    return None


def read_variables(
    environ: Mapping[str, str],
    vocabulary: Vocabulary,
    variables: Iterable[Borrowed],
    warnings: list[str],
    given: dict[str, Value],
) -> None:
    """Add to `given` what variables of other connectors say and nothing else has said.

    They are set for a whole machine: one that does not fit here is a warning, no error.
    """
    by_name = {key.name: key for key in vocabulary.keys}
    for entry in variables:
        text = environ.get(entry.name)
        if text is None:
            continue
        if not entry.stands_for or entry.stands_for in given:
            reason = entry.remark if not entry.stands_for else f"{entry.stands_for} is set"
            warnings.append(f"environment variable {entry.name} is ignored: {reason}")
            continue
        key = by_name[entry.stands_for]
        value = _parse(key, _from_text(key, text))
        if value is None:
            warnings.append(f"environment variable {entry.name}={text!r} is ignored: {key.name} must be {expected(key)}")
        else:
            warnings.append(f"environment variable {entry.name}={text} is taken for {key.name}")
            given[key.name] = value


def with_defaults(all_keys: Iterable[Key], given: Mapping[str, Value]) -> dict[str, Any]:
    """A value for every key; None where the default is derived."""
    return {key.name: given.get(key.name, key.default) for key in all_keys}


def nearest(name: str, known: Iterable[str]) -> str:
    """What the writer of an unknown name may have meant."""
    names = sorted(known)
    found = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"did you mean {found[0]!r}?" if found else f"known keys: {', '.join(names)}"


# --- one value ----------------------------------------------------------------------------------------------------------


def read(key: Key, value: object, *, name: str = "", where: str = EXTRA_CONFIG) -> Value:
    """The value of a key, as its kind has it.

    Args:
        name: what the key is called in that place, if not by our name.
        where: the place, for the message.
    Raises:
        ConfigError: it is not one.
    """
    found = _parse(key, value)
    if found is None:
        default = size(key.default) if key.kind == "size" and isinstance(key.default, int) else repr(key.default)
        remedy = f" (leave it out for {default})" if key.default is not None else ""
        raise ConfigError(f"{where}: {name or key.name}={shown(key, value)} must be {expected(key)}{remedy}")
    return found


def shown(key: Key, value: object) -> str:
    """A value for messages and logs, without what must not be read there."""
    if key.name == "cluster_secret":
        return "(not shown)"
    if key.kind == "address" and isinstance(value, str):
        return repr(_CREDENTIALS.sub("(not shown)@", value))
    return repr(value)


def is_blank(key: Key, value: object) -> bool:
    """An empty text where an address is asked for: a template that nobody filled in, as good as left out."""
    return key.kind in ("host", "address") and value == ""


def expected(key: Key) -> str:
    """What a value of this key must be, in words."""
    write = size if key.kind == "size" else figure
    return _KINDS[key.kind][1].format(
        choices=" or ".join(map(repr, key.choices)), lowest=write(key.lowest), highest=write(key.highest), kind=key.kind
    )


def figure(number: float) -> str:
    """A bound as people write it."""
    return str(int(number)) if number == int(number) else str(number)


def size(num_bytes: float) -> str:
    """A number of bytes as people write it."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor and num_bytes % factor == 0:
            return f"{int(num_bytes) // factor} {unit}"
    return f"{int(num_bytes)} bytes"


def _parse(key: Key, value: object) -> Value | None:
    """None: not a value of this key."""
    return _KINDS[key.kind][0](key, value)


def _choice(key: Key, value: object) -> str | None:
    return value if isinstance(value, str) and value in key.choices else None


def _text(_key: Key, value: object) -> str | None:
    return value.strip() if isinstance(value, str) else None


def _flag(_key: Key, value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _integer(key: Key, value: object) -> int | None:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and key.lowest <= value <= key.highest else None  # type: ignore[operator,return-value]


def _number(key: Key, value: object) -> int | float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and key.lowest <= value <= key.highest else None  # type: ignore[operator,return-value]


def _host(_key: Key, value: object) -> str | None:
    return value.strip() if isinstance(value, str) and is_reachable(value.strip()) else None


def _hosts(_key: Key, value: object) -> tuple[str, ...] | None:
    entries = _texts(value)
    if entries is None or not all(_is_network(entry) or _HOST_NAME.fullmatch(entry) for entry in entries):
        return None
    return entries


def _address(_key: Key, value: object) -> str | None:
    if not isinstance(value, str):
        return None
    text = value.strip()
    if _CREDENTIALS.search(text):
        return None
    scheme, separator, rest = text.partition("://")
    is_usable = scheme + separator in _SCHEMES and bool(rest) if separator else _is_host_and_port(text)
    return text if is_usable else None


def _segments(_key: Key, value: object) -> tuple[str, ...] | None:
    entries = _texts(value)
    return entries if entries is not None and all(map(_is_host_and_port, entries)) else None


def _size(key: Key, value: object) -> int | None:
    num_bytes = _bytes(value)
    if num_bytes is None or (num_bytes != 0 and not key.lowest <= num_bytes <= key.highest):
        return None
    return num_bytes


def _bytes(value: object) -> int | None:
    """Units are of 1024, with and without the i: so Mooncake, vLLM and vllm-ascend read them."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    return int(Fraction(match["number"]) * 1024 ** " kmgt".index(match["unit"].lower() or " "))


def _is_host_and_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    if host.startswith("["):
        host = host[1:-1] if host.endswith("]") else ""
    elif ":" in host:
        return False
    return is_reachable(host) and _PORT.fullmatch(port) is not None and 1 <= int(port) <= 65_535


_KINDS: Mapping[Kind, tuple[Callable[[Key, object], Value | None], str]] = {
    "choice": (_choice, "{choices}"),
    "text": (_text, "a text"),
    "flag": (_flag, "true or false"),
    "integer": (_integer, "a whole number of {lowest} to {highest}"),
    "seconds": (_number, "a number of {kind}, {lowest} to {highest}"),
    "milliseconds": (_number, "a number of {kind}, {lowest} to {highest}"),
    "ratio": (_number, "a share, {lowest} to {highest}"),
    "size": (_size, "0, or a size of {lowest} to {highest}: bytes, or a text such as '4GB' (units are of 1024)"),
    "host": (_host, _REACHABLE),
    "hosts": (_hosts, "a list of addresses (10.0.0.7), networks (10.0.0.0/8) and host names"),
    "address": (
        _address,
        f"host:port (10.0.0.7:50051), or an address that begins with {', '.join(_SCHEMES)}, without a password (of Redis: set "
        "MC_REDIS_PASSWORD)",
    ),
    "segments": (_segments, "a list of segments as Mooncake names them, host:port"),
}
"""How a kind is read, and what it is called in messages."""


def _from_text(key: Key, text: str) -> object:
    """The text of a variable as JSON would have it."""
    if key.kind not in ("seconds", "milliseconds", "ratio"):
        return text
    try:
        return float(text)
    except ValueError:
        return text


def _texts(value: object) -> tuple[str, ...] | None:
    """A list of texts, or one text with commas."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple)) or not all(isinstance(entry, str) for entry in entries):
        return None
    return tuple(entry.strip() for entry in entries if entry.strip())


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True


# --- what both connectors derive ----------------------------------------------------------------------------------------


def is_reachable(host: str) -> bool:
    """Whether others could connect to it, as far as its spelling tells."""
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return _HOST_NAME.fullmatch(host) is not None


def own_host(environ: Mapping[str, str], default_host: str, *, key_name: str) -> str:
    """Address of this machine where no key says it.

    Raises:
        ConfigError: it is none that others could connect to.
    """
    named = environ.get(keys.HOST_VARIABLE)
    host = named or default_host
    if not is_reachable(host):
        source = f"environment variable {keys.HOST_VARIABLE}={host!r}" if named else f"the address of this machine, {host!r},"
        raise ConfigError(f"{source} must be {_REACHABLE}; set it, or {key_name} in {EXTRA_CONFIG}")
    return host


def engine_values(values: Mapping[str, Any], environ: Mapping[str, str], device_type: str) -> dict[str, Any]:
    """The fields that both configurations have and that need more than their key.

    Raises:
        ConfigError: no protocol is set, and none is known for the device.
    """
    tame_queue_spin = values["tame_queue_spin"]
    return {
        "protocol": values["protocol"] or _default_protocol(device_type),
        "empty_step_wait_s": values["empty_step_wait_ms"] / 1e3,
        "tame_queue_spin": device_type == "cpu" if tame_queue_spin is None else tame_queue_spin,
        "is_strict": environ.get(keys.STRICT_VARIABLE, "") not in ("", "0"),
    }


def _default_protocol(device_type: str) -> str:
    if device_type not in _PROTOCOLS:
        raise ConfigError(f"no default protocol for device {device_type!r} (known: {', '.join(_PROTOCOLS)}); set protocol")
    return _PROTOCOLS[device_type]
