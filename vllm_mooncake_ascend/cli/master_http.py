"""What the master of a pool tells over HTTP, on its metrics port. Nothing of it grants an object lease.

(`/query_key` does, so it is not used: what was only looked at could not be removed for 30 s.)
"""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from vllm_mooncake_ascend.cli.scrape import totals_of
from vllm_mooncake_ascend.errors import ConfigError, MooncakeAscendError

DEFAULT_PORT = 9003
"""`--metrics_port` of a master that was not told another."""
ANSWER_TIMEOUT_S = 30.0
"""A million keys are 130 MB of text."""
KEYS_PER_QUESTION = 64
"""They go into the request's line."""
_T = TypeVar("_T")


class MasterUnreachable(MooncakeAscendError):
    """The master's HTTP port does not answer, or not as Mooncake's does."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one client lends to the pool."""

    name: str
    status: str
    used_bytes: int
    capacity_bytes: int


class _Segment(msgspec.Struct):
    segment_name: str
    status: str
    allocator_used_bytes: int
    allocator_capacity_bytes: int


class _Segments(msgspec.Struct):
    segments: list[_Segment]


class _Replica(msgspec.Struct, rename={"size": "size_"}):
    size: int


class _Object(msgspec.Struct):
    values: list[_Replica] | None = None


class _Objects(msgspec.Struct):
    data: dict[str, _Object]


def metrics_address(master_address: str) -> str:
    """Where a master that was not told otherwise answers over HTTP.

    Raises:
        ConfigError: it cannot be told of a master with stand-ins.
    """
    if "://" in master_address:
        raise ConfigError(f"the metrics port of {master_address} is not known; say --metrics HOST:PORT")
    return f"{master_address.rpartition(':')[0]}:{DEFAULT_PORT}"


class MasterHttp:
    """Reads one master's pages."""

    def __init__(self, address: str) -> None:
        """`address`: host:port."""
        self._url = f"http://{address}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def keys(self) -> list[str]:
        """Every key of the pool.

        Raises:
            MasterUnreachable: as every call here.
        """
        return self._read("/get_all_keys").decode(errors="replace").splitlines()

    def totals(self) -> dict[str, float]:
        """The master's metrics, each summed over its labels."""
        return totals_of(self._read("/metrics").decode(errors="replace"))

    def segments(self) -> tuple[Segment, ...]:
        """Who lends memory, by name."""
        found = self._parsed("/get_segments_detail", _Segments).segments
        segments = (
            Segment(
                name=one.segment_name,
                status=one.status,
                used_bytes=one.allocator_used_bytes,
                capacity_bytes=one.allocator_capacity_bytes,
            )
            for one in found
        )
        return tuple(sorted(segments, key=lambda segment: segment.name))

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Bytes of each object that is in somebody's memory now; the others are left out."""
        sizes: dict[str, int] = {}
        for first in range(0, len(keys), KEYS_PER_QUESTION):
            names = urllib.parse.quote(",".join(keys[first : first + KEYS_PER_QUESTION]), safe=",/")
            found = self._parsed(f"/batch_query_keys?keys={names}", _Objects).data
            sizes.update({key: one.values[0].size for key, one in found.items() if one.values})
        return sizes

    def _parsed(self, path: str, kind: type[_T]) -> _T:
        text = self._read(path)
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise MasterUnreachable(f"{self._url}{path} does not answer as a mooncake_master does: {error}") from error

    def _read(self, path: str) -> bytes:
        try:
            with self._opener.open(self._url + path, timeout=ANSWER_TIMEOUT_S) as response:
                return bytes(response.read())
        except (OSError, ValueError) as error:
            raise MasterUnreachable(
                f"asking {self._url}{path}: {error}; is this the metrics port of a mooncake_master? --metrics HOST:PORT says "
                "which it is"
            ) from error
