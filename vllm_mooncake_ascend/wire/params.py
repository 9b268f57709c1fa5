"""kv_transfer_params: the contract of proxy, prefill and decode, as it travels in API bodies.

Request to prefill:      {"do_remote_decode": true,  "transfer_id": optional}
Prefill's response, passed on unchanged as request to decode:
    {"do_remote_prefill": true, "do_remote_decode": false, "transfer_id", "remote_incarnation", "remote_host",
     "remote_port", "remote_num_tokens", "remote_prompt_digest", "issued_at_s", "remote_dp_size" (with several DP ranks),
     "signature" (with a cluster secret)}

A proxy that sends a request to prefill and decode at once knows the engine from an earlier response: it gives decode the same
with the `transfer_id` it gives prefill, `remote_num_tokens` 0 and no digest (`foretell`).

Everything here may have been written by any API client: parsing validates every field, never asserts, ignores unknown
keys (vLLM itself adds some), and tells what is wrong in a RemoteProtocolError. vLLM copies one dict to every prompt of a
list and to every n>1 child; the digest of the prompt tells them apart.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import RemoteProtocolError
from vllm_mooncake_ascend.types import Incarnation, PeerAddress, TransferId


class RemoteDecode(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose KV this engine is to keep for a decode engine."""

    transfer_id: TransferId | None
    """None: a router that knows only the sequential flow; this engine mints the id."""


class RemotePrefill(msgspec.Struct, frozen=True, kw_only=True):
    """A request whose KV is to be read from a prefill engine."""

    transfer_id: TransferId
    incarnation: Incarnation
    address: PeerAddress
    num_tokens: int
    """Prompt tokens whose KV prefill has; 0 where the issuer does not know it yet."""
    prompt_digest: bytes
    """Empty where the issuer does not know it; the Offer then carries it."""


_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,252})")
_ZONE = re.compile(r"[A-Za-z0-9._-]{1,15}")
"""Of an IPv6 address: an interface. `ipaddress` takes anything for one, ZMQ does not."""
_DIGEST = re.compile(r"([0-9a-fA-F]{64})?")
_SIGNED = (
    "transfer_id",
    "remote_incarnation",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_prompt_digest",
    "issued_at_s",
)


def parse(params: object, *, secret: bytes | None, now_s: float) -> RemoteDecode | RemotePrefill | None:
    """Meaning of a request's kv_transfer_params, or None when they ask nothing of us.

    Args:
        params: what the API body held, of any type.
        secret: the cluster secret; with one, params that name a remote engine must be signed and fresh.
        now_s: wall-clock seconds, compared with `issued_at_s`.

    Raises:
        RemoteProtocolError: a value is not what the module's table says; names the key and the remedy.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise RemoteProtocolError(f"kv_transfer_params must be an object, got {type(params).__name__}")
    if _flag(params, "do_remote_prefill"):
        transfer = RemotePrefill(
            transfer_id=TransferId(_text(params, "transfer_id")),
            incarnation=Incarnation(_text(params, "remote_incarnation")),
            address=format_address(_host(params), _integer(params, "remote_port", 1, 65_535)),
            num_tokens=_integer(params, "remote_num_tokens", 0, limits.MAX_BLOCKS_PER_TRANSFER * 1024),
            prompt_digest=_digest(params),
        )
        if secret is not None:  # after all signed fields are known to be plain numbers and texts
            _check_signature(params, secret, now_s)
        return transfer
    if _flag(params, "do_remote_decode"):
        has_id = params.get("transfer_id") is not None
        return RemoteDecode(transfer_id=TransferId(_text(params, "transfer_id")) if has_id else None)
    return None


def issue(transfer: RemotePrefill, *, secret: bytes | None, now_s: float) -> dict[str, Any]:
    """What prefill returns with its response: the params a decode request must carry."""
    host, port = split_address(transfer.address)
    params: dict[str, Any] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": transfer.transfer_id,
        "remote_incarnation": transfer.incarnation,
        "remote_host": host,
        "remote_port": port,
        "remote_num_tokens": transfer.num_tokens,
        "remote_prompt_digest": transfer.prompt_digest.hex(),
        "issued_at_s": int(now_s),
    }
    if secret is not None:
        params["signature"] = _signature(params, secret)
    return params


def foretell(
    params: Mapping[str, Any], transfer_id: TransferId, *, secret: bytes | None, now_s: float
) -> dict[str, Any] | None:
    """What a decode request may carry before its prefill has ended: the params of an earlier transfer, made those of the one
    that the same engine will announce under `transfer_id`. None where nobody can say: the engine has several DP ranks, it signs
    its params and the secret is not known here, or they are none of ours.
    """
    if params.get("remote_dp_size", 1) != 1 or ("signature" in params) != (secret is not None):
        return None
    try:
        earlier = parse(params, secret=None, now_s=now_s)
    except RemoteProtocolError:
        return None
    if not isinstance(earlier, RemotePrefill):
        return None
    transfer = msgspec.structs.replace(earlier, transfer_id=transfer_id, num_tokens=0, prompt_digest=b"")
    return issue(transfer, secret=secret, now_s=now_s)


def format_address(host: str, port: int) -> PeerAddress:
    """`host:port`, IPv6 hosts in brackets."""
    return PeerAddress(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def split_address(address: PeerAddress) -> tuple[str, int]:
    """Inverse of `format_address`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _signature(params: Mapping[str, Any], secret: bytes) -> str:
    """HMAC-SHA256 over the named fields only: routers and vLLM add fields of their own."""
    named = json.dumps([params.get(key) for key in _SIGNED], separators=(",", ":")).encode()
    return hmac.new(secret, named, hashlib.sha256).hexdigest()


def _check_signature(params: Mapping[str, Any], secret: bytes, now_s: float) -> None:
    issued_at_s = _integer(params, "issued_at_s", 0, 1 << 53)
    given = params.get("signature")
    genuine = _signature(params, secret)
    if not isinstance(given, str) or not given.isascii() or not hmac.compare_digest(given, genuine):
        raise RemoteProtocolError(
            "kv_transfer_params carry no valid signature; this cluster has a secret, so they must come unchanged from a "
            "prefill engine with the same secret"
        )
    if abs(now_s - issued_at_s) > limits.PARAMS_MAX_AGE_S:
        raise RemoteProtocolError(
            f"kv_transfer_params were issued {now_s - issued_at_s:.0f} s ago, the limit is {limits.PARAMS_MAX_AGE_S:.0f} s;"
            " check the clocks of the engines, or the queue before decode"
        )


def _flag(params: Mapping[str, Any], key: str) -> bool:
    value = params.get(key, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RemoteProtocolError(f"kv_transfer_params[{key!r}] must be true or false, got {_shown(value)}")
    return value


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= limits.MAX_ID_CHARS or not value.isprintable():
        raise RemoteProtocolError(
            f"kv_transfer_params[{key!r}] must be printable text of 1 to {limits.MAX_ID_CHARS} characters, got {_shown(value)}"
        )
    return value


def _host(params: Mapping[str, Any]) -> str:
    """An IP address or a host name: nothing else may become part of a socket's address."""
    value = _text(params, "remote_host")
    try:
        zone = getattr(ipaddress.ip_address(value), "scope_id", None)
        is_host = zone is None or _ZONE.fullmatch(zone) is not None
    except ValueError:
        is_host = _HOST_NAME.fullmatch(value) is not None
    if not is_host:
        raise RemoteProtocolError(
            f"kv_transfer_params['remote_host'] must be an IP address or a host name, got {_shown(value)}"
        )
    return value


def _integer(params: Mapping[str, Any], key: str, lowest: int, highest: int) -> int:
    value = params.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise RemoteProtocolError(f"kv_transfer_params[{key!r}] must be {lowest} to {highest}, got {_shown(value)}")
    return value


def _digest(params: Mapping[str, Any]) -> bytes:
    value = params.get("remote_prompt_digest", "")
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise RemoteProtocolError(f"kv_transfer_params['remote_prompt_digest'] must be 64 hex digits, got {_shown(value)}")
    return bytes.fromhex(value)


def _shown(value: object) -> str:
    """`repr`, but short and bounded whatever the value is: API clients choose it."""
    return reprlib.repr(value)
