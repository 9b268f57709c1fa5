"""LoRA adapters as part of a prompt's identity."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_mooncake_ascend.connectors import adapters, requests


def make_adapter(folder: Path, content: bytes) -> str:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(len(b"{}").to_bytes(8, "little") + b"{}" + content)
    return str(folder)


def request_with(path: str | None) -> SimpleNamespace:
    """As much of vLLM's Request as is looked at."""
    lora = None if path is None else SimpleNamespace(lora_name="same name", lora_path=path)
    return SimpleNamespace(
        lora_request=lora, block_hashes=[b"one", b"two"], prompt_token_ids=[1, 2, 3], cache_salt=None, mm_features=()
    )


def test_one_name_for_two_adapters_shares_nothing(tmp_path: Path) -> None:
    """Goal: the KV of one adapter is never taken for another's. Method: equal names and hashes, other bytes; and a copy at
    another place, which is the same adapter."""
    one, other = make_adapter(tmp_path / "one", b"aaaa"), make_adapter(tmp_path / "other", b"bbbb")
    copy = make_adapter(tmp_path / "copy", b"aaaa")

    found = [list(adapters.pool_hashes(request_with(path)) or ()) for path in (one, other, copy, None)]
    digests = [requests.prompt_digest(request_with(path)) for path in (one, other, copy, None)]

    assert found[0] == found[2]
    assert not set(found[0]) & set(found[1]) | set(found[0]) & set(found[3])
    assert [b"one", b"two"] == found[3]
    assert digests[0] == digests[2]
    assert 3 == len(set(digests))


def test_salted_hashes_grow_with_vllms_list(tmp_path: Path) -> None:
    """Goal: the list stays live. Method: append to vLLM's, and read by index and by slice."""
    request = request_with(make_adapter(tmp_path / "adapter", b"aaaa"))
    hashes = adapters.pool_hashes(request)
    assert hashes is not None
    before = list(hashes)

    request.block_hashes.append(b"three")

    assert 3 == len(hashes)
    assert before == list(hashes[:2])
    assert hashes[2] == hashes[2:][0]


def test_an_adapter_that_cannot_be_looked_at_is_not_pooled(tmp_path: Path) -> None:
    """Goal: a name alone is no identity. Method: a hub's name, and an empty folder."""
    assert adapters.pool_hashes(request_with("organisation/adapter")) is None
    assert adapters.pool_hashes(request_with(str(tmp_path))) is None


def test_an_adapter_loaded_again_is_looked_at_again(tmp_path: Path) -> None:
    """Goal: an adapter that was unloaded, changed and loaded again is another one. Method: one path, vLLM's next number."""
    request = request_with(make_adapter(tmp_path / "adapter", b"aaaa"))
    before = list(adapters.pool_hashes(request) or ())
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"other content")
    assert before == list(adapters.pool_hashes(request) or ())

    request.lora_request.lora_int_id = 2

    assert not set(before) & set(adapters.pool_hashes(request) or ())
