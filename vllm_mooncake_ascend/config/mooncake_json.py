"""`mooncake.json`, the file in which users of vLLM and vllm-ascend describe their pool. It belongs to other programs, too: what
is not known here is a warning, what is known and wrong is an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from vllm_mooncake_ascend.config import pool_keys, reading
from vllm_mooncake_ascend.config.keys import SHARED_KEYS, Value
from vllm_mooncake_ascend.errors import ConfigError

_BY_NAME = {key.name: key for key in (*SHARED_KEYS, *pool_keys.POOL_KEYS)}
_ENTRIES = {entry.name: entry for entry in pool_keys.FILE_KEYS}


def read_file(path: str, read_text: Callable[[str], str] | None, warnings: list[str]) -> dict[str, Value]:
    """What the file says, under the names of our keys.

    Raises:
        ConfigError: it cannot be read, or one of its values is wrong.
    """
    given: dict[str, Value] = {}
    content = _content(path, read_text)
    for name, value in content.items():
        entry = _ENTRIES.get(name)
        if entry is None and name != pool_keys.MODE.name:
            warnings.append(f"{path}: {name} is unknown here and ignored; {reading.nearest(name, _ENTRIES)}")
        elif entry is None or value is None or value in entry.quiet:
            continue
        elif not entry.stands_for:
            warnings.append(f"{path}: {name} is ignored: {entry.remark}")
        elif not reading.is_blank(_BY_NAME[entry.stands_for], value):
            given[entry.stands_for] = reading.read(_BY_NAME[entry.stands_for], value, name=name, where=path)
    _apply_mode(path, content, given)
    return given


def _apply_mode(path: str, content: Mapping[str, object], given: dict[str, Value]) -> None:
    mode = content.get(pool_keys.MODE.name)
    if mode is None:
        return
    mode = reading.read(pool_keys.MODE, mode, where=path)
    if mode == "embedded" and given.get("segment_bytes") == 0:
        raise ConfigError(
            f"{path}: mode='embedded' lends memory, but global_segment_size is 0; set a size such as '4GB', or mode to "
            "'standalone-store' if mooncake_client processes own the memory"
        )
    if mode == "standalone-store" and given.setdefault("segment_bytes", 0) != 0:
        raise ConfigError(
            f"{path}: mode='standalone-store' lends no memory, but global_segment_size={content['global_segment_size']!r}; "
            "set it to 0, or mode to 'embedded'"
        )


def _content(path: str, read_text: Callable[[str], str] | None) -> dict[str, object]:
    if read_text is None:
        raise ConfigError(f"mooncake.json at {path!r} cannot be read here; set its values in {reading.EXTRA_CONFIG}")
    remedy = f"set mooncake_config_path or {pool_keys.CONFIG_PATH_VARIABLE} to a file that is there, or neither"
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"mooncake.json at {path!r} cannot be read: {error}; {remedy}") from error
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not one JSON object of keys and values: {error}") from error
