"""What is told of vLLM's block hashes is true of the installed vLLM: real configurations, real requests, real processes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CacheConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from vllm_mooncake_ascend.connectors import hashing
from vllm_mooncake_ascend.planner.pool_keys import Hashing

CACHE = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[])
ALGORITHMS = ["sha256", "sha256_cbor", *(["xxhash"] if importlib.util.find_spec("xxhash") else [])]
SEEDS = [None, "0", "7"]
HAS_FIXED_SEED = hasattr(kv_cache_utils, "resolve_none_hash_seed")
CHILD = """
import json, os, sys
from tests.connector.test_hashing import SEEDS, ALGORITHMS, tell
print(json.dumps([tell(algorithm, seed) for algorithm in ALGORITHMS for seed in SEEDS]))
"""


def config(algorithm: str = "sha256", **options: Any) -> VllmConfig:
    return VllmConfig(cache_config=CacheConfig(block_size=16, prefix_caching_hash_algo=algorithm, **options))


def set_seed(seed: str | None) -> None:
    """As vLLM reads it; of this process only."""
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed


@pytest.fixture(autouse=True)
def seed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests set the seed; afterwards it is what it was, here and in vLLM."""
    monkeypatch.setenv("PYTHONHASHSEED", "")
    monkeypatch.delenv("PYTHONHASHSEED")
    for name in ("NONE_HASH", "_NONE_HASH_SEED"):
        if hasattr(kv_cache_utils, name):
            monkeypatch.setattr(kv_cache_utils, name, getattr(kv_cache_utils, name))


def tell(algorithm: str, seed: str | None) -> dict[str, Any]:
    """What this process says of a configuration, and the hashes its vLLM really makes then."""
    set_seed(seed)
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    request = Request(
        request_id="r",
        prompt_token_ids=list(range(100, 140)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt="salt",
        block_hasher=kv_cache_utils.get_request_block_hasher(16, function),
    )
    facts = hashing.hashing_of(config(algorithm), CACHE)
    return {
        "reason": hashing.private_reason(config(algorithm)),
        "fingerprint": hashing.fingerprint(facts),
        "hashes": [block_hash.hex() for block_hash in request.block_hashes],
    }


def test_two_processes_have_equal_hashes_exactly_when_they_are_said_to_be_shared() -> None:
    """Goal: nobody waits for hits that cannot come. Method: the same prompt in two processes, by algorithm and seed."""
    children = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", CHILD], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    here, there = (json.loads(child.communicate(timeout=120)[0].splitlines()[-1]) for child in children)

    assert [2] * len(here) == [len(one["hashes"]) for one in here]
    assert [one["reason"] == "" for one in here] == [a["hashes"] == b["hashes"] for a, b in zip(here, there, strict=True)]
    for one, other in itertools.combinations(here, 2):
        if not one["reason"] and not other["reason"]:
            assert (one["fingerprint"] == other["fingerprint"]) == (one["hashes"] == other["hashes"])


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_a_seed_that_is_set_can_be_shared(algorithm: str) -> None:
    """Goal: the remedy that the message names helps. Method: set PYTHONHASHSEED."""
    set_seed("0")
    assert ("", "0") == (hashing.private_reason(config(algorithm)), hashing.hashing_of(config(algorithm), CACHE).seed)


def test_a_random_seed_is_told_with_a_remedy() -> None:
    """Goal: an operator knows what to change. Method: an algorithm whose seed is random in every vLLM."""
    reason = hashing.private_reason(config("xxhash"))
    named = ["prefix_caching_hash_algo=xxhash", "random seed", "PYTHONHASHSEED=0", "--prefix-caching-hash-algo sha256"]
    assert named == [word for word in named if word in reason]


def test_sha256_is_shared_without_a_setting_where_vllm_fixes_its_seed() -> None:
    """Goal: new vLLM needs no setting, old vLLM is not believed. Method: no PYTHONHASHSEED."""
    assert HAS_FIXED_SEED == (hashing.private_reason(config()) == "")


def test_an_algorithm_that_depends_on_the_process_is_never_shared() -> None:
    """Goal: Python's own hash is refused whatever the seed. Method: the name older versions have for it."""
    set_seed("0")
    old = config()
    object.__setattr__(old.cache_config, "prefix_caching_hash_algo", "builtin")
    assert "prefix_caching_hash_algo=builtin" in hashing.private_reason(old)


def test_the_dialect_is_that_of_vllms_own_keys() -> None:
    """Goal: engines whose extra keys differ share nothing. Method: the dialect names each part that went into the probe."""
    facts = hashing.hashing_of(config(), CACHE)
    assert ["adapter", "image", "salt"] == [word for word in ("adapter", "image", "salt") if word in facts.dialect]


def test_adapters_of_one_name_are_told_apart_exactly_when_their_hashes_differ() -> None:
    """Goal: LoRA requests are only shared where that is right. Method: one name, two folders, real hashes."""
    function = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(function)
    hashes = [
        Request(
            request_id="r",
            prompt_token_ids=list(range(16)),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=LoRARequest(lora_name="name", lora_int_id=1, lora_path=folder),
            block_hasher=kv_cache_utils.get_request_block_hasher(16, function),
        ).block_hashes
        for folder in ("/one", "/other")
    ]
    facts = hashing.hashing_of(config(), CACHE)
    assert (hashes[0] != hashes[1]) == hashing.tells_adapter_folders_apart(facts)


def test_tokens_of_a_hash_are_those_vllm_resolves() -> None:
    """Goal: blocks and hashes are matched by the right number of tokens. Method: what the configuration says, or says to
    resolve."""
    told = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[])
    told.hash_block_size = 8
    assert [16, 8] == [hashing.hash_block_tokens(config(), one) for one in (CACHE, told)]


def test_tokens_behind_a_block_are_part_of_the_hashing() -> None:
    """Goal: an engine whose hashes look ahead shares only with its like. Method: vLLM 0.33's name for it."""
    looking = config()
    if hasattr(looking, "num_hash_lookahead_tokens"):
        pytest.skip("this vLLM computes it itself")
    object.__setattr__(looking, "num_hash_lookahead_tokens", 2)
    plain, ahead = (hashing.hashing_of(one, CACHE) for one in (config(), looking))
    assert (0, 2) == (plain.lookahead_tokens, ahead.lookahead_tokens)
    assert hashing.fingerprint(plain) != hashing.fingerprint(ahead)


def test_a_fingerprint_covers_every_part() -> None:
    """Goal: equal log lines mean equal hashes. Method: change one part at a time."""
    parts: dict[str, Any] = {"algorithm": "a", "seed": "s", "dialect": "d", "block_tokens": 16, "lookahead_tokens": 0}
    changed = [Hashing(**{**parts, name: 1 if isinstance(value, int) else "x"}) for name, value in parts.items()]
    prints = [hashing.fingerprint(one) for one in (Hashing(**parts), *changed)]
    assert len(prints) == len(set(prints))
