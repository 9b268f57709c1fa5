"""What an operator says to the proxy, checked before anything is opened."""

from __future__ import annotations

import urllib.parse
from typing import Literal

import msgspec

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.errors import ConfigError
from vllm_mooncake_ascend.proxy.exchange import OnPrefillUnavailable

Flow = Literal["sequential", "concurrent"]


class ProxySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All a proxy needs to run; made by `checked`."""

    prefill_urls: tuple[str, ...]
    decode_urls: tuple[str, ...]
    host: str
    port: int
    """0: any free port; the proxy says which."""
    on_prefill_unavailable: OnPrefillUnavailable = "fail"
    silence_s: float = limits.UPSTREAM_SILENCE_S
    drain_s: float = limits.DRAIN_S
    max_requests: int = limits.MAX_CLIENT_REQUESTS
    cluster_secret: bytes | None = None
    """The secret of the engines, for the releases this proxy sends to prefill, and for what it foretells decode."""
    flow: Flow = "sequential"
    """When decode's leg is sent: once prefill has answered, or beside it where prefill's answer is known beforehand."""


def checked(settings: ProxySettings) -> ProxySettings:
    """`settings` with its URLs in one form.

    Raises:
        ConfigError: a value cannot be meant; names the setting and the remedy.
    """
    if not 0 <= settings.port <= 65_535:
        raise ConfigError(f"port must be 0 to 65535, got {settings.port}")
    for name, seconds in (("silence_s", settings.silence_s), ("drain_s", settings.drain_s)):
        if not 0 < seconds <= 86_400:
            raise ConfigError(f"{name} must be more than 0 and at most 86400 seconds, got {seconds}")
    return msgspec.structs.replace(
        settings,
        prefill_urls=_checked_urls("prefill", settings.prefill_urls),
        decode_urls=_checked_urls("decode", settings.decode_urls),
    )


def _checked_urls(role: str, urls: tuple[str, ...]) -> tuple[str, ...]:
    if not urls:
        raise ConfigError(f"no {role} instance is given; name at least one with --{role} http://HOST:PORT")
    normal = tuple(_checked_url(role, url) for url in urls)
    for url in normal:
        if normal.count(url) > 1:
            raise ConfigError(f"{role} instance {url} is given twice; each must be named once")
    return normal


def _checked_url(role: str, url: str) -> str:
    """scheme://host[:port][/prefix] without a slash at its end; IPv6 hosts stand in brackets."""
    expected = "expected http://HOST:PORT, an IPv6 host in brackets: http://[::1]:8000"
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{role} instance {url!r} is no URL ({error}); {expected}") from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or port == 0:
        raise ConfigError(f"{role} instance {url!r} is no URL of an instance; {expected}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
