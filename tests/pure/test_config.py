"""config: every wrong setting ends in an error that names key, value and range; every right one in a P2PConfig."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.config import P2PConfig, keys, page, parse_p2p
from vllm_mooncake_ascend.errors import ConfigError

SECRET = "0123456789abcdef"
ROOT = Path(__file__).parents[2]


def parse(extra: dict[str, object] | None = None, environ: dict[str, str] | None = None, *, device: str = "cpu") -> P2PConfig:
    """The settings without the warnings."""
    return parse_p2p(extra or {}, environ or {}, device_type=device, default_host="10.0.0.9")[0]


def warnings_of(extra: dict[str, object], environ: dict[str, str] | None = None, *, device: str = "cpu") -> tuple[str, ...]:
    """What the operator is told."""
    return parse_p2p(extra, environ or {}, device_type=device, default_host="10.0.0.9")[1]


def test_no_setting_gives_the_defaults() -> None:
    """Goal: zero configuration works. Method: compare with the values of the design page."""
    expected = P2PConfig(
        transfer_mode="after_prefill",
        load_failure_policy="recompute",
        protocol="tcp",
        device_name="",
        transfer_host="10.0.0.9",
        side_channel_host="10.0.0.9",
        side_channel_port=0,
        peers=(),
        secret=None,
        lease_ttl_s=30.0,
        lease_max_s=300.0,
        max_pinned_ratio=0.9,
        offer_wait_s=120.0,
        read_wait_s=60.0,
        min_remote_tokens=1,
        empty_step_wait_s=0.005,
        tame_queue_spin=True,
        is_strict=False,
        pool=None,
    )
    assert expected == parse()


@pytest.mark.parametrize(("device", "protocol"), [("cpu", "tcp"), ("npu", "ascend"), ("cuda", "rdma")])
def test_the_protocol_follows_the_device(device: str, protocol: str) -> None:
    """Goal: nobody need name the transport. Method: each device of the design."""
    assert protocol == parse(device=device).protocol


def test_a_device_nobody_knows_needs_a_protocol() -> None:
    """Goal: no transport is guessed. Method: a device without a default."""
    with pytest.raises(ConfigError, match="no default protocol for device 'tpu'"):
        parse(device="tpu")


@pytest.mark.parametrize(
    ("extra", "environ", "host"),
    [
        ({}, {}, "10.0.0.9"),
        ({}, {"VLLM_HOST_IP": "10.0.0.5"}, "10.0.0.5"),
        ({"side_channel_host": "node-7"}, {"VLLM_HOST_IP": "10.0.0.5"}, "node-7"),
    ],
)
def test_the_address_is_the_most_specific_one_given(extra: dict[str, object], environ: dict[str, str], host: str) -> None:
    """Goal: key before variable before the host's own. Method: each with the weaker ones present."""
    config = parse(extra, environ)
    assert (host, host) == (config.side_channel_host, config.transfer_host)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lease_ttl": 30}, "unknown key 'lease_ttl'; did you mean 'lease_ttl_s'?"),
        ({"lease_ttl_ms": 30_000}, "unknown key 'lease_ttl_ms'; did you mean 'lease_ttl_s'?"),
        ({"Peers": []}, "unknown key 'Peers'; did you mean 'peers'?"),
        ({"qqq": 1}, "unknown key 'qqq'; known keys: cluster_secret"),
        ({"lease_ttl_s": 30_000}, "lease_ttl_s=30000 must be a number of seconds, 1 to 3600 (leave it out for 30.0)"),
        ({"lease_ttl_s": "30s"}, "lease_ttl_s='30s' must be a number of seconds, 1 to 3600"),
        ({"lease_ttl_s": True}, "lease_ttl_s=True must be a number of seconds"),
        ({"lease_ttl_s": float("nan")}, "lease_ttl_s=nan must be a number of seconds"),
        ({"lease_max_s": 5, "lease_ttl_s": 10}, "lease_max_s=5 must not be below lease_ttl_s=10"),
        ({"read_wait_s": 101}, "read_wait_s=101 must be a number of seconds, 1 to 100"),
        ({"max_pinned_ratio": 50}, "max_pinned_ratio=50 must be a share, 0.01 to 0.95"),
        ({"min_remote_tokens": 1.5}, "min_remote_tokens=1.5 must be a whole number of 1 to"),
        ({"side_channel_port": 65_536}, "side_channel_port=65536 must be a whole number of 0 to 65535"),
        ({"side_channel_host": "0.0.0.0"}, "side_channel_host='0.0.0.0' must be an IP address or host name that peers"),
        ({"side_channel_host": "tcp://x"}, "side_channel_host='tcp://x' must be an IP address or host name"),
        ({"transfer_host": "::"}, "transfer_host='::' must be an IP address or host name"),
        ({"transfer_mode": "push"}, "transfer_mode='push' must be 'after_prefill' or 'stream'"),
        ({"prefix_pooling": True}, "the prefix pool needs the address of a mooncake_master"),
        ({"master_address": "10.0.0.7:50051"}, "master_address is a setting of the prefix pool; set prefix_pooling=true, too"),
        ({"prefix_pooling": "yes"}, "prefix_pooling='yes' must be true or false"),
        ({"protocol": "udp"}, "protocol='udp' must be 'tcp' or 'rdma' or 'ascend'"),
        ({"device_name": 0}, "device_name=0 must be a text"),
        ({"peers": 7}, "peers=7 must be a list of addresses"),
        ({"peers": ["10.0.0.0/33"]}, "peers=['10.0.0.0/33'] must be a list of addresses (10.0.0.7), networks"),
        ({"cluster_secret": "short"}, "the cluster secret has 5 characters, at least 16 are needed"),
        ({"cluster_secret": 7}, "cluster_secret=(not shown) must be a text"),
        ({"cluster_secret": SECRET, "cluster_secret_file": "f"}, "are both set; keep one"),
        ({"cluster_secret_file": "f"}, "cluster_secret_file='f' cannot be read here"),
    ],
)
def test_a_wrong_setting_is_refused_with_key_value_range_and_remedy(extra: dict[str, object], message: str) -> None:
    """Goal: the operator mends it from the message alone. Method: one wrong setting at a time."""
    with pytest.raises(ConfigError) as caught:
        parse(extra)
    assert message in str(caught.value)


_junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.text(max_size=5))


@given(st.dictionaries(st.sampled_from([key.name for key in (*keys.SHARED_KEYS, *keys.P2P_KEYS)]), _junk, max_size=3))
def test_any_values_give_a_config_or_a_config_error(extra: dict[str, object]) -> None:
    """Goal: no setting raises anything else. Method: values of every JSON type under every key."""
    try:
        config = parse(extra)
    except ConfigError:
        return
    assert limits.LEASE_TTL_MIN_S <= config.lease_ttl_s <= config.lease_max_s <= limits.LEASE_CEILING_S


def test_a_short_lease_max_shortens_the_ttl_that_nobody_set() -> None:
    """Goal: lowering one bound is one setting. Method: lease_max_s below the default ttl."""
    config = parse({"lease_max_s": 20})
    assert (20, 20) == (config.lease_ttl_s, config.lease_max_s)


@pytest.mark.parametrize("given_peers", [["10.0.0.0/8", " fd00::7 ", "node-1"], "10.0.0.0/8,fd00::7, node-1,"])
def test_peers_may_be_a_list_or_a_text(given_peers: object) -> None:
    """Goal: both spellings users try work. Method: the same three entries in each."""
    assert ("10.0.0.0/8", "fd00::7", "node-1") == parse({"peers": given_peers}).peers


def test_the_secret_never_shows() -> None:
    """Goal: a log of the settings is safe. Method: look for it in the text of the config."""
    config = parse({}, {"VLLM_MOONCAKE_ASCEND_SECRET": SECRET})
    assert (SECRET.encode(), True, False) == (config.secret, "secret='set'" in repr(config), SECRET in repr(config))


def test_the_secret_is_read_from_its_file() -> None:
    """Goal: a mounted secret works, its final newline does not matter. Method: a reader that gives the content."""
    config, _ = parse_p2p(
        {"cluster_secret_file": "/run/secret"},
        {"VLLM_MOONCAKE_ASCEND_SECRET": "another secret, of the environment"},
        device_type="cpu",
        default_host="::1",
        read_text={"/run/secret": SECRET + "\n"}.__getitem__,
    )
    assert SECRET.encode() == config.secret


@pytest.mark.parametrize(("content", "complaint"), [(OSError("no such file"), "no such file"), (" \n", "is empty")])
def test_a_secret_file_without_a_secret_is_refused(content: object, complaint: str) -> None:
    """Goal: a cluster never starts open because a file was missing. Method: an unreadable and an empty file."""

    def read_text(path: str) -> str:
        if isinstance(content, OSError):
            raise content
        return str(content)

    with pytest.raises(ConfigError, match=complaint):
        parse_p2p({"cluster_secret_file": "f"}, {}, device_type="cpu", default_host="::1", read_text=read_text)


@pytest.mark.parametrize(
    ("extra", "environ", "warning"),
    [
        ({"num_workers": 10}, {}, "num_workers is ignored: one thread per worker"),
        ({"prefill": {"tp_size": 2}}, {}, "prefill is ignored: engines exchange it"),
        ({"mooncake_protocol": "tcp"}, {}, "mooncake_protocol='tcp' is taken for protocol"),
        ({"mooncake_protocol": "rdma", "protocol": "tcp"}, {}, "mooncake_protocol is ignored: protocol is set too"),
        ({"cluster_secret": SECRET}, {}, "prefer VLLM_MOONCAKE_ASCEND_SECRET"),
        ({}, {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998"}, "VLLM_MOONCAKE_BOOTSTRAP_PORT is ignored: there is no bootstrap"),
        (
            {},
            {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "480"},
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=480 is taken for lease_max_s",
        ),
        (
            {},
            {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "x"},
            "'x' is ignored: lease_max_s must be a number of seconds, 1 to 3600",
        ),
        (
            {},
            {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "0"},
            "'0' is ignored: lease_max_s must be a number of seconds, 1 to 3600",
        ),
        ({"lease_max_s": 60}, {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "9"}, "is ignored: lease_max_s is set"),
    ],
)
def test_settings_of_other_connectors_are_told_about(extra: dict[str, object], environ: dict[str, str], warning: str) -> None:
    """Goal: who migrates learns what his keys do here. Method: one borrowed setting at a time."""
    found = warnings_of(extra, environ)
    assert (1, True) == (len(found), warning in found[0])


def test_borrowed_settings_have_their_meaning() -> None:
    """Goal: "taken for" is true. Method: a key and a variable that stand for ours."""
    config = parse({"mooncake_protocol": "rdma"}, {"VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "480"})
    assert ("rdma", 480.0) == (config.protocol, config.lease_max_s)


@pytest.mark.parametrize(("value", "is_strict"), [("1", True), ("0", False), ("", False)])
def test_strictness_is_switched_by_its_variable(value: str, is_strict: bool) -> None:
    """Goal: tests hear of every broken invariant. Method: the variable on, off and empty."""
    assert is_strict == parse({}, {"VLLM_MOONCAKE_ASCEND_STRICT": value}).is_strict


def test_a_port_that_ascend_may_take_is_warned_about() -> None:
    """Goal: no start fails at random. Method: a fixed port inside Ascend's range, on an NPU and on a CPU."""
    found = warnings_of({"side_channel_port": 20_500}, device="npu")
    assert (True, ()) == ("takes ports at random" in found[0], warnings_of({"side_channel_port": 20_500}))


def test_the_configuration_page_is_current() -> None:
    """Goal: docs/configuration.md never falls behind. Method: compare with what the table prints."""
    assert page.page() == (ROOT / "docs" / "configuration.md").read_text(), "run: python -m vllm_mooncake_ascend.config"
