"""config.pool: settings of the prefix pool, wherever they stand; every wrong one names its place, key, value and range."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_mooncake_ascend import limits
from vllm_mooncake_ascend.config import PoolConfig, keys, parse_p2p, parse_pool, pool_keys, reading
from vllm_mooncake_ascend.errors import ConfigError

MASTER = "10.0.0.1:50051"
PATH = "/etc/mooncake.json"
IN_FILE = {"MOONCAKE_CONFIG_PATH": PATH}


def parse(
    extra: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    file: Mapping[str, object] | str | None = None,
    device: str = "cpu",
) -> tuple[PoolConfig, tuple[str, ...]]:
    """Settings and warnings; `file` is what stands at PATH."""
    text = file if isinstance(file, str) else json.dumps(file)
    return parse_pool(
        extra or {}, environ or {}, device_type=device, default_host="10.0.0.9", read_text={PATH: text}.__getitem__
    )


def with_master(**extra: object) -> PoolConfig:
    """The settings of a key or two, which bring no warning."""
    config, warnings = parse({"master_address": MASTER, **extra})
    assert () == warnings
    return config


def from_file(**content: object) -> tuple[PoolConfig, tuple[str, ...]]:
    """Of a file that names the master, and the keys given."""
    return parse({}, IN_FILE, file={"master_server_address": MASTER, **content})


def refusal(
    extra: Mapping[str, object], environ: Mapping[str, str] | None = None, *, file: Mapping[str, object] | str | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(extra, environ, file=file)
    return str(caught.value)


def test_the_address_of_the_master_is_enough() -> None:
    """Goal: the pool needs one setting. Method: compare with the values of the design page and of `limits`."""
    expected = PoolConfig(
        load_failure_policy="recompute",
        protocol="tcp",
        device_name="",
        host="10.0.0.9",
        master_address=MASTER,
        segment_bytes=1 << 30,
        num_replicas=1,
        soft_pin=False,
        preferred_segments=(),
        tenant="",
        reads_apart=True,
        loads=True,
        saves=None,
        save_decode=False,
        min_hit_tokens=1,
        lookup_wait_s=0.2,
        load_wait_s=10.0,
        object_lease_s=30.0,
        max_saved_ratio=0.25,
        weights_version="",
        allow_private_hashes=False,
        empty_step_wait_s=0.005,
        tame_queue_spin=True,
        is_strict=False,
    )
    assert (expected, ()) == parse({"master_address": MASTER})


def test_without_a_master_all_ways_to_name_one_are_told() -> None:
    """Goal: the first error is the last. Method: no setting at all."""
    message = refusal({})
    ways = ("master_address", "mooncake_config_path", "MOONCAKE_CONFIG_PATH", "master_server_address", "MOONCAKE_MASTER")
    command = "mooncake_master --rpc_port=50051 --default_kv_lease_ttl=30000 --client_ttl=60"
    assert [] == [way for way in (*ways, command) if way not in message]


# --- single values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"master_address": "10.0.0.1"}, "master_address='10.0.0.1' must be host:port (10.0.0.7:50051), or an address that"),
        ({"master_address": "0.0.0.0:50051"}, "master_address='0.0.0.0:50051' must be host:port"),
        ({"master_address": "h:0"}, "master_address='h:0' must be host:port"),
        ({"master_address": "h:65536"}, "master_address='h:65536' must be host:port"),
        ({"master_address": "::1:50051"}, "master_address='::1:50051' must be host:port"),
        ({"master_address": "[::1:50051"}, "master_address='[::1:50051' must be host:port"),
        ({"master_address": "http://h:50051"}, "master_address='http://h:50051' must be host:port"),
        ({"master_address": "etcd://"}, "master_address='etcd://' must be host:port"),
        ({"master_address": 50051}, "master_address=50051 must be host:port"),
        ({"segment_bytes": -1}, "segment_bytes=-1 must be 0, or a size of 16 MiB to 16 TiB: bytes, or a text such as '4GB'"),
        ({"segment_bytes": 4}, "segment_bytes=4 must be 0, or a size of 16 MiB"),
        ({"segment_bytes": (16 << 20) - 1}, "must be 0, or a size of 16 MiB"),
        ({"segment_bytes": "17TB"}, "segment_bytes='17TB' must be 0, or a size of 16 MiB to 16 TiB"),
        ({"segment_bytes": "4 gigs"}, "segment_bytes='4 gigs' must be 0, or a size"),
        ({"segment_bytes": 4e9}, "segment_bytes=4000000000.0 must be 0, or a size"),
        ({"segment_bytes": True}, "segment_bytes=True must be 0, or a size of 16 MiB to 16 TiB"),
        ({"segment_bytes": "-4GB"}, "(leave it out for 1 GiB)"),
        ({"num_replicas": 0}, "num_replicas=0 must be a whole number of 1 to 16 (leave it out for 1)"),
        ({"num_replicas": 17}, "num_replicas=17 must be a whole number of 1 to 16"),
        ({"soft_pin": 1}, "soft_pin=1 must be true or false"),
        ({"preferred_segments": ["node-1"]}, "preferred_segments=['node-1'] must be a list of segments as Mooncake names them"),
        ({"preferred_segments": 7}, "preferred_segments=7 must be a list of segments"),
        ({"tenant": 7}, "tenant=7 must be a text"),
        ({"reads_apart": "no"}, "reads_apart='no' must be true or false"),
        ({"loads": None}, "loads=None must be true or false"),
        ({"saves": "yes"}, "saves='yes' must be true or false"),
        ({"min_hit_tokens": 0}, "min_hit_tokens=0 must be a whole number of 1 to 1048576"),
        (
            {"lookup_wait_ms": 10_001},
            "lookup_wait_ms=10001 must be a number of milliseconds, 0 to 10000",
        ),
        ({"lookup_wait_ms": -1}, "lookup_wait_ms=-1 must be a number of milliseconds, 0 to 10000"),
        ({"load_wait_s": 0}, "load_wait_s=0 must be a number of seconds, 0.01 to 300"),
        ({"object_lease_s": 30_000}, "object_lease_s=30000 must be a number of seconds, 0.1 to 3600"),
        ({"max_saved_ratio": 25}, "max_saved_ratio=25 must be a share, 0.01 to 0.95"),
        ({"weights_version": 2}, "weights_version=2 must be a text"),
        ({"allow_private_hashes": "true"}, "allow_private_hashes='true' must be true or false"),
        ({"transfer_host": "::"}, "transfer_host='::' must be an IP address or host name that peers can connect to"),
        ({"protocol": "nvlink"}, "protocol='nvlink' must be 'tcp' or 'rdma' or 'ascend'"),
        ({"empty_step_wait_ms": 51}, "empty_step_wait_ms=51 must be a number of milliseconds, 0 to 50"),
        ({"segment_size": "4GB"}, "unknown key 'segment_size'; did you mean 'segment_bytes'?"),
        ({"lookup_wait_s": 1}, "unknown key 'lookup_wait_s'; did you mean 'lookup_wait_ms'?"),
        ({"lease_ttl_s": 30}, "lease_ttl_s is a setting of MooncakeConnectorV1 alone; leave it out"),
        ({"prefix_pooling": True}, "prefix_pooling adds the pool to MooncakeConnectorV1; this connector is the pool itself"),
    ],
)
def test_a_wrong_key_is_refused_with_place_value_range_and_remedy(extra: dict[str, object], message: str) -> None:
    """Goal: the operator mends it from the message alone. Method: one wrong setting at a time, the master being named."""
    found = refusal({"master_address": MASTER, **extra})
    assert (True, True) == (message in found, found.startswith("kv_connector_extra_config"))


@pytest.mark.parametrize(
    "address", ["node-1:50051", "[fd00::1]:50051", "etcd://a:2379;b:2379", "redis://h:6379", "k8s://ns/name"]
)
def test_every_kind_of_master_address_is_taken(address: str) -> None:
    """Goal: what Mooncake resolves passes. Method: one of each kind."""
    assert address == with_master(master_address=address).master_address


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        (0, 0),
        ("0", 0),
        ("0GB", 0),
        (16 << 20, 16 << 20),
        ("16777216", 16 << 20),
        ("16777216B", 16 << 20),
        ("32768 kb", 32 << 20),
        ("512MiB", 512 << 20),
        ("512m", 512 << 20),
        ("4GB", 4 << 30),
        (" 4 gb ", 4 << 30),
        ("1.5GB", 3 << 29),
        ("16TB", 16 << 40),
    ],
)
def test_sizes_are_read_as_mooncake_reads_them(written: object, num_bytes: int) -> None:
    """Goal: a size means the same in every program of the pool. Method: each unit, with and without the i, in any case."""
    assert num_bytes == with_master(segment_bytes=written).segment_bytes


@given(st.integers(limits.SEGMENT_MIN_BYTES, limits.SEGMENT_MAX_BYTES))
def test_a_size_as_we_write_it_is_read_back(num_bytes: int) -> None:
    """Goal: the bounds a message names can be set. Method: write any size as messages do, and read it."""
    written = reading.size(num_bytes).replace(" bytes", "")
    assert num_bytes == with_master(segment_bytes=written).segment_bytes


_junk = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.lists(st.text(max_size=5))
_inline_names = [key.name for key in (*keys.SHARED_KEYS, *pool_keys.POOL_KEYS) if key.name != "mooncake_config_path"]
_file_names = [*(entry.name for entry in pool_keys.FILE_KEYS), "mode", "other"]


@given(st.dictionaries(st.sampled_from(_inline_names), _junk, max_size=3), st.dictionaries(st.sampled_from(_file_names), _junk))
def test_any_values_give_a_config_or_a_config_error(extra: dict[str, object], file: dict[str, object]) -> None:
    """Goal: no setting raises anything else, and the relations hold. Method: any JSON value under every key of both places."""
    try:
        config, _ = parse({"master_address": MASTER, **extra}, IN_FILE, file=json.dumps(file))
    except ConfigError:
        return
    assert config.load_wait_s < config.object_lease_s / 2
    assert config.segment_bytes == 0 or limits.SEGMENT_MIN_BYTES <= config.segment_bytes <= limits.SEGMENT_MAX_BYTES
    assert not (config.save_decode and config.saves is False)


# --- relations ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device_type", "wait_s"), [("cpu", 0.2), ("npu", 0.005), ("cuda", 0.005)])
def test_a_lookup_may_take_longer_where_engines_share_cores(device_type: str, wait_s: float) -> None:
    """Goal: the pool works without a setting. Method: the default of each device."""
    config, _ = parse_pool({"master_address": MASTER}, {}, device_type=device_type, default_host="10.0.0.1")
    assert wait_s == config.lookup_wait_s


def test_a_load_must_end_well_within_the_object_lease() -> None:
    """Goal: nothing is loaded that may have been evicted. Method: half a lease, and a hair less."""
    found = refusal({"master_address": MASTER, "load_wait_s": 15})
    assert "load_wait_s=15 must be below half of object_lease_s=30" in found
    assert "--default_kv_lease_ttl" in found
    assert 14.9 == with_master(load_wait_s=14.9).load_wait_s


def test_a_short_object_lease_shortens_the_load_that_nobody_set() -> None:
    """Goal: lowering one bound is one setting. Method: the lease vllm-ascend's guide starts its master with."""
    config = with_master(object_lease_s=11)
    assert (11, 11 / 3) == (config.object_lease_s, config.load_wait_s)


def test_saving_decode_needs_saving() -> None:
    """Goal: a contradiction is no guess. Method: both keys."""
    assert "save_decode=true saves, but saves=false" in refusal({"master_address": MASTER, "saves": False, "save_decode": True})


@pytest.mark.parametrize(
    ("extra", "role", "saves"),
    [
        ({}, "kv_both", True),
        ({}, "kv_producer", True),
        ({}, "kv_consumer", False),
        ({"save_decode": True}, "kv_consumer", True),
        ({"saves": True}, "kv_consumer", True),
        ({"saves": False}, "kv_both", False),
    ],
)
def test_who_saves_follows_the_role_unless_it_is_set(extra: dict[str, object], role: str, saves: bool) -> None:
    """Goal: roles mean what vLLM says. Method: each role without a key, and the keys that decide."""
    assert saves is with_master(**extra).saves_as(role)


# --- places and their order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "file", "environ", "master"),
    [
        ({}, None, {"MOONCAKE_MASTER": "env:1"}, "env:1"),
        ({}, {"master_server_address": "file:1"}, {"MOONCAKE_MASTER": "env:1"}, "file:1"),
        ({}, {"master_server_address": ""}, {"MOONCAKE_MASTER": "env:1"}, "env:1"),
        ({}, {"master_server_address": None}, {"MOONCAKE_MASTER": " env:1 "}, "env:1"),
        ({"master_address": "key:1"}, {"master_server_address": "file:1"}, {"MOONCAKE_MASTER": "env:1"}, "key:1"),
        ({"master_address": ""}, {"master_server_address": "file:1"}, {}, "file:1"),
    ],
)
def test_a_key_beats_the_file_and_the_file_the_environment(
    extra: dict[str, object], file: dict[str, object] | None, environ: dict[str, str], master: str
) -> None:
    """Goal: one order for all. Method: the master's address in every set of places."""
    environ = environ if file is None else {**environ, **IN_FILE}
    assert master == parse(extra, environ, file=file)[0].master_address


def test_an_address_that_is_not_used_is_named() -> None:
    """Goal: who sets the master twice learns which one counts. Method: another one in the environment, then the same."""
    _, warnings = parse({"master_address": MASTER}, {"MOONCAKE_MASTER": "other:1"})
    assert (
        "environment variable MOONCAKE_MASTER='other:1' is ignored: a key or mooncake.json sets 10.0.0.1:50051",
    ) == warnings
    assert () == parse({"master_address": MASTER}, {"MOONCAKE_MASTER": MASTER})[1]


@pytest.mark.parametrize("address", ["redis://user:hunter2@h:6379", "redis://:hun/ter2@h:6379", "user:hunter2@h:50051"])
def test_a_password_in_an_address_is_refused_and_not_repeated(address: str) -> None:
    """Goal: Mooncake neither reads nor hides it, so no log may get it by us. Method: it stands in each place an address can."""
    places = (
        lambda: refusal({"master_address": address}),
        lambda: refusal({"master_server_address": address}),
        lambda: refusal({}, {"MOONCAKE_MASTER": address}),
        lambda: refusal({}, IN_FILE, file={"master_server_address": address}),
        lambda: parse({"master_address": MASTER}, {"MOONCAKE_MASTER": address})[1][0],
    )
    messages = [place() for place in places]
    assert [True] * len(places) == ["(not shown)@h:" in message for message in messages]
    assert [] == [message for message in messages if "hunter2" in message or "ter2" in message]
    assert ["set MC_REDIS_PASSWORD" in message for message in messages[:-1]] == [True] * 4


def test_a_borrowed_address_is_repeated_without_its_password() -> None:
    """Goal: the warning about a borrowed name says what it took. Method: the refusal comes after it."""
    warnings: list[str] = []
    vocabulary = reading.Vocabulary(keys=pool_keys.POOL_KEYS, borrowed=pool_keys.POOL_BORROWED_KEYS)
    with pytest.raises(ConfigError):
        reading.read_options({"master_server_address": "redis://:hunter2@h:6379"}, vocabulary, warnings)
    assert ["master_server_address='(not shown)@h:6379' is taken for master_address, its name here"] == warnings


def test_a_wrong_variable_is_refused_by_its_name() -> None:
    """Goal: the message names the place. Method: a master without a port."""
    assert refusal({}, {"MOONCAKE_MASTER": "h"}).startswith("environment variable: MOONCAKE_MASTER='h' must be host:port")


def test_the_key_of_the_path_beats_the_variable() -> None:
    """Goal: two instances of one machine can have two files. Method: a variable that leads nowhere."""
    file = {"master_server_address": MASTER, "global_segment_size": "2GB"}
    config, _ = parse({"mooncake_config_path": PATH}, {"MOONCAKE_CONFIG_PATH": "/nowhere"}, file=file)
    assert 2 << 30 == config.segment_bytes


def test_the_host_is_the_most_specific_one_given() -> None:
    """Goal: key before variables before the machine's own. Method: take away one after the other."""
    environ = {"VLLM_HOST_IP": "10.0.0.5", "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "10.0.0.6"}
    hosts = [
        parse({"master_address": MASTER, "transfer_host": "10.0.0.7"}, environ)[0].host,
        parse({"master_address": MASTER}, environ)[0].host,
        parse({"master_address": MASTER}, {"VLLM_HOST_IP": "10.0.0.5"})[0].host,
        with_master().host,
    ]
    assert ["10.0.0.7", "10.0.0.6", "10.0.0.5", "10.0.0.9"] == hosts


def test_a_host_of_the_environment_that_nobody_reaches_is_refused() -> None:
    """Goal: the message names the variable. Method: the address that means all."""
    assert "VLLM_HOST_IP='0.0.0.0' must be an IP address" in refusal({"master_address": MASTER}, {"VLLM_HOST_IP": "0.0.0.0"})


# --- mooncake.json ------------------------------------------------------------------------------------------------------


def test_the_file_of_vllm_works_unchanged() -> None:
    """Goal: who comes from vLLM changes nothing. Method: the file of its guide, for a store of its own."""
    config, warnings = from_file(
        mode="standalone-store",
        metadata_server="P2PHANDSHAKE",
        global_segment_size=0,
        local_buffer_size="4GB",
        protocol="rdma",
        device_name="mlx5_0",
        enable_offload=False,
        tenant_id="default",
    )
    found = (config.master_address, config.segment_bytes, config.protocol, config.device_name, config.tenant)
    assert (MASTER, 0, "rdma", "mlx5_0", "") == found
    assert [True] == [warning.startswith(f"{PATH}: local_buffer_size is ignored: there is no staging") for warning in warnings]


def test_the_file_of_vllm_ascend_works_unchanged() -> None:
    """Goal: who comes from vllm-ascend changes nothing. Method: the keys it has, with what its guide sets."""
    config, warnings = parse(
        {},
        IN_FILE,
        file={
            "metadata_server": "P2PHANDSHAKE",
            "protocol": "ascend",
            "device_name": "",
            "master_server_address": MASTER,
            "global_segment_size": "1GB",
            "preferred_segment": False,
            "prefer_alloc_in_same_node": True,
            "enable_ssd_offload": False,
            "ssd_offload_path": "",
        },
        device="npu",
    )
    assert ("ascend", 1 << 30, ()) == (config.protocol, config.segment_bytes, config.preferred_segments)
    assert [True] == ["prefer_alloc_in_same_node is ignored: a get with it" in warning for warning in warnings]


@pytest.mark.parametrize(
    ("content", "num_bytes"),
    [
        ({}, 1 << 30),
        ({"mode": "embedded"}, 1 << 30),
        ({"mode": "embedded", "global_segment_size": "2GB"}, 2 << 30),
        ({"mode": "standalone-store"}, 0),
        ({"mode": "standalone-store", "global_segment_size": "0"}, 0),
        ({"global_segment_size": 0}, 0),
    ],
)
def test_the_mode_says_who_owns_memory(content: dict[str, object], num_bytes: int) -> None:
    """Goal: both modes as vLLM has them. Method: each with every size that goes with it."""
    assert num_bytes == from_file(**content)[0].segment_bytes


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"mode": "embedded", "global_segment_size": 0}, "mode='embedded' lends memory, but global_segment_size is 0"),
        (
            {"mode": "standalone-store", "global_segment_size": "4GB"},
            "'standalone-store' lends no memory, but global_segment_size='4GB'",
        ),
        ({"mode": "standalone"}, "mode='standalone' must be 'embedded' or 'standalone-store'"),
        ({"global_segment_size": "4XB"}, "global_segment_size='4XB' must be 0, or a size of 16 MiB to 16 TiB"),
        ({"master_server_address": "master"}, "master_server_address='master' must be host:port"),
        ({"protocol": "cxl"}, "protocol='cxl' must be 'tcp' or 'rdma' or 'ascend'"),
        ({"device_name": {"0": "mlx5_0"}}, "device_name={'0': 'mlx5_0'} must be a text"),
        ({"preferred_segment": "node-1"}, "preferred_segment='node-1' must be a list of segments"),
        ("[]", "not one JSON object of keys and values: Expected `object`, got `array`"),
        ("{'a': 1}", "not one JSON object of keys and values: JSON is malformed"),
        ("", "not one JSON object of keys and values: Input data was truncated"),
    ],
)
def test_a_wrong_value_in_the_file_names_the_file(file: dict[str, object] | str, message: str) -> None:
    """Goal: the operator opens the right file. Method: one wrong value at a time."""
    found = refusal({}, IN_FILE, file=file)
    assert (True, True) == (message in found, found.startswith(f"{PATH}: "))


@pytest.mark.parametrize("error", [FileNotFoundError("no such file"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte")])
def test_a_file_that_cannot_be_read_is_refused(error: Exception) -> None:
    """Goal: no engine starts without the pool because its file was missing. Method: a reader that fails."""

    def read_text(path: str) -> str:
        raise error

    with pytest.raises(
        ConfigError, match=r"mooncake.json at '/etc/mooncake.json' cannot be read: .*; set mooncake_config_path"
    ):
        parse_pool({}, IN_FILE, device_type="cpu", default_host="::1", read_text=read_text)
    with pytest.raises(ConfigError, match="cannot be read here"):
        parse_pool({}, IN_FILE, device_type="cpu", default_host="::1")


def test_what_the_file_says_to_other_programs_is_named_and_ignored() -> None:
    """Goal: a file of several programs is no error. Method: an unknown key beside ours."""
    _, warnings = from_file(global_segment_sizes="4GB")
    assert (
        "/etc/mooncake.json: global_segment_sizes is unknown here and ignored; did you mean 'global_segment_size'?",
    ) == warnings


@pytest.mark.parametrize(
    "entry", [entry for entry in pool_keys.FILE_KEYS if not entry.stands_for], ids=lambda entry: entry.name
)
def test_a_trap_in_the_file_is_ignored_with_the_reason(entry: keys.Borrowed) -> None:
    """Goal: nobody believes a setting that does nothing. Method: every trap with a value that asks for something."""
    plain, _ = from_file()
    config, warnings = from_file(**{entry.name: "something"})
    assert (plain, (f"{PATH}: {entry.name} is ignored: {entry.remark}",)) == (config, warnings)
    assert [()] * len(entry.quiet) == [from_file(**{entry.name: value})[1] for value in entry.quiet]


# --- settings of other connectors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "field", "value"),
    [
        ({"enable_lookup": False}, "loads", False),
        ({"save_decode_cache": True}, "save_decode", True),
        ({"consumer_is_to_put": True}, "saves", True),
        ({"cache_prefix": "blue"}, "tenant", "blue"),
        ({"tenant_id": "blue"}, "tenant", "blue"),
        ({"preferred_segment": "10.0.0.7:50053"}, "preferred_segments", ("10.0.0.7:50053",)),
        ({"global_segment_size": "2GB"}, "segment_bytes", 2 << 30),
        ({"mooncake_protocol": "rdma"}, "protocol", "rdma"),
    ],
)
def test_a_borrowed_key_has_its_meaning(extra: dict[str, object], field: str, value: object) -> None:
    """Goal: "taken for" is true, and told. Method: each key that stands for one of ours."""
    config, warnings = parse({"master_address": MASTER, **extra})
    assert (value, 1, True) == (getattr(config, field), len(warnings), f"{next(iter(extra))}=" in warnings[0])


def test_two_borrowed_names_of_one_key_are_not_both_taken() -> None:
    """Goal: the log does not claim what is not so. Method: two names for the tenant, in both orders."""
    found = [
        parse({"master_address": MASTER, **names})
        for names in ({"tenant_id": "a", "cache_prefix": "b"}, {"cache_prefix": "b", "tenant_id": "a"})
    ]
    ignored = [warnings[1] for _, warnings in found]
    assert ["a", "b"] == [config.tenant for config, _ in found]
    assert ["cache_prefix is ignored: tenant is set too", "tenant_id is ignored: tenant is set too"] == ignored


@pytest.mark.parametrize("entry", pool_keys.POOL_BORROWED_KEYS, ids=lambda entry: entry.name)
def test_a_borrowed_key_that_asks_for_what_happens_anyway_is_silent(entry: keys.Borrowed) -> None:
    """Goal: the log names what differs, nothing else. Method: the quiet values of each, against a pool without the key."""
    found = [parse({"master_address": MASTER, entry.name: value}) for value in entry.quiet]
    assert [(with_master(), ())] * len(entry.quiet) == found


@pytest.mark.parametrize(
    "entry", [entry for entry in pool_keys.POOL_BORROWED_KEYS if not entry.stands_for], ids=lambda entry: entry.name
)
def test_a_borrowed_key_without_meaning_is_named(entry: keys.Borrowed) -> None:
    """Goal: who migrates learns what his keys do here. Method: each with a value nobody gives it by default."""
    config, warnings = parse({"master_address": MASTER, entry.name: "something"})
    assert (with_master(), (f"{entry.name} is ignored: {entry.remark}",)) == (config, warnings)


@pytest.mark.parametrize(
    ("environ", "field", "value", "warning"),
    [
        ({"MOONCAKE_GLOBAL_SEGMENT_SIZE": "2GB"}, "segment_bytes", 2 << 30, "MOONCAKE_GLOBAL_SEGMENT_SIZE=2GB is taken for"),
        ({"MOONCAKE_GLOBAL_SEGMENT_SIZE": "x"}, "segment_bytes", 1 << 30, "'x' is ignored: segment_bytes must be 0, or a size"),
        ({"MOONCAKE_PREFERRED_SEGMENT": "a:1,b:2"}, "preferred_segments", ("a:1", "b:2"), "is taken for preferred_segments"),
        ({"MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "worker-a:50053"}, "host", "10.0.0.9", "is ignored: transfer_host must be"),
        ({"VLLM_MOONCAKE_LOAD_RECV_THREADS": "4"}, "host", "10.0.0.9", "is ignored: 2 gets of a worker run at once"),
    ],
)
def test_variables_of_other_connectors_are_told_about(environ: dict[str, str], field: str, value: object, warning: str) -> None:
    """Goal: a variable of the machine has its meaning or none, never an error. Method: right ones and wrong ones."""
    config, warnings = parse({"master_address": MASTER}, environ)
    assert (value, 1, True) == (getattr(config, field), len(warnings), warning in warnings[0])


# --- with the P2P connector ---------------------------------------------------------------------------------------------


def both(extra: Mapping[str, object], environ: Mapping[str, str] | None = None, file: Mapping[str, object] | None = None):
    """The settings of MooncakeConnectorV1, and its warnings."""
    read_text = {PATH: json.dumps(file)}.__getitem__
    return parse_p2p(extra, environ or {}, device_type="cpu", default_host="10.0.0.9", read_text=read_text)


def test_prefix_pooling_adds_the_pool() -> None:
    """Goal: one connector, one set of settings, each key once. Method: keys of both, and what they share."""
    config, warnings = both(
        {
            "prefix_pooling": True,
            "master_address": MASTER,
            "segment_bytes": "2GB",
            "side_channel_host": "10.0.0.3",
            "lease_ttl_s": 20,
            "load_failure_policy": "fail",
            "empty_step_wait_ms": 0,
        }
    )
    pool = config.pool
    assert pool is not None
    assert (20, 2 << 30, MASTER, ()) == (config.lease_ttl_s, pool.segment_bytes, pool.master_address, warnings)
    shared = ("load_failure_policy", "protocol", "device_name", "empty_step_wait_s", "tame_queue_spin", "is_strict")
    assert [getattr(config, name) for name in shared] == [getattr(pool, name) for name in shared]
    assert ("10.0.0.3", "10.0.0.3") == (config.transfer_host, pool.host)


def test_the_pool_may_have_an_address_of_its_own() -> None:
    """Goal: transfer_host is for Mooncake in both. Method: it differs from the side channel's."""
    config, _ = both(
        {"prefix_pooling": True, "master_address": MASTER, "side_channel_host": "10.0.0.3", "transfer_host": "10.1.0.3"}
    )
    assert config.pool is not None
    assert ("10.0.0.3", "10.1.0.3", "10.1.0.3") == (config.side_channel_host, config.transfer_host, config.pool.host)


def test_prefix_pooling_reads_the_file() -> None:
    """Goal: P2P users bring their pool along. Method: only the variable names it."""
    config, _ = both({"prefix_pooling": True}, IN_FILE, {"master_server_address": MASTER})
    assert config.pool is not None
    assert MASTER == config.pool.master_address


def test_one_process_has_one_transport() -> None:
    """Goal: the second protocol is not silently the first. Method: a file that disagrees, then a key that settles it."""
    file = {"master_server_address": MASTER, "protocol": "rdma"}
    with pytest.raises(ConfigError, match=r"transfers use protocol 'tcp', but mooncake\.json says 'rdma' for the pool"):
        both({"prefix_pooling": True}, IN_FILE, file)
    config, _ = both({"prefix_pooling": True, "protocol": "rdma"}, IN_FILE, file)
    assert config.pool is not None
    assert ("rdma", "rdma") == (config.protocol, config.pool.protocol)


@pytest.mark.parametrize("key", pool_keys.POOL_KEYS, ids=lambda key: key.name)
def test_a_key_of_the_pool_needs_prefix_pooling(key: keys.Key) -> None:
    """Goal: a pool that is not there is not believed in. Method: every key of the pool with prefix_pooling off."""
    with pytest.raises(ConfigError, match=f"{key.name} is a setting of the prefix pool; set prefix_pooling=true"):
        both({key.name: key.default, "prefix_pooling": False})


def test_without_prefix_pooling_the_pool_of_others_is_no_concern() -> None:
    """Goal: variables of the machine and keys of others harm no P2P engine. Method: a file that is not there, a key."""
    config, warnings = both(
        {"save_decode_cache": True, "load_async": True}, {"MOONCAKE_CONFIG_PATH": "/nowhere", "MOONCAKE_MASTER": "?"}
    )
    assert (None, ("save_decode_cache is ignored: it is about the prefix pool, and prefix_pooling is not set",)) == (
        config.pool,
        warnings,
    )


@pytest.mark.parametrize("entry", keys.P2P_BORROWED_KEYS, ids=lambda entry: entry.name)
def test_the_pool_alone_names_what_is_about_transfers(entry: keys.Borrowed) -> None:
    """Goal: the reason fits the connector. Method: each key others have for transfers."""
    assert (f"{entry.name} is ignored: it is about transfers from prefill to decode",) == parse(
        {"master_address": MASTER, entry.name: 1}
    )[1]


def test_no_key_stands_in_two_tables() -> None:
    """Goal: one key, one meaning. Method: the names of all tables, and those of others' connectors."""
    tables = (keys.SHARED_KEYS, keys.P2P_KEYS, pool_keys.POOL_KEYS)
    borrowed = (keys.SHARED_BORROWED_KEYS, keys.P2P_BORROWED_KEYS, pool_keys.POOL_BORROWED_KEYS)
    names = [entry.name for table in (*tables, *borrowed) for entry in table]
    assert sorted(set(names)) == sorted(names)


def test_whatever_a_borrowed_name_stands_for_is_a_key() -> None:
    """Goal: "taken for" names a key that exists. Method: all tables of others' names."""
    known = {key.name for key in (*keys.SHARED_KEYS, *keys.P2P_KEYS, *pool_keys.POOL_KEYS)}
    tables = (keys.SHARED_BORROWED_KEYS, pool_keys.POOL_BORROWED_KEYS, pool_keys.FILE_KEYS)
    tables += (keys.BORROWED_VARIABLES, pool_keys.POOL_BORROWED_VARIABLES)
    assert set() == {entry.stands_for for table in tables for entry in table if entry.stands_for} - known
